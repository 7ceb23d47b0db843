"""Starts a local Ray cluster or connects to an existing one. Places, finds, calls and ends actors.

If RAY_AUTH_MODE is `token`, Ray reads the cluster's token from the file RAY_AUTH_TOKEN_PATH. No
other user can read this file. The token is never in arguments or environment variables.
"""

import asyncio
import ctypes.util
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util import list_named_actors, placement_group_table
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.config.deployment import deployment_settings
from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.foundation.files import write_whole
from outrider.limits import LOG_BYTES_MAX, LOG_FILES_KEPT, PROCESS_START_S
from outrider.replica.ray_actor import ActorLocation

_log = logging.getLogger(__name__)
T = TypeVar("T")
CALLS_PER_ACTOR_MAX = 1000
"""Limit of concurrent calls to one actor. Ray also counts calls whose caller has died."""
RECONCILER = "reconciler"
RETRY_PERIOD_S = 1.0
_SAVED = b"changes"
_RANK = "-rank-"
"""Text between replica and rank in an actor's name. The actor of rank 0 has the replica's name."""


@contextmanager
def asking_head() -> Iterator[None]:
    """Turns errors of calls to Ray's head (GCS) into `Unavailable`."""
    try:
        yield
    except (ray.exceptions.RayError, OSError) as error:
        raise Unavailable(f"the Ray head does not answer: {one_line(error)}") from error


@dataclass(frozen=True)
class Demand:
    """What a replica needs: its actors' number, classes and library, and the resources of each."""

    role: str
    num_cpus: float
    num_gpus: float
    num_ranks: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    """The replica's name; empty in a role's demand."""
    classes: tuple[type, type] = (object, object)
    """The class of the actor of rank 0, and the class of the other ranks."""
    preload: str = ""
    """Name of a library, without `lib` and `.so`. If it is installed, actors load it first."""

    @property
    def each(self) -> dict[str, float]:
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def __str__(self) -> str:
        each = f"{self.num_cpus:g} CPUs and {self.num_gpus:g} GPUs"
        each += "".join(f" and {amount:g} {name}" for name, amount in self.resources.items())
        return each if self.num_ranks == 1 else f"{self.num_ranks} times {each}"


class Actor:
    def __init__(self, replica: str, handle: Any, rank: int = 0) -> None:
        self.replica = replica
        self.rank = rank
        self.name = f"{replica}{_RANK}{rank}" if rank else replica
        self.location = ActorLocation(0, "")
        self._handle = handle

    def start(self, kind: type, namespace: str, *arguments: object, **options: Any) -> None:
        actor = ray.remote(kind).options(
            name=self.name,
            namespace=namespace,
            lifetime="detached",
            max_concurrency=CALLS_PER_ACTOR_MAX,
            **options,
        )
        self._handle = actor.remote(*arguments)

    async def locate(self, timeout_s: float) -> bool:
        """Waits until the actor runs, and sets `location`. Returns False if the actor does not run
        after `timeout_s`. Raises `Unavailable` if the actor died."""
        try:
            self.location = await self.call("ping", timeout_s=timeout_s)
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                return False
            raise
        return True

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """Calls a method. Raises the method's `OutriderError`, and `Unavailable` if the actor died
        or does not answer within `timeout_s`."""
        called = getattr(self._handle, method).remote(*arguments)
        try:
            async with asyncio.timeout(timeout_s):
                return await _result(called)
        except TimeoutError as error:
            raise Unavailable(
                f"the {self.name} actor did not answer {method} in {timeout_s:g} s"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise Unavailable(f"the {self.name} actor died: {one_line(error)}") from error

    async def kill(self) -> None:
        with asking_head():
            await asyncio.to_thread(ray.kill, self._handle)


@dataclass(frozen=True)
class Cluster:
    """The actors of a deployment on a Ray cluster."""

    namespace: str
    local: bool
    """Whether the cluster is this machine alone, so that it cannot grow."""

    async def place(
        self, demands: Sequence[Demand], timeout_s: float, process_timeout_s: float
    ) -> list[list[Actor]]:
        """Starts the actors of all demands, and waits until all actors run. Returns the actors of
        each demand, by rank. Raises `ConfigError` if Ray has no room for all actors after
        `timeout_s`, or at once if a local cluster is too small. Raises `Unavailable` if an actor
        died, or if there is room but a process has not started after `process_timeout_s` more.
        After an error, no actor of the demands runs."""
        if self.local and (too_much := beyond(demands, resources())):
            raise ConfigError(_no_place("there is no place", too_much, demands))
        placed = [self._begin(demand) for demand in demands]
        actors = [actor for ranks in placed for actor in ranks]
        try:
            late = await _late(actors, timeout_s)
            if late and (homeless := await self._without_room(demands)):
                raise ConfigError(_no_place(f"no place within {timeout_s:g} s", homeless, demands))
            if late := await _late(late, process_timeout_s):
                names = ", ".join(actor.name for actor in late)
                limit_s = timeout_s + process_timeout_s
                raise Unavailable(f"the processes of {names} did not start within {limit_s:g} s")
        except BaseException:
            await self.remove(actors)
            raise
        return placed

    async def _without_room(self, demands: Sequence[Demand]) -> list[Demand]:
        """The demands for whose actors Ray has no room. If it has room, their processes run or are
        being started, which on a busy machine may take long. Ray tells the resources for which
        actors wait, but not which actors. So a demand without a placement group also counts as
        without room if an actor of another replica waits for equal resources. Raises
        `Unavailable`."""
        with asking_head():
            waiting = await asyncio.to_thread(_waiting_requests)
            groups = await asyncio.to_thread(placement_group_table)
        created = {group["name"] for group in groups.values() if group["state"] == "CREATED"}

        def has_room(demand: Demand) -> bool:
            if demand.num_ranks > 1 and demand.each:
                return self._group(demand.name) in created
            return not demand.each or _exact(demand.each) not in waiting

        return [demand for demand in demands if not has_room(demand)]

    async def remove(self, actors: Sequence[Actor]) -> None:
        await asyncio.gather(*(actor.kill() for actor in actors))
        for name in {actor.replica for actor in actors}:
            await asyncio.to_thread(_remove_group, self._group(name))

    async def free_groups(self, spared: Collection[str] = ()) -> None:
        """Removes the placement groups of all replicas but `spared`. A group outlives a replica
        that died with its machine."""
        table = await asyncio.to_thread(placement_group_table)
        groups = {self._group(name) for name in spared}
        for name in {group["name"] for group in table.values() if group["state"] != "REMOVED"}:
            if name.startswith(self._group("")) and name not in groups:
                await asyncio.to_thread(_remove_group, name)

    def _group(self, replica: str) -> str:
        """A placement group's name. It must be unique on the cluster, not only in a namespace."""
        return f"{self.namespace}/{replica}"

    async def replicas(self) -> dict[str, list[Actor]]:
        actors_by_replica: dict[str, list[Actor]] = {}
        for entry in await asyncio.to_thread(list_named_actors, all_namespaces=True):
            replica, _, rank = entry["name"].partition(_RANK)
            if entry["namespace"] != self.namespace or replica == RECONCILER:
                continue
            with suppress(ValueError):  # The actor has just ended.
                handle = await asyncio.to_thread(ray.get_actor, entry["name"], self.namespace)
                actors_by_replica.setdefault(replica, []).append(
                    Actor(replica, handle, int(rank or 0))
                )
        return {
            name: sorted(ranks, key=lambda actor: actor.rank)
            for name, ranks in actors_by_replica.items()
        }

    async def draining(self) -> frozenset[str]:
        """Ray's ids of the nodes that Ray drains: the autoscaler or the cloud will take them away,
        and Ray places no more actors on them. Raises `Unavailable`."""
        if self.local:
            return frozenset()
        with asking_head():  # Only code of Ray's autoscaler and of Ray Train asks for this.
            return frozenset(await asyncio.to_thread(ray._private.state.state.get_draining_nodes))

    async def clear(self) -> None:
        with asking_head():
            replicas = await self.replicas()
            await self.remove([actor for ranks in replicas.values() for actor in ranks])
            await self.free_groups()

    async def saved(self) -> str:
        """The text that `save` has written; empty if none. Raises `Unavailable`."""
        space = self.namespace.encode()
        with asking_head():
            saved = await asyncio.to_thread(_internal_kv_get, _SAVED, namespace=space)
        return (saved or b"").decode()

    async def save(self, text: str) -> None:
        """Writes a text to the key-value store of Ray's head (GCS). Raises `Unavailable`."""
        space = self.namespace.encode()
        with asking_head():
            await asyncio.to_thread(_internal_kv_put, _SAVED, text.encode(), namespace=space)

    def _begin(self, demand: Demand) -> list[Actor]:
        """Starts the actors. If several ranks need resources, the ranks get a placement group."""
        where: list[Any] = ["SPREAD"] * demand.num_ranks
        if demand.num_ranks > 1 and demand.each:
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            group = placement_group(
                [demand.each] * demand.num_ranks,
                strategy(demand, machines),
                name=self._group(demand.name),
                lifetime="detached",
            )
            where = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(len(where))]
        actors, options = [], dict[str, Any]()
        library = ctypes.util.find_library(demand.preload) if demand.preload else None
        if library is not None and "LD_PRELOAD" not in os.environ:
            options["runtime_env"] = {"env_vars": {"LD_PRELOAD": library}}
        for rank, place in enumerate(where):
            actor = Actor(demand.name, None, rank)
            actor.start(
                demand.classes[min(rank, 1)],
                self.namespace,
                num_cpus=demand.num_cpus,
                num_gpus=demand.num_gpus,
                resources=dict(demand.resources),
                scheduling_strategy=place,
                **options,
            )
            actors.append(actor)
        return actors


async def _late(actors: Sequence[Actor], timeout_s: float) -> list[Actor]:
    """Returns the actors that do not run after `timeout_s`. Raises `Unavailable` if one died."""
    are_running = await asyncio.gather(*(actor.locate(timeout_s) for actor in actors))
    return [actor for actor, runs in zip(actors, are_running, strict=True) if not runs]


def _waiting_requests() -> list[dict[str, float]]:
    """The resources of each request that waits for room on the cluster."""
    state = get_cluster_resource_state(ray._private.worker.global_worker.gcs_client)
    return [_exact(pending.request.resources_bundle) for pending in state.pending_resource_requests]


def _exact(resources: Mapping[str, float]) -> dict[str, float]:
    """Amounts that can be compared. Ray keeps four decimal places."""
    return {name: round(amount, 4) for name, amount in resources.items()}


def _no_place(what: str, homeless: Sequence[Demand], demands: Sequence[Demand]) -> str:
    needs = "; ".join(f"the {demand.role} actor needs {demand}" for demand in homeless)
    together = {
        "CPU": sum(demand.num_cpus * demand.num_ranks for demand in demands),
        "GPU": sum(demand.num_gpus * demand.num_ranks for demand in demands),
    }
    flags: dict[str, None] = {}
    for demand in demands:
        flags[f"--{demand.role}-num-cpus"] = None
        if demand.num_gpus:
            flags[f"--{demand.role}-num-gpus"] = None
    return (
        f"{what} for {len(homeless)} of the actors: {needs}. All actors together need "
        f"{_amounts(together)}; the cluster has {_amounts(resources())}, of which "
        f"{_amounts(ray.available_resources())} are free; lower {', '.join(flags)}"
    )


async def run_task(function: Callable[..., T], *arguments: object) -> T:
    """Runs a function in a process of the cluster. Raises `Unavailable` if the process died."""
    try:
        called = ray.remote(function).options(num_cpus=0, max_retries=0).remote(*arguments)
        result: T = await _result(called)
        return result
    except ray.exceptions.WorkerCrashedError as error:
        raise Unavailable(f"{function.__name__} died: {one_line(error)}") from error


async def _result(called: Any) -> Any:
    try:
        return await asyncio.wrap_future(called.future())
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OutriderError):
            raise error.cause from None
        raise


def resources() -> Mapping[str, float]:
    amounts: Mapping[str, float] = ray.cluster_resources()
    return amounts


def beyond(demands: Sequence[Demand], amounts: Mapping[str, float]) -> list[Demand]:
    """Subtracts each demand in turn from `amounts`. Returns the demands that do not fit."""
    left = dict(amounts)
    refused = []
    for demand in demands:
        needed = {name: amount * demand.num_ranks for name, amount in demand.each.items()}
        if any(amount > left.get(name, 0.0) for name, amount in needed.items()):
            refused.append(demand)
        else:
            left |= {name: left[name] - amount for name, amount in needed.items()}
    return refused


def strategy(demand: Demand, machines: Sequence[Mapping[str, float]]) -> str:
    """Ray's strategy: all ranks on one machine, or on few machines if no machine has room."""
    return "STRICT_PACK" if any(not beyond([demand], machine) for machine in machines) else "PACK"


def _remove_group(name: str) -> None:
    with suppress(ValueError):  # Ranks without resources have no group.
        remove_placement_group(get_placement_group(name))


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


async def repeated(work: Callable[[], Awaitable[object]], period_s: float, message: str) -> None:
    """Calls `work` for ever, with pauses of `period_s`. Logs `message` with each error."""
    while True:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 (the next call may succeed)
            known = isinstance(error, OutriderError)
            _log.warning("%s: %s", message, error, exc_info=not known)
        await asyncio.sleep(period_s)


async def retried(message: str, work: Callable[[], Awaitable[T]]) -> T:
    """Repeats `work` after each `OutriderError` or `ValueError`. Logs `message` with the error."""
    while True:
        try:
            return await work()
        except (OutriderError, ValueError) as error:
            _log.warning("%s yet: %s", message, error)
            await asyncio.sleep(RETRY_PERIOD_S)


OBJECT_STORE_BYTES = 100 * 2**20
"""Ray's object store is small, because no large objects go through Ray."""
_TEMPORARY_BYTES_MAX = 16
"""Longest path of the system's temporary directory, in bytes. Outrider and Ray append about 90
bytes for Ray's sockets, and the path of a socket may have at most 107 bytes."""
_LATE_START = "timed out during startup"
"""Part of Ray's message if its processes did not start in time."""
_RAY_FOLDER = "r"
"""Ray's directory. All users can open it, so it is made inside a directory of mode 0700."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Older versions of Ray warn if this variable is not set. In newer versions, "0" is the default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default is a low priority, but these workers serve requests.
    "RAY_worker_niceness": "0",
    # Ray asks a process to end, and kills it after this time. A hung process must be killed soon,
    # because clients wait for the end of its connections. Ray's default is 5 s.
    "RAY_kill_worker_timeout_milliseconds": "100",
    # Ray starts a process again that is not ready after this time, in seconds. Ray does not notice
    # earlier that such a process has died. On a busy machine, no process would ever be ready within
    # Ray's default of 60 s.
    "RAY_worker_register_timeout_seconds": str(PROCESS_START_S),
    # Without the next two variables, the file of the workers' standard error has no size limit.
    "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES_MAX),
    "RAY_ROTATION_BACKUP_COUNT": str(LOG_FILES_KEPT),
}
TOKEN_FILE = "ray.token"  # noqa: S105 (a name)
MODE, PATH, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
_VARIABLES = MODE, PATH, TOKEN
_ANSWER_S = 5.0
_HEAD_CHECK_PERIOD_S = 0.5


def hide(directory: Path, name: str, secret: str) -> Path:
    """Writes a secret to a file of mode 0600 in a directory of mode 0700, because all users can
    read Ray's own directory and the arguments of processes."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(directory / name, secret, 0o600)
    return directory / name


class RayConnection:
    """A connection to a Ray cluster. Starts and ends the cluster if it is local."""

    def __init__(
        self,
        address: str,
        namespace: str,
        secrets_at: Path | None = None,
        token: Path | None = None,
    ) -> None:
        """`address` is HOST:PORT of an existing cluster; empty = a new local cluster, whose token
        is written to the directory `secrets_at`. `token` is the file of an existing cluster's
        token; None = Ray finds the token, for example by RAY_AUTH_TOKEN_PATH."""
        self.local = not address
        self.namespace = namespace
        self._secrets_at = secrets_at
        self._address = address or "local"
        self._open = ExitStack()
        self.gcs_address = ""
        """HOST:PORT of the cluster; empty until `connect` has returned."""
        self.token = token

    async def connect(self) -> None:
        await asyncio.to_thread(self._connect)
        if threading.current_thread() is threading.main_thread():
            # Replaces Ray's C handler, which prints a stack trace, with Python's handler.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def _connect(self) -> None:
        os.environ.update(ENVIRONMENT)
        before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        self._open.callback(_set_variables, before)
        options: dict[str, Any] = {"address": self._address, "namespace": self.namespace}
        if self.local and self._secrets_at is not None:
            temporary = self._open.enter_context(_short_directory())
            # Ray's processes listen on all addresses of the machine, so they need a token.
            self.token = hide(self._secrets_at, TOKEN_FILE, secrets.token_hex(32))
            options |= {
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(Path(temporary, _RAY_FOLDER)),
            }
        if self.token is not None:
            use_token(self.token)
        try:
            with _without_secrets(), _own_sessions():
                _init(options)
        except ray.exceptions.AuthenticationError as error:
            reason = str(error).partition("\n")[0]
            raise SettingError(
                "address",
                f"the Ray cluster requires its token ({reason}); set {PATH} to the token's file",
            ) from error
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            reason = f"cannot start or reach Ray: {one_line(error)}"
            raise SettingError("address", reason) from error
        self._open.callback(ray.shutdown)
        self.gcs_address = str(ray.get_runtime_context().gcs_address)

    async def disconnect(self) -> None:
        await asyncio.to_thread(self._open.close)

    async def head_ended(self) -> None:
        """Returns when no head (GCS) listens at `gcs_address` any more."""
        host, _, port = self.gcs_address.rpartition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
            except ConnectionRefusedError:
                return
            except OSError as error:  # For example, this process has too many open files.
                _log.warning("cannot tell whether Ray's head runs: %s", error)
            await asyncio.sleep(_HEAD_CHECK_PERIOD_S)


def _init(options: Mapping[str, Any]) -> None:
    """Initialises Ray. It waits 30 s for the processes that it starts, and a busy machine may take
    longer. So a second attempt follows."""
    for is_last in (False, True):
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
            return
        except Exception as error:  # Ray raises no class of its own.
            if _LATE_START not in str(error):
                raise
            ray.shutdown()
            if is_last:
                raise ConnectionError(one_line(error)) from error
            _log.warning("Ray did not start in time, and is started again")


@contextmanager
def _without_secrets() -> Iterator[None]:
    names = {setting.variable for setting in deployment_settings().values() if setting.secret}
    hidden = {name: os.environ.pop(name) for name in names & os.environ.keys()}
    try:
        yield
    finally:
        os.environ |= hidden


class _Forks(threading.local):
    are_rays = False
    """Whether the processes that this thread forks are Ray's."""


_forks = _Forks()


@contextmanager
def _own_sessions() -> Iterator[None]:
    """Puts the processes that Ray starts meanwhile into sessions of their own. A SIGTERM to this
    process' group, as `timeout` or a shell's `kill %1` sends it, would otherwise end Ray before the
    deployment has stopped. Ray only blocks SIGINT in its processes, and has no setting for this."""
    _forks.are_rays = True
    try:
        yield
    finally:
        _forks.are_rays = False


def _leave_session() -> None:
    if _forks.are_rays:
        os.setsid()


os.register_at_fork(after_in_child=_leave_session)


def _short_directory() -> tempfile.TemporaryDirectory[str]:
    """A new directory that no other user can enter, with a path short enough for Ray."""
    where = tempfile.gettempdir()
    if len(os.fsencode(where)) > _TEMPORARY_BYTES_MAX:
        where = "/tmp"  # noqa: S108
    try:
        return tempfile.TemporaryDirectory("", "outrider-ray-", where, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"Ray needs a directory with a short path for its sockets: {error}; set TMPDIR"
        ) from error


def use_token(path: Path) -> None:
    """Makes this process and its children require and send the token in the file `path`."""
    _set_variables({MODE: "token", PATH: str(path)})


def _set_variables(texts: dict[str, str]) -> None:
    for name in _VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(texts)
    # Ray may have cached earlier values or another token.
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def check_asks_for_token(address: str) -> None:
    """Calls the head (GCS) of a Ray cluster without a token. Raises `SettingError` if the head does
    not refuse the call. Does nothing if Ray uses TLS, because callers then need certificates."""
    import grpc

    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive", bytes, bytes)
        try:
            ask(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.UNAUTHENTICATED:
                return
            raise SettingError(
                "address",
                f"cannot tell whether the Ray cluster at {address} requires a token ({code.name})",
            ) from error
    raise SettingError(
        "address",
        f"the Ray cluster at {address} requires no token, so every client can run code on it; "
        f"start the cluster with {MODE}=token and {PATH}, and set both for this command, too; or "
        "give --insecure on a trusted network",
    )
