"""A fleet without Ray, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from coordinator.decoding.trial import TrialSums
from outrider.config.deployment import DeploymentConfig, load_config
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.fleet.preflight import resolve_models
from outrider.fleet.ray_cluster import Actor, Demand
from outrider.fleet.replica_set import Fleet
from outrider.fleet.spec import FleetSpec, plan_fleet
from outrider.registry.registry import Engagement, Role
from outrider.replica.ray_actor import ActorLocation
from tests.support.memory_registry import MemoryRegistry

SETTINGS = {"engine": "emulated:vocab_size=100", "draft_model": "emulated", "stop_timeout_s": 5}


class Sitter(Actor):
    """An actor that serves until the test ends it."""

    def __init__(self, demand: Demand, rank: int, cluster: Machines) -> None:
        super().__init__(demand.name, None, rank)
        self.demand = demand
        self.location = ActorLocation(1, "here")
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []
        self.num_items = 0
        self.config: Any = None
        self.hangs = False
        """Whether it answers no calls."""
        self._cluster = cluster

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self.calls.append(method)
        if self.hangs:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.get_running_loop().create_future()
            except TimeoutError as error:
                raise Unavailable(f"{self.name} does not answer") from error
        if method == "start":
            self._cluster.starts.append(self.demand.role)
            await self._cluster.loading.wait()
            if error := self._cluster.failures.get(self.demand.role):
                raise error
            self.config = arguments[0]
        if method == "wait":
            await asyncio.shield(self.end)
        if method == "traffic":
            return self.num_items
        if method == "trial_sums":
            return self._cluster.trial_sums()
        if method == "engagement":
            if self.config is None:
                return Engagement()
            http = 0
            if self.demand.role == "coordinator":
                http = self.config.port or 30_000 + int(self.name.rpartition("-")[2])
            return Engagement(
                address=f"{self.name}:1",
                member=self.config.membership,
                leaving="leave" in self.calls,
                num_ranks=self.demand.num_ranks,
                http_address=f"{self.name}:{http}" if http else "",
            )
        return self.location if method == "ping" else None

    async def kill(self) -> None:
        self.calls.append("kill")


class Machines:
    """Implements `Cluster` for a fleet, and records the fleet's requests."""

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        """By role, the error of the start of its actors."""
        self.room = 99
        """Places for actors that are still free."""
        self.actors: list[Sitter] = []
        self.removed: list[str] = []
        self.groups: set[str] = set()
        self.placing, self.loading = asyncio.Event(), asyncio.Event()
        """Whether places are available and models load."""
        self.placing.set()
        self.loading.set()
        self.starts: list[str] = []
        """Roles of actors that were started after the first ones."""
        self.text = ""
        """What a reconciler has saved in this cluster."""
        self.trial_sums: Callable[[], TrialSums | None] = lambda: None
        """The coordinators' figures of a trial."""
        self.failure: OutriderError | None = None
        """While set, `saved`, `save` and `remove` raise this error."""

        self.drained: set[str] = set()
        """Ray's ids of the nodes that Ray drains."""

    async def draining(self) -> frozenset[str]:
        return frozenset(self.drained)

    async def saved(self) -> str:
        if self.failure is not None:
            raise self.failure
        return self.text

    async def save(self, text: str) -> None:
        await self.saved()
        self.text = text

    async def place(
        self, demands: Sequence[Demand], timeout_s: float, process_timeout_s: float
    ) -> list[list[Actor]]:
        if len(self._there()) + len(demands) > self.room:
            raise ConfigError("there is no place")
        try:
            async with asyncio.timeout(timeout_s + process_timeout_s):
                await self.placing.wait()
        except TimeoutError as error:
            raise Unavailable("the processes did not start") from error
        made: list[list[Actor]] = []
        for demand in demands:
            ranks = [Sitter(demand, rank, self) for rank in range(demand.num_ranks)]
            self.actors += ranks
            self.groups.add(demand.name)
            made.append([*ranks])
        return made

    async def remove(self, actors: Sequence[Actor]) -> None:
        await self.saved()
        self.removed += [actor.name for actor in actors]
        self.groups -= {actor.replica for actor in actors}

    async def free_groups(self, kept: Collection[str] = ()) -> None:
        self.groups &= {*kept}

    def _there(self) -> list[Sitter]:
        return [one for one in self.actors if one.name not in self.removed and not one.end.done()]

    async def replicas(self) -> dict[str, list[Actor]]:
        found: dict[str, list[Actor]] = {}
        for actor in sorted(self._there(), key=lambda actor: actor.rank):
            found.setdefault(actor.replica, []).append(actor)
        return found


def resolved(config: DeploymentConfig) -> DeploymentConfig:
    """What `resolve_models` returns. For a real model, which is not there, only the name of the
    target's head is filled in."""
    if config.target.emulated is not None:
        return resolve_models(config)
    drafter = config.draft.drafter
    head = drafter.name if drafter.runs_on == "target" else ""
    return replace(config, target=replace(config.target, head=head))


class World:
    def __init__(self, **settings: Any) -> None:
        self.machines, self.registry = Machines(), MemoryRegistry()
        self.settings = settings
        self.spec = self._plan()
        self.fleet = Fleet(self.machines, self.spec, self.registry)
        self.running: asyncio.Task[None] | None = None

    def _plan(self, **changes: Any) -> FleetSpec:
        given = load_config(SETTINGS | self.settings | changes, {})
        return plan_fleet(given, resolved(given), 0.0, "d", local=True)

    async def upgrade(self, **changes: Any) -> None:
        """Ends the fleet's process. A new one takes over with another plan."""
        await self.die()
        self.spec = self._plan(**changes)
        await self.come_back()

    async def start(self) -> None:
        self.others = asyncio.all_tasks()
        await self.fleet.start()
        self.running = asyncio.create_task(self.fleet.run())
        await asyncio.sleep(1)
        self.machines.starts.clear()

    async def die(self) -> None:
        """Ends the fleet's process, whatever it is doing."""
        running = asyncio.all_tasks() - {asyncio.current_task()} - self.others
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def come_back(self) -> None:
        """Ends the fleet's process. A new one takes over."""
        self.fleet = Fleet(self.machines, self.spec, self.registry)
        await self.fleet.adopt()
        self.running = asyncio.create_task(self.fleet.run())
        await asyncio.sleep(1)

    def names(self, role: Role) -> list[str]:
        return [one.name for one in self.fleet.of(role) if one.address]

    def actor(self, name: str) -> Sitter:
        return next(actor for actor in self.machines.actors if actor.name == name)

    async def close(self) -> None:
        if self.running is not None:
            self.running.cancel()
        for actor in self.machines.actors:
            if not actor.end.done():
                actor.end.set_result(None)
        await self.fleet.close()


@asynccontextmanager
async def playing(**settings: Any) -> AsyncIterator[World]:
    world = World(**settings)
    try:
        await world.start()
        yield world
    finally:
        await world.close()
