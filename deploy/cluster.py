"""Ray, as far as Outrider needs it: connect quietly, place the actors of each role, call them, end
them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.hosting import Place

CALLS_PER_ACTOR_MAX: Final = 64
"""Ray calls of one actor at a time; generation does not go through Ray."""
OBJECT_STORE_BYTES: Final = 100 * 2**20
"""Nothing large goes through Ray."""
_TEMPORARY_BYTES_MAX: Final = 40
"""Ray puts sockets some 60 bytes below its directory, and a socket's path has 107 at most."""
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray would else warn about what it will do in a later version.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's workers would else give way to everything on the machine; these serve requests.
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True, slots=True)
class Demand:
    """What the actors of a role ask Ray for."""

    role: str
    num_cpus: float
    num_gpus: float
    num_ranks: int = 1
    """Actors that share the role's model, each of which asks for so much."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What else each asks for, by Ray's names."""
    name: str = ""
    """Of the replica, unique; empty where there is one of its role."""

    @property
    def each(self) -> dict[str, float]:
        """What each of its actors asks for, by Ray's names; nothing that it does not."""
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in asked.items() if amount}

    def __str__(self) -> str:
        each = f"{self.num_cpus:g} CPUs and {self.num_gpus:g} GPUs"
        each += "".join(f" and {amount:g} {name}" for name, amount in self.resources.items())
        return each if self.num_ranks == 1 else f"{self.num_ranks} times {each}"


class Actor:
    """One actor and what it was placed with."""

    def __init__(self, demand: Demand, handle: Any, rank: int = 0) -> None:
        """`rank` 0 is the actor that serves; it leads the others of its role."""
        self.demand = demand
        self.rank = rank
        self._handle = handle
        self._place: Place | None = None

    @property
    def place(self) -> Place:
        """Where it runs. Raises `Unavailable` before it was found a place."""
        if self._place is None:
            raise Unavailable(f"the {self.role} actor has no place yet")
        return self._place

    async def find_place(self, timeout_s: float) -> bool:
        """Whether it runs within the time. Raises `Unavailable` for an actor that had a place and
        died there."""
        try:
            self._place = await self.call("ping", timeout_s=timeout_s)
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                return False
            raise
        return True

    @property
    def role(self) -> str:
        """Which service it hosts, or helps to."""
        return self.demand.role

    @property
    def name(self) -> str:
        """The replica's, or its role's, and the rank of a follower."""
        return _name(self.demand, self.rank)

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """Calls a method. Raises the `OutriderError` that it raised, `Unavailable` for an actor
        that died and for one that does not answer in `timeout_s`."""
        import ray

        future = asyncio.wrap_future(getattr(self._handle, method).remote(*arguments).future())
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise Unavailable(
                f"the {self.name} actor did not answer {method} in {timeout_s:g} s"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OutriderError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            reason = " ".join(str(error).split())
            raise Unavailable(f"the {self.name} actor died: {reason}") from error

    async def kill(self) -> None:
        """Ends the actor's process at once."""
        import ray

        await asyncio.to_thread(ray.kill, self._handle)


class Cluster:
    """A Ray cluster that this process started, or one that runs elsewhere."""

    def __init__(self, address: str, namespace: str) -> None:
        """Actors have names in a `namespace` that is theirs alone: those of an earlier run may
        still be ending on a cluster that runs elsewhere."""
        self.local = not address
        self._namespace = namespace
        self._address = address or "local"
        self._temporary: str | None = None
        self._connected = False
        self._groups: dict[str, Any] = {}
        """Placement groups by what the replicas are called."""

    async def connect(self) -> None:
        """Starts a local cluster, or connects to the one at the address. Raises `ConfigError`."""
        await asyncio.to_thread(self._connect)
        if threading.current_thread() is threading.main_thread():
            # Ray has put a handler of its own, which dumps a stack, under Python's.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def _connect(self) -> None:
        os.environ.update(_ENVIRONMENT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray

        options: dict[str, Any] = {"namespace": self._namespace}
        if self.local:
            self._temporary = _short_directory()
            options |= {
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                # Ray trusts whoever reaches its ports: only this machine may.
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": self._temporary,
            }
        try:
            ray.init(
                address=self._address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                **options,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise SettingError("address", f"cannot start or reach Ray: {reason}") from error
        self._connected = True

    def resources(self) -> Mapping[str, float]:
        """CPUs and GPUs of the whole cluster, by Ray's names."""
        import ray

        found: Mapping[str, float] = ray.cluster_resources()
        return found

    async def place(
        self, actors: Sequence[tuple[Demand, type, type]], timeout_s: float
    ) -> list[Actor]:
        """For each demand an actor of the first class and, where it has further ranks, as many of
        the second, once every one of them runs; in the order of the demands, and the ranks of each.
        Ranks of one role stand in one placement group, on one machine where one is large enough.
        Raises `ConfigError` naming those that found no place within `timeout_s`, or can never find
        one on a cluster of our own, and `Unavailable` for one that died; then none is left
        running."""
        demands = [demand for demand, *_ in actors]
        if self.local and (too_much := beyond(demands, self.resources())):
            raise ConfigError(self._no_place(too_much, demands, "there is no place"))
        placed = [
            actor
            for demand, leader, follower in actors
            for actor in self._begin(demand, leader, follower)
        ]
        try:
            found = await asyncio.gather(*(actor.find_place(timeout_s) for actor in placed))
            homeless = {
                _name(actor.demand, 0): actor.demand
                for actor, runs in zip(placed, found, strict=True)
                if not runs
            }
            if homeless:
                missing, what = list(homeless.values()), f"no place within {timeout_s:g} s"
                raise ConfigError(self._no_place(missing, demands, what))
        except BaseException:
            await self.remove(placed)
            raise
        return placed

    async def remove(self, actors: Sequence[Actor]) -> None:
        """Ends actors at once, and gives back the places of their groups."""
        await asyncio.gather(*(actor.kill() for actor in actors))
        for name in {_name(actor.demand, 0) for actor in actors} & self._groups.keys():
            await asyncio.to_thread(_remove_group, self._groups.pop(name))

    def _begin(self, demand: Demand, leader: type, follower: type) -> list[Actor]:
        """The actors of a role, which Ray has not placed yet."""
        import ray

        places = self._places_of_ranks(demand)
        return [
            Actor(
                demand,
                ray.remote(follower if rank else leader)
                .options(
                    name=_name(demand, rank),
                    num_cpus=demand.num_cpus,
                    num_gpus=demand.num_gpus,
                    resources=dict(demand.resources),
                    max_concurrency=CALLS_PER_ACTOR_MAX,
                    **places[rank],
                )
                .remote(),
                rank,
            )
            for rank in range(demand.num_ranks)
        ]

    def _places_of_ranks(self, demand: Demand) -> list[dict[str, Any]]:
        """Ray's options for where each rank of a role runs: anywhere for one that is alone, and for
        ranks that ask for nothing, of which no group can be made."""
        if demand.num_ranks == 1 or not demand.each:
            return [{}] * demand.num_ranks
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        bundles = [demand.each] * demand.num_ranks
        group = placement_group(bundles, strategy=strategy(demand, machines))
        self._groups[_name(demand, 0)] = group
        return [
            {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)}
            for rank in range(demand.num_ranks)
        ]

    def _no_place(self, homeless: Sequence[Demand], demands: Sequence[Demand], what: str) -> str:
        import ray

        free = _amounts(ray.available_resources())
        asked = "; ".join(f"the {demand.role} actor asks for {demand}" for demand in homeless)
        together = _amounts(
            {
                "CPU": sum(demand.num_cpus * demand.num_ranks for demand in demands),
                "GPU": sum(demand.num_gpus * demand.num_ranks for demand in demands),
            }
        )
        roles = dict.fromkeys(demand.role for demand in demands)
        flags = ", ".join(f"--{role}-num-cpus" for role in roles)
        return (
            f"{what} for {len(homeless)} of the actors: {asked}. All together ask for {together}; "
            f"the cluster has {_amounts(self.resources())}, and now {free} free (see {flags} and "
            "the like for GPUs)"
        )

    async def disconnect(self) -> None:
        """Ends a local cluster with all its processes; leaves another one."""
        if self._connected:
            import ray

            self._connected = False
            await asyncio.to_thread(ray.shutdown)
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._temporary = None


def beyond(demands: Sequence[Demand], resources: Mapping[str, float]) -> list[Demand]:
    """The demands that a cluster of these resources cannot meet beside those before them. Pure."""
    left = dict(resources)
    found = []
    for demand in demands:
        asked = {name: amount * demand.num_ranks for name, amount in demand.each.items()}
        if any(amount > left.get(name, 0.0) for name, amount in asked.items()):
            found.append(demand)
        else:
            left |= {name: left[name] - amount for name, amount in asked.items()}
    return found


def strategy(demand: Demand, machines: Sequence[Mapping[str, float]]) -> str:
    """How Ray shall place the ranks of a role on machines of these resources: on one of them where
    one is large enough for all, else on as few as possible. Pure."""
    return "STRICT_PACK" if any(not beyond([demand], machine) for machine in machines) else "PACK"


def _remove_group(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _name(demand: Demand, rank: int) -> str:
    name = demand.name or demand.role
    return f"{name}-rank-{rank}" if rank else name


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def _short_directory() -> str:
    """A new directory for Ray's sockets and logs, under the usual place or, where that has too
    long a name, under /tmp. Raises `ConfigError`."""
    usual = tempfile.gettempdir()
    short = len(os.fsencode(usual)) + len("/outrider-ray-12345678") <= _TEMPORARY_BYTES_MAX
    try:
        return tempfile.mkdtemp(prefix="outrider-ray-", dir=usual if short else "/tmp")  # noqa: S108
    except OSError as error:
        raise ConfigError(
            f"Ray needs a directory with a short name for its sockets: {error}; set TMPDIR"
        ) from error
