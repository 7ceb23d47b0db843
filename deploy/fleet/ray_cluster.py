"""Actors on Ray, as far as Outrider needs them: how they are placed, found, called and ended; and
what is kept for one that Ray restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.replica.process_setup import Place

_log = logging.getLogger(__name__)

T = TypeVar("T")
CALLS_PER_ACTOR_MAX = 1000
"""Ray calls of one actor at a time; generation does not go through Ray. A watcher that dies
leaves its call behind."""
RECONCILER = "reconciler"
"""Name of the actor that places the others."""
RETRY_PERIOD_S = 1.0
"""Until what is not known is asked again."""
_SAVED = b"changes"
_RANK = "-rank-"
"""Between a replica's name and the rank of a follower."""


@contextmanager
def asking_head() -> Iterator[None]:
    """Around calls of Ray's head (GCS). Raises `Unavailable` where it does not answer."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, OSError) as error:
        raise Unavailable(f"the Ray head does not answer: {one_line(error)}") from error


@dataclass(frozen=True, slots=True)
class Demand:
    """What the actors of a replica ask Ray for."""

    role: str
    num_cpus: float
    num_gpus: float
    num_ranks: int = 1
    """Actors that share the role's model, each of which asks for so much."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What else each asks for, by Ray's names."""
    name: str = ""
    """Of the replica, unique."""
    classes: tuple[type, type] = (object, object)
    """Of the actor that serves, and of the other ranks."""

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
    """One actor: a rank of a replica, or the reconciler."""

    def __init__(self, replica: str, handle: Any, rank: int = 0) -> None:
        """`rank` 0 is the actor that serves; it leads the others of its replica."""
        self.replica = replica
        self.rank = rank
        self.name = f"{replica}{_RANK}{rank}" if rank else replica
        self.place = Place(0, "")
        """Where it runs, once `find_place` has found it."""
        self._handle = handle

    def start(self, kind: type, namespace: str, *arguments: object, **options: Any) -> None:
        """Starts it, with what `kind` takes; it does not end with this process."""
        import ray

        actor = ray.remote(kind).options(
            name=self.name, namespace=namespace, lifetime="detached",
            max_concurrency=CALLS_PER_ACTOR_MAX, **options,
        )  # fmt: skip
        self._handle = actor.remote(*arguments)

    async def find_place(self, timeout_s: float) -> bool:
        """Whether it runs within the time. Raises `Unavailable` for an actor that had a place and
        died there."""
        try:
            self.place = await self.call("ping", timeout_s=timeout_s)
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                return False
            raise
        return True

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """Calls a method. Raises the `OutriderError` that it raised, `Unavailable` for an actor
        that died and for one that does not answer in `timeout_s`."""
        import ray

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
        """Ends the actor's process at once. Raises `Unavailable`."""
        import ray

        with asking_head():
            await asyncio.to_thread(ray.kill, self._handle)


class Cluster:
    """A Ray cluster that this process started, or one that runs elsewhere."""

    def __init__(self, namespace: str, *, local: bool) -> None:
        """Actors have names in a `namespace` that is theirs alone, and do not end with the process
        that starts them. `local`: the cluster is this machine, and grows no further."""
        self.namespace = namespace
        self.local = local

    async def place(self, demands: Sequence[Demand], timeout_s: float) -> list[list[Actor]]:
        """The ranks of each demand, once every one of them runs. Those of one replica stand in one
        placement group, on one machine where one is large enough. Raises `ConfigError` naming
        those that found no place within `timeout_s`, or can never find one on a cluster of our own,
        and `Unavailable` for one that died; then none is left running."""
        if self.local and (too_much := beyond(demands, resources())):
            raise ConfigError(_no_place("there is no place", too_much, demands))
        placed = [self._begin(demand) for demand in demands]
        actors = [actor for ranks in placed for actor in ranks]
        try:
            found = await asyncio.gather(*(actor.find_place(timeout_s) for actor in actors))
            homeless = {one.replica for one, runs in zip(actors, found, strict=True) if not runs}
            if homeless:
                missing = [demand for demand in demands if demand.name in homeless]
                raise ConfigError(_no_place(f"no place within {timeout_s:g} s", missing, demands))
        except BaseException:
            await self.remove(actors)
            raise
        return placed

    async def remove(self, actors: Sequence[Actor]) -> None:
        """Ends actors at once, and gives back the places of their groups."""
        await asyncio.gather(*(actor.kill() for actor in actors))
        for name in {actor.replica for actor in actors}:
            await asyncio.to_thread(_remove_group, self._group(name))

    async def free_groups(self, spared: Collection[str] = ()) -> None:
        """Gives back the places of the groups of all replicas but the `spared`: also of those of
        which no actor is left, as where all ranks have died with their machine."""
        from ray.util import placement_group_table

        found = await asyncio.to_thread(placement_group_table)
        groups = {self._group(name) for name in spared}
        for name in {one["name"] for one in found.values() if one["state"] != "REMOVED"}:
            if name.startswith(self._group("")) and name not in groups:
                await asyncio.to_thread(_remove_group, name)

    def _group(self, replica: str) -> str:
        """The name of its placement group. Ray keeps those of one namespace apart from others', but
        lists all of a cluster, and does not say whose they are."""
        return f"{self.namespace}/{replica}"

    async def replicas(self) -> dict[str, list[Actor]]:
        """The actors that are there of each replica, by rank."""
        import ray
        from ray.util import list_named_actors

        found: dict[str, list[Actor]] = {}
        for one in await asyncio.to_thread(list_named_actors, all_namespaces=True):
            replica, _, rank = one["name"].partition(_RANK)
            if one["namespace"] != self.namespace or replica == RECONCILER:
                continue
            with suppress(ValueError):  # It has just ended.
                handle = await asyncio.to_thread(ray.get_actor, one["name"], self.namespace)
                found.setdefault(replica, []).append(Actor(replica, handle, int(rank or 0)))
        return {name: sorted(ranks, key=lambda actor: actor.rank) for name, ranks in found.items()}

    async def clear(self) -> None:
        """Ends all replicas at once, and gives back their places."""
        with asking_head():
            there = await self.replicas()
            await self.remove([actor for ranks in there.values() for actor in ranks])
            await self.free_groups()

    async def saved(self) -> str:
        """What was saved last; empty where nothing was. Raises `Unavailable`."""
        from ray.experimental.internal_kv import _internal_kv_get

        space = self.namespace.encode()
        with asking_head():
            found = await asyncio.to_thread(_internal_kv_get, _SAVED, namespace=space)
        return "" if found is None else bytes(found).decode()

    async def save(self, text: str) -> None:
        """Keeps a text for a reconciler that Ray restarts, in the key-value store of Ray's head
        (GCS), and not in Redis: writing it needs the right to run code on the cluster. Raises
        `Unavailable`."""
        from ray.experimental.internal_kv import _internal_kv_put

        space = self.namespace.encode()
        with asking_head():
            await asyncio.to_thread(_internal_kv_put, _SAVED, text.encode(), namespace=space)

    def _begin(self, demand: Demand) -> list[Actor]:
        """Its actors: where few others are for one that is alone, and for ranks that ask for
        nothing, of which no group can be made."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where: list[Any] = ["SPREAD"] * demand.num_ranks
        if demand.num_ranks > 1 and demand.each:
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            group = placement_group(
                [demand.each] * demand.num_ranks, strategy(demand, machines),
                name=self._group(demand.name), lifetime="detached",
            )  # fmt: skip
            where = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(len(where))]
        found = []
        for rank, place in enumerate(where):
            one = Actor(demand.name, None, rank)
            one.start(
                demand.classes[min(rank, 1)], self.namespace, num_cpus=demand.num_cpus,
                num_gpus=demand.num_gpus, resources=dict(demand.resources),
                scheduling_strategy=place,
            )  # fmt: skip
            found.append(one)
        return found


def _no_place(what: str, homeless: Sequence[Demand], demands: Sequence[Demand]) -> str:
    import ray

    asked = "; ".join(f"the {demand.role} actor asks for {demand}" for demand in homeless)
    together = {
        "CPU": sum(demand.num_cpus * demand.num_ranks for demand in demands),
        "GPU": sum(demand.num_gpus * demand.num_ranks for demand in demands),
    }
    flags = ", ".join(dict.fromkeys(f"--{demand.role}-num-cpus" for demand in demands))
    return (
        f"{what} for {len(homeless)} of the actors: {asked}. All together ask for "
        f"{_amounts(together)}; the cluster has {_amounts(resources())}, and now "
        f"{_amounts(ray.available_resources())} free (see {flags} and the like for GPUs)"
    )


async def run_task(function: Callable[..., T], *arguments: object) -> T:
    """Runs a function in another process of the cluster. Raises the `OutriderError` that it
    raised, and `Unavailable` where its process died."""
    import ray

    try:
        called = ray.remote(function).options(num_cpus=0, max_retries=0).remote(*arguments)
        found: T = await _result(called)
        return found
    except ray.exceptions.WorkerCrashedError as error:
        raise Unavailable(f"{function.__name__} died: {one_line(error)}") from error


async def _result(called: Any) -> Any:
    import ray

    try:
        return await asyncio.wrap_future(called.future())
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OutriderError):
            raise error.cause from None
        raise


def resources() -> Mapping[str, float]:
    """CPUs, GPUs and others of the whole cluster, by Ray's names."""
    import ray

    found: Mapping[str, float] = ray.cluster_resources()
    return found


def beyond(demands: Sequence[Demand], amounts: Mapping[str, float]) -> list[Demand]:
    """The demands that a cluster of these resources cannot meet beside those before them. Pure."""
    left = dict(amounts)
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


def _remove_group(name: str) -> None:
    from ray.util.placement_group import get_placement_group, remove_placement_group

    with suppress(ValueError):  # There is none where its ranks ask for nothing.
        remove_placement_group(get_placement_group(name))


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


async def retried(what: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is tried again until it neither finds its source away nor reads
    nonsense. `what` names it in the log."""
    while True:
        try:
            return await work()
        except (OutriderError, ValueError) as error:
            _log.warning("%s: not known yet: %s", what, error)
            await asyncio.sleep(RETRY_PERIOD_S)
