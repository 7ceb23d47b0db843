"""Actors on Ray, as far as Outrider needs them: how they are placed, found, called and ended; and
what is kept for one that Ray restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar

from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.replica.process_setup import Place

_log = logging.getLogger(__name__)

T = TypeVar("T")
CALLS_PER_ACTOR_MAX: Final = 1000
"""Ray calls of one actor at a time; generation does not go through Ray. A watcher that dies
leaves its call behind."""
RECONCILER: Final = "reconciler"
"""Name of the actor that places the others."""
_RANK: Final = "-rank-"
"""Between a replica's name and the rank of a follower."""


@contextmanager
def asking_head() -> Iterator[None]:
    """Around calls of Ray's head (GCS). Raises `Unavailable` where it does not answer."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, OSError) as error:
        reason = " ".join(str(error).split())
        raise Unavailable(f"the Ray head does not answer: {reason}") from error


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
            raise Unavailable(f"the {self.name} actor has no place yet")
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
    def name(self) -> str:
        """The replica's, or its role's, and the rank of a follower."""
        return _name(self.demand, self.rank)

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
            reason = " ".join(str(error).split())
            raise Unavailable(f"the {self.name} actor died: {reason}") from error

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
        if self.local and (too_much := beyond(demands, resources())):
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
        for name in {_name(actor.demand, 0) for actor in actors}:
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

    async def replicas(self) -> list[str]:
        return sorted({name.partition(_RANK)[0] for name in await self._names()})

    async def find(self, role: str, replica: str) -> list[Actor]:
        """The actors that are there of a replica, by rank."""
        import ray

        ranks = sorted(
            int(rank or 0)
            for name, _, rank in (one.partition(_RANK) for one in await self._names())
            if name == replica
        )
        demand, found = Demand(role, 0, 0, len(ranks), name=replica), []
        for rank in ranks:
            with suppress(ValueError):  # It has just ended.
                name = _name(demand, rank)
                handle = await asyncio.to_thread(ray.get_actor, name, self.namespace)
                found.append(Actor(demand, handle, rank))
        return found

    async def clear(self) -> None:
        import ray

        with asking_head():
            for name in await self._names():
                with suppress(ValueError):
                    ray.kill(await asyncio.to_thread(ray.get_actor, name, self.namespace))
            await self.free_groups()

    async def _names(self) -> set[str]:
        from ray.util import list_named_actors

        listed = await asyncio.to_thread(list_named_actors, all_namespaces=True)
        return {
            one["name"] for one in listed
            if one["namespace"] == self.namespace and one["name"] != RECONCILER
        }  # fmt: skip

    def _begin(self, demand: Demand, leader: type, follower: type) -> list[Actor]:
        import ray

        places = self._places_of_ranks(demand)
        return [
            Actor(
                demand,
                ray.remote(follower if rank else leader)
                .options(
                    name=_name(demand, rank),
                    namespace=self.namespace,
                    lifetime="detached",
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
        """Ray's options for where each rank of a role runs: where few others are for one that is
        alone, and for ranks that ask for nothing, of which no group can be made."""
        if demand.num_ranks == 1 or not demand.each:
            return [{"scheduling_strategy": "SPREAD"}] * demand.num_ranks
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        bundles = [demand.each] * demand.num_ranks
        name = self._group(_name(demand, 0))
        group = placement_group(bundles, strategy(demand, machines), name=name, lifetime="detached")
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
            f"the cluster has {_amounts(resources())}, and now {free} free (see {flags} and "
            "the like for GPUs)"
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
        raise Unavailable(f"{function.__name__} died: {' '.join(str(error).split())}") from error


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


def _name(demand: Demand, rank: int) -> str:
    name = demand.name or demand.role
    return f"{name}{_RANK}{rank}" if rank else name


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


Topic = Literal["changes", "policy"]
RETRY_PERIOD_S: Final = 1.0
"""Until what is not known is asked again."""


class SavedState(Protocol):
    """What a reconciler must know again when Ray restarts it: one text for each topic.

    | topic | text |
    | --- | --- |
    | `changes` | settings that differ from those that the deployment began with |
    | `policy` | between which bounds the load decides how many replicas a role has |
    """

    async def load(self, topic: Topic) -> str:
        """What was saved last; empty where nothing was. Raises `Unavailable`."""
        ...

    async def save(self, topic: Topic, text: str) -> None:
        """Keeps a text in place of the one before. Raises `Unavailable`."""
        ...


class RaySavedState:
    """In the key-value store of Ray's head (GCS), and not in Redis: writing it needs the right to
    run code on the cluster."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    async def load(self, topic: Topic) -> str:
        from ray.experimental.internal_kv import _internal_kv_get

        with asking_head():
            found = await asyncio.to_thread(
                _internal_kv_get, topic.encode(), namespace=self._namespace
            )
        return "" if found is None else bytes(found).decode()

    async def save(self, topic: Topic, text: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        with asking_head():
            await asyncio.to_thread(
                _internal_kv_put, topic.encode(), text.encode(), overwrite=True,
                namespace=self._namespace,
            )  # fmt: skip


async def retried(what: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is tried again until it neither finds its source away nor reads
    nonsense. `what` names it in the log."""
    while True:
        try:
            return await work()
        except (OutriderError, ValueError) as error:
            _log.warning("%s: not known yet: %s", what, error)
            await asyncio.sleep(RETRY_PERIOD_S)
