"""Coordinators of the simulation: each a real service in a process, with its rosters and its
announcer; and the clients' way to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from coordinator.service import CoordinatorService
from outrider.config import CoordinatorConfig, DraftConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.errors import InvariantError, OutriderError, StreamBroken, check
from outrider.registry.registry import ReplicaRecord, Role
from outrider.request import Event, GenerateRequest, ResumeRequest
from tests.simulation.machines import Node
from tests.simulation.network import Network
from tests.simulation.processes import Process

PATIENT = CoordinatorConfig(
    served_model_name="toy",
    num_draft_tokens=4,
    run_ahead_rounds=4,
    max_sessions=16,
    resume_grace_ms=60_000,
    target_timeout_ms=200,
    target_gone_ms=30_000,
    target_retry_ms=20,
    draft_timeout_ms=100,
    draft_retry_ms=200,
)
HASTY = replace(PATIENT, draft_timeout_ms=9, draft_retry_ms=1)
"""Less than a draft takes for all that it is asked for."""
HYBRID = DraftConfig(model="hybrid:ngram,some/model", hybrid_min_score=0.5, hybrid_model_tokens=2)
_numbers = itertools.count()


class CoordinatorNode(Node):
    def __init__(self, name: str, settings: CoordinatorConfig) -> None:
        super().__init__("coordinator", name)
        self.calls: set[Call] = set()
        self._settings = settings

    async def _serve(self, config: Any, world: Any) -> str:
        rng = world.rng
        self.service = CoordinatorService(
            self._settings,
            self.name,
            store=world.redis.store(),
            fallback=NgramDrafter(),
            random_bits=rng.getrandbits,
            random_seed=lambda: rng.getrandbits(64),
            observation=world.moves,
            registry=world.redis.registry(),
            link=lambda _, address: world.link(self.process, address),
        )
        await self.service.start()
        return f"host:{config.grpc_port}"

    def _record(self, address: str) -> ReplicaRecord:
        return ReplicaRecord(
            role="coordinator", name=self.name, address=address, host="host", pid=1,
            load=self.service.num_running,
        )  # fmt: skip

    def has_session_at(self, replica: str) -> bool:
        """Whether a session that runs here is with a replica."""
        if self.service is None:
            return False
        pools = (self.service.targets, self.service.drafts)
        return any(replica in pool._replicas and pool._replicas[replica].routes for pool in pools)

    def knows(self, role: Role) -> set[str]:
        """The replicas of a role that it may use."""
        pool = self.service.targets if role == "target" else self.service.drafts
        return set(pool.names)

    async def stop(self, grace_s: float, world: Any) -> None:
        self._engagement = replace(self._engagement, leaving=True)
        if self.service is not None:
            self.service.hand_over()
        if self._lease is not None:
            await self._lease.withdraw()
        if self.calls:
            await asyncio.wait([call.task for call in self.calls if call.task], timeout=grace_s)
        world.silence(self)
        for call in sorted(self.calls, key=lambda call: call.number):
            call.end()
        if self.service is not None:
            await self.service.close()
            self.check_integrity()
        self._ended.set()

    def check_work(self) -> None:
        """Raises `InvariantError` where something has ended that goes on for ever."""
        check(not self.service.failed, f"{self.name} commits no more")
        is_over = any(task.done() for task in self.service._watching)
        check(not is_over, f"{self.name} follows no more")


class Call:
    """A stream of events from a coordinator to a client."""

    def __init__(self, network: Network, client: Process, node: CoordinatorNode) -> None:
        self.events: asyncio.Queue[Event | OutriderError | None] = asyncio.Queue()
        """For the client: the events, then an error or None."""
        self.node = node
        self.number = next(_numbers)
        """The order in which they were made."""
        self.task: asyncio.Task[None] | None = None
        self._network = network
        self._client = client
        self._is_over = False

    def begin(self, request: GenerateRequest | ResumeRequest) -> None:
        if not self._is_over:
            self.node.calls.add(self)
            self.task = self.node.process.start(self._run(request))
            self.task.add_done_callback(lambda _: self.node.calls.discard(self))

    async def _run(self, request: GenerateRequest | ResumeRequest) -> None:
        service = self.node.service
        begin = service.resume if isinstance(request, ResumeRequest) else service.generate
        try:
            async with aclosing(begin(request)) as events:
                async for event in events:
                    self._tell(event)
            self._tell(None)
        except OutriderError as error:
            self._tell(error)
        except Exception as error:  # noqa: BLE001 - no client must wait for what has crashed
            self._tell(InvariantError(f"a call crashed: {error!r}"))

    def _tell(self, event: Event | OutriderError | None) -> None:
        self._network.carry(self._client, lambda: self.events.put_nowait(event), payload=event)

    def break_off(self) -> None:
        """The client hears that the stream broke; the coordinator, as soon as it runs."""
        self.events.put_nowait(StreamBroken(f"{self.node.name} fell silent"))
        self.leave()

    def leave(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self.end, context=self.node.process.context)

    def end(self) -> None:
        self._is_over = True
        if self.task is not None:
            self.task.cancel()


class PortTransport:
    """A client's way to whichever coordinator serves at a port; of `Transport` what clients here
    use."""

    def __init__(self, world: Any, address: str) -> None:
        self._world = world
        self.address = address

    async def close(self) -> None:
        """Nothing is open."""

    async def events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float
    ) -> AsyncGenerator[Event]:
        world = self._world
        node = world.coordinator_at(self.address)
        if node is None or world.is_barred(node):
            raise StreamBroken(f"nobody answers at {self.address}")
        call = Call(world.network, world.clients, node)
        world.calls.add(call)
        try:
            world.network.carry(node.process, lambda: call.begin(request))
            while (event := await call.events.get()) is not None:
                if isinstance(event, OutriderError):
                    raise event
                yield event
        finally:
            world.calls.discard(call)
            call.leave()
