"""The cluster of the simulation: places for replicas, and calls of them. Of `Cluster` and `Actor`
what a fleet uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from deploy.fleet.ray_cluster import Actor, Demand
from outrider.errors import OutriderError, Unavailable
from outrider.replica.process_setup import Place

Node = Any
"""A `ReplicaNode` or a `CoordinatorNode`."""
PLACING_S = 0.05
LOADING_S_MAX = 0.5


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
        """Who asks again waits for the same end."""
        if self._stopping is None:
            self._stopping = self.node.process.start(self.node.stop(grace_s, self._world))
        await asyncio.shield(self._stopping)

    async def kill(self) -> None:
        self.die()

    def die(self) -> None:
        """Its process ends at once."""
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
        """`build(role, name)` makes a node."""
        self.actors: list[SimulatedActor] = []
        self._world = world
        self._build = build
        self._head = asyncio.Event()
        """Set while Ray's head answers. Without it actors go on, but none is made, found or
        ended."""
        self._head.set()

    @property
    def has_head(self) -> bool:
        """Whether Ray's head answers."""
        return self._head.is_set()

    def lose_head(self) -> None:
        """From now on calls of it wait."""
        self._head.clear()

    def return_head(self) -> None:
        """It answers them all."""
        self._head.set()

    async def place(self, demands: Sequence[Demand], timeout_s: float) -> list[list[Actor]]:
        await self._head.wait()
        await asyncio.sleep(PLACING_S)
        made = [
            SimulatedActor(demand, self._build(demand.role, demand.name), self._world)
            for demand in demands
        ]
        self.actors += made
        return [[one] for one in made]

    def _there(self) -> list[SimulatedActor]:
        return [actor for actor in self.actors if not actor.node.process.is_dead]

    async def replicas(self) -> dict[str, list[Actor]]:
        await self._head.wait()
        return {actor.name: [actor] for actor in self._there()}

    async def remove(self, actors: Sequence[Actor]) -> None:
        await self._head.wait()
        for actor in actors:
            await actor.kill()

    async def free_groups(self, kept: Collection[str] = ()) -> None:
        """A place is gone with its actor."""
        await self._head.wait()
