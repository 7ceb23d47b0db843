"""Coordinators, drafts, targets, clients and a store in one process on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from coordinator.asking import Patience
from coordinator.request import RequestDefaults
from coordinator.service import CoordinatorOptions, CoordinatorService
from draft_service.service import DraftService
from outrider.client import Client, ResumingTransport
from outrider.drafting.ngram import NgramDrafter
from outrider.engine.emulated import EmulatedEngine, EmulatedSpec
from outrider.engine.executor import InlineExecutor
from outrider.errors import LinkLost, StreamBroken, Unavailable
from outrider.generation import Event, GenerateRequest, ResumeRequest
from outrider.sessions.memory_store import MemoryStore
from outrider.telemetry.observer import Observation, RequestObserver, Side
from outrider.wire.memory_link import MemoryLink
from target_service.service import TargetService

from .adversary import Adversary, UnreliableStore
from .shown import CheckedEagle, ShallowEngine, ShownDrafter, ShownEngine, exit_drafter

SPEC = EmulatedSpec(
    vocab_size=6,
    support=4,
    exponent=0.8,
    deviation=0.6,
    order=2,
    verify_ms=15.0,
    draft_ms=2.0,
    max_model_len=80,
    num_pages=5,
)
PATIENCE = Patience(
    target_answer_s=0.2,
    target_gone_s=30.0,
    target_retry_s=0.02,
    draft_answer_s=0.1,
    draft_retry_s=0.2,
)
EAGLE_STEP_S = 0.002
NUM_SEQUENCES = 3
"""In a step: fewer than sessions at times. Nor do the pages of `SPEC` suffice for all of them, so
that some are preempted."""


def target_service() -> TargetService:
    engine = EmulatedEngine(SPEC, "target", NUM_SEQUENCES)
    executor = InlineExecutor(engine.take_step_seconds)
    return TargetService(engine, executor, max_num_seqs=NUM_SEQUENCES)


def self_drafting_service() -> TargetService:
    engine = ShownEngine(SPEC, "target", NUM_SEQUENCES)
    executor = InlineExecutor(engine.take_step_seconds)
    return TargetService(
        engine, executor, max_num_seqs=NUM_SEQUENCES, self_drafter=ShownDrafter(SPEC),
        clock=lambda: 0.0,
    )  # fmt: skip


def early_exit_service() -> TargetService:
    engine = ShallowEngine(SPEC, "target", NUM_SEQUENCES)
    executor = InlineExecutor(engine.take_step_seconds)
    return TargetService(
        engine, executor, max_num_seqs=NUM_SEQUENCES, self_drafter=exit_drafter(SPEC, engine),
        clock=lambda: 0.0,
    )  # fmt: skip


def draft_service() -> DraftService:
    engine = EmulatedEngine(SPEC, "draft", NUM_SEQUENCES)
    executor = InlineExecutor(engine.take_step_seconds)
    return DraftService.with_model(engine, executor, max_num_seqs=NUM_SEQUENCES)


def showing_service() -> TargetService:
    engine = ShownEngine(SPEC, "target", NUM_SEQUENCES)
    executor = InlineExecutor(engine.take_step_seconds)
    return TargetService(engine, executor, max_num_seqs=NUM_SEQUENCES)


def eagle_service() -> DraftService:
    info = EmulatedEngine(SPEC, "draft", NUM_SEQUENCES).info
    drafter = CheckedEagle(SPEC, sessions_max=NUM_SEQUENCES)
    executor = InlineExecutor(lambda: EAGLE_STEP_S)
    return DraftService.with_eagle(drafter, info, executor, max_num_seqs=NUM_SEQUENCES)


WORLDS = (
    {"target": target_service, "draft": draft_service},
    {"target": target_service, "draft": draft_service},
    {"target": self_drafting_service, "draft": draft_service},  # which nobody asks
    {"target": early_exit_service, "draft": draft_service},
    {"target": showing_service, "draft": eagle_service},
)


@dataclass
class Replica:
    """One replica, as it is now: a crash leaves its links and replaces its service."""

    role: str
    service: Any
    links: dict[int, Any]
    """By the host whose coordinator has it."""


class CountedMoves(Observation, RequestObserver):
    """Of all sessions to another replica."""

    def __init__(self) -> None:
        self.num_moves = 0

    def begin(self, request: GenerateRequest, model: str, traceparent: str) -> RequestObserver:
        return self

    def moved(self, side: Side) -> None:
        self.num_moves += 1


class World:
    """Everything that runs, and how it is harmed."""

    def __init__(self, rng: random.Random, adversary: Adversary) -> None:
        loop = asyncio.get_running_loop()
        self.adversary = adversary
        self.store = MemoryStore(lambda: loop.time() * 1e3)
        self._rng = rng
        self._build: dict[str, Callable[[], Any]] = {**rng.choice(WORLDS)}
        self.moves = CountedMoves()
        self._retired: list[Any] = []
        self._names = itertools.count()
        self._replicas: dict[str, Replica] = {}
        self._shape = {
            "length_control": rng.random() < 0.5,
            "draft_siblings": rng.choice((0, 2)),
            "confident": rng.choice((None, 0.5)),
        }
        self._hosts = [Host(index) for index in range(rng.choice((1, 2, 2)))]
        for role in self._build:
            for _ in range(rng.choice((1, 2, 2))):
                self._add(role)
        for host in self._hosts:
            self._coordinate(host)
        self.client = Client(
            ResumingTransport([HostTransport(host) for host in self._hosts], resume_timeout_s=60.0)
        )
        self._harm: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for host in self._hosts:
            await host.coordinator.start()
        adversary, odds = self.adversary, self.adversary.odds
        harms = [adversary.again_and_again("fall", odds.fall_s, self._fall)]
        for role in self._build:
            harms += [
                adversary.again_and_again("crash", odds.crash_s, partial(self._crash, role)),
                adversary.again_and_again("scale", odds.scale_s, partial(self._scale, role)),
            ]
        self._harm = [asyncio.create_task(harm) for harm in harms]

    async def stop(self) -> None:
        """Stops the harm and everything else, and looks whether anything is left over."""
        for task in self._harm:
            task.cancel()
        await asyncio.gather(*self._harm, return_exceptions=True)
        for host in self._hosts:
            await host.let_go()
            await host.coordinator.close()
            host.coordinator.check_integrity()
        for one in (*(replica.service for replica in self._replicas.values()), *self._retired):
            await one.close()
            one.check_integrity()

    def _coordinate(self, host: Host) -> None:
        """A coordinator begins on a host, with a name of its own."""
        rng = self._rng
        host.store = UnreliableStore(self.store, self.adversary)
        links = {
            role: {n: r.links[host.index] for n, r in self._replicas.items() if r.role == role}
            for role in ("target", "draft")
        }
        host.coordinator = CoordinatorService(
            CoordinatorOptions(
                name=f"coordinator-{next(self._names)}",
                served_model_name="toy",
                defaults=RequestDefaults(num_draft_tokens=4, deadline_ms=600_000),
                run_ahead_rounds=4,
                max_sessions=16,
                patience=PATIENCE,
                resume_grace_s=60.0,
                **self._shape,
            ),
            store=host.store,
            targets=links["target"],
            drafts=links["draft"],
            stand_in=NgramDrafter(),
            text=None,
            random_bits=rng.getrandbits,
            random_seed=lambda: rng.getrandbits(64),
            observation=self.moves,
        )

    def _add(self, role: str) -> str:
        service = self._build[role]()
        links = {host.index: MemoryLink(service, self.adversary.deliver) for host in self._hosts}
        name = f"{role}-{next(self._names)}"
        self._replicas[name] = Replica(role, service, links)
        return name

    async def _crash(self, role: str) -> None:
        """A replica dies with all it holds; after a while another one is there."""
        one = self.adversary.pick([r for r in self._replicas.values() if r.role == role])
        for link in one.links.values():
            link.sever(LinkLost(f"the {role} died"), reachable=False)
        self._retired.append(one.service)
        await asyncio.sleep(self.adversary.pause_s(0.5))
        one.service = self._build[role]()
        for index, link in one.links.items():
            link.restore(one.service)
            if self._hosts[index].is_down:
                link.sever(LinkLost("the coordinator is down"), reachable=False)

    async def _scale(self, role: str) -> None:
        """A replica comes, and another one is to be left, and goes."""
        up = [host for host in self._hosts if not host.is_down]
        if len(up) < len(self._hosts):
            return  # Nobody tells one that is down of it.
        name = self._add(role)
        pools = [
            host.coordinator.targets if role == "target" else host.coordinator.drafts
            for host in self._hosts
        ]
        for host, pool in zip(self._hosts, pools, strict=True):
            with suppress(Unavailable):  # It fell meanwhile.
                await pool.join(name, self._replicas[name].links[host.index])
        await asyncio.sleep(self.adversary.pause_s(0.3))
        leaving = self.adversary.pick([n for n, r in self._replicas.items() if r.role == role])
        for pool in pools:
            pool.retire(leaving)
        await asyncio.sleep(self.adversary.pause_s(0.3))
        for pool in pools:
            await pool.leave(leaving)
        self._retired.append(self._replicas.pop(leaving).service)

    async def _fall(self) -> None:
        """A coordinator cannot reach anybody, nor be reached. Then it goes on as if nothing had
        been; or it was dead, and another one begins in its place, with new links; or it was closed
        as it should be, and likewise."""
        host = self.adversary.pick(self._hosts)
        links = [one.links[host.index] for one in self._replicas.values()]
        kind = self.adversary.pick(("pause", "death", "end"))
        is_dead = kind != "pause"
        host.is_down = True
        if kind != "end":
            host.store.is_cut = True
            for link in links:
                link.sever(LinkLost("the coordinator is down"), reachable=False)
        host.breaks.set()
        host.breaks = asyncio.Event()
        if is_dead:
            await asyncio.sleep(0.001)  # Whoever reads a stream hears that it broke.
            await host.let_go()
        if kind == "end":
            await host.coordinator.close()
            host.coordinator.check_integrity()
        await asyncio.sleep(self.adversary.pause_s(4.0))
        if is_dead:
            dead = host.coordinator
            for one in self._replicas.values():
                one.links[host.index] = MemoryLink(one.service, self.adversary.deliver)
            self._coordinate(host)
            await host.coordinator.start()
            if kind == "death":
                await dead.close()
        else:
            host.store.is_cut = False
            for one in self._replicas.values():
                one.links[host.index].restore()
            await asyncio.sleep(self.adversary.pause_s(1.0))  # It does not know of its clients yet.
            await host.let_go()
        host.is_down = False


class Host:
    """Where a coordinator runs."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.coordinator: Any = None
        self.store: Any = None
        self.is_down = False
        self.breaks = asyncio.Event()
        """Set when the streams of clients break."""
        self.broken: list[tuple[Any, asyncio.Task[Any]]] = []
        """Streams whose end the coordinator has not seen yet, and what each waits for."""

    async def let_go(self) -> None:
        """The coordinator sees which clients are gone."""
        broken, self.broken = self.broken, []
        for stream, waiting in broken:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await stream.aclose()


class HostTransport:
    """A client's way to whatever coordinator runs on a host; of `Transport` what clients here
    use."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.address = f"host-{host.index}"

    def generate(self, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[Event]:
        return self._events(lambda: self._host.coordinator.generate(request))

    def resume(self, request: ResumeRequest, timeout_s: float) -> AsyncGenerator[Event]:
        return self._events(lambda: self._host.coordinator.resume(request))

    async def _events(self, begin: Callable[[], AsyncGenerator[Event]]) -> AsyncGenerator[Event]:
        host = self._host
        if host.is_down:
            raise StreamBroken(f"nothing answers at {self.address}")
        stream = begin()
        breaking = asyncio.create_task(host.breaks.wait())
        try:
            while True:
                coming = asyncio.create_task(anext(stream, None))
                await asyncio.wait({coming, breaking}, return_when=asyncio.FIRST_COMPLETED)
                if breaking.done():
                    host.broken.append((stream, coming))
                    stream = None
                    raise StreamBroken(f"{self.address} fell")
                if (event := coming.result()) is None:
                    return
                yield event
        finally:
            breaking.cancel()
            if stream is not None:
                await stream.aclose()
