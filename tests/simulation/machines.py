"""The cluster of the simulation: places for replicas, and calls of them. Of `Cluster` and `Actor`
what a fleet uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from deploy.fleet.ray_cluster import Actor, Demand
from outrider.errors import OutriderError, Unavailable
from outrider.registry.redis_registry import Lease
from outrider.registry.registry import Engagement, ReplicaRecord, Role
from outrider.replica.process_setup import Place
from tests.simulation.processes import Process

PLACING_S = 0.05
LOADING_S_MAX = 0.5


class Node:
    """What a replica's actor is around a service, without gRPC. `_serve` starts it, `stop` ends
    it."""

    def __init__(self, role: Role, name: str) -> None:
        self.role: Role = role
        self.name = name
        self.process = Process(name)
        self.service: Any = None
        self._lease: Lease | None = None
        self._engagement = Engagement()
        self._ended = asyncio.Event()

    async def start(self, config: Any, world: Any) -> str:
        """Serves, and says so. Raises `Unavailable` where there is no target."""
        address = await self._serve(config, world)
        begun = Engagement(address=address, member=config.membership)
        world.serve(self, address)
        self._lease = Lease(world.redis.registry(), lambda: self._record(address))
        await self._lease.start()
        self._engagement = begun
        return address

    async def _serve(self, config: Any, world: Any) -> str:
        raise NotImplementedError

    def _record(self, address: str) -> ReplicaRecord:
        runs = self.service.describe()
        return ReplicaRecord(
            role=self.role, name=self.name, address=address, host="host", pid=1,
            model=runs.model, weights=runs.weights, leaving=self._engagement.leaving,
            load=self.service.num_items,
        )  # fmt: skip

    async def engagement(self) -> Engagement:
        return self._engagement

    async def wait(self) -> None:
        await self._ended.wait()

    def check_integrity(self) -> None:
        """Raises `OutriderError`."""
        try:
            if self.service is not None:
                self.service.check_integrity()
        except OutriderError as error:
            error.add_note(f"of {self.name}")
            raise


class SimulatedActor(Actor):
    """Has a node. Calls of it always arrive, while it lives."""

    def __init__(self, demand: Demand, node: Node, world: Any) -> None:
        super().__init__(demand.name, None)
        self.node = node
        self.place = Place(1, "host")
        self._world = world
        self._stopping: asyncio.Task[None] | None = None
        self._open: set[asyncio.Future[Any]] = set()

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if self.node.process.is_dead:
            raise Unavailable(f"{self.name} has died")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open.add(answer)
        self.node.process.start(self._answer(answer, method, arguments))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise Unavailable(f"{self.name} does not answer {method}") from error
        finally:
            self._open.discard(answer)

    async def _answer(
        self, answer: asyncio.Future[Any], method: str, arguments: tuple[Any, ...]
    ) -> None:
        result, failure = None, None
        try:
            if method == "start":
                await asyncio.sleep(self._world.rng.uniform(0.01, LOADING_S_MAX))
                result = await self.node.start(arguments[0], self._world)
            elif method == "stop":
                result = await self._stopped(arguments[0])
            elif method == "ping":
                result = self.place
            else:
                result = await getattr(self.node, method)()
        except OutriderError as error:
            self._world.hear_failure(error)
            failure = error
        if answer.done():
            return
        if failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(result)

    async def _stopped(self, grace_s: float) -> None:
        if self._stopping is None:
            self._stopping = self.node.process.start(self.node.stop(grace_s, self._world))
        await asyncio.shield(self._stopping)

    async def kill(self) -> None:
        self.die()

    def die(self) -> None:
        if self.node.process.is_dead:
            return
        self.node.process.die()
        self._world.bury(self.node)
        for answer in list(self._open):
            if not answer.done():
                answer.set_exception(Unavailable(f"{self.name} has died"))


class Machines:
    """Enough of them for all."""

    def __init__(self, world: Any, build: Callable[[str, str], Node]) -> None:
        self.actors: list[SimulatedActor] = []
        self._world = world
        self._build = build
        self.head = asyncio.Event()
        """Set while Ray's head answers. Without it actors go on, but none is made, found or
        ended."""
        self.head.set()

    async def place(self, demands: Sequence[Demand], timeout_s: float) -> list[list[Actor]]:
        await self.head.wait()
        await asyncio.sleep(PLACING_S)
        made = [
            SimulatedActor(demand, self._build(demand.role, demand.name), self._world)
            for demand in demands
        ]
        self.actors += made
        return [[one] for one in made]

    async def replicas(self) -> dict[str, list[Actor]]:
        await self.head.wait()
        return {one.name: [one] for one in self.actors if not one.node.process.is_dead}

    async def remove(self, actors: Sequence[Actor]) -> None:
        await self.head.wait()
        for actor in actors:
            await actor.kill()

    async def free_groups(self, kept: Collection[str] = ()) -> None:
        await self.head.wait()
