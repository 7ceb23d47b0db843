"""Coordinator, draft, target and store in one process on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coordinator.asking import Patience
from coordinator.request import RequestDefaults
from coordinator.service import CoordinatorOptions, CoordinatorService
from draft_service.service import DraftService
from outrider.drafting.ngram import NgramDrafter
from outrider.engine.emulated import EmulatedEngine, EmulatedSpec
from outrider.engine.executor import InlineExecutor
from outrider.errors import LinkLost
from outrider.generation import GenerateRequest
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
    """One replica, as it is now: a crash leaves its link and replaces its service."""

    role: str
    service: Any
    link: Any


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
        self._build: dict[str, Callable[[], Any]] = {**rng.choice(WORLDS)}
        self.moves = CountedMoves()
        self._retired: list[Any] = []
        self._names = itertools.count()
        self._replicas: dict[str, Replica] = {}
        for role in self._build:
            for _ in range(rng.choice((1, 2, 2))):
                self._add(role)
        self.coordinator = CoordinatorService(
            CoordinatorOptions(
                name="simulated",
                served_model_name="toy",
                defaults=RequestDefaults(num_draft_tokens=4, deadline_ms=600_000),
                length_control=rng.random() < 0.5,
                run_ahead_rounds=4,
                max_sessions=16,
                patience=PATIENCE,
                draft_siblings=rng.choice((0, 2)),
                confident=rng.choice((None, 0.5)),
            ),
            store=UnreliableStore(self.store, adversary),
            targets=self._links("target"),
            drafts=self._links("draft"),
            stand_in=NgramDrafter(),
            text=None,
            random_bits=rng.getrandbits,
            random_seed=lambda: rng.getrandbits(64),
            observation=self.moves,
        )
        self._harm: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.coordinator.start()
        adversary = self.adversary
        for role in self._build:
            harms = (
                adversary.again_and_again("crash", adversary.odds.crash_s, self._crash, role),
                adversary.again_and_again("scale", adversary.odds.scale_s, self._scale, role),
            )
            self._harm += [asyncio.create_task(harm) for harm in harms]

    async def stop(self) -> None:
        """Stops the harm and everything else, and looks whether anything is left over."""
        for task in self._harm:
            task.cancel()
        await asyncio.gather(*self._harm, return_exceptions=True)
        await self.coordinator.close()
        self.coordinator.check_integrity()
        for service in (*(one.service for one in self._replicas.values()), *self._retired):
            await service.close()
            service.check_integrity()

    def _links(self, role: str) -> dict[str, Any]:
        return {name: one.link for name, one in self._replicas.items() if one.role == role}

    def _add(self, role: str) -> str:
        service = self._build[role]()
        name = f"{role}-{next(self._names)}"
        self._replicas[name] = Replica(role, service, MemoryLink(service, self.adversary.deliver))
        return name

    def _pool(self, role: str) -> Any:
        return self.coordinator.targets if role == "target" else self.coordinator.drafts

    async def _crash(self, role: str) -> None:
        """A replica dies with all it holds; after a while another one is there."""
        one = self.adversary.pick([r for r in self._replicas.values() if r.role == role])
        one.link.sever(LinkLost(f"the {role} died"), reachable=False)
        self._retired.append(one.service)
        await asyncio.sleep(self.adversary.pause_s(0.5))
        one.service = self._build[role]()
        one.link.restore(one.service)

    async def _scale(self, role: str) -> None:
        """A replica comes, and another one is to be left, and goes."""
        pool = self._pool(role)
        name = self._add(role)
        await pool.join(name, self._replicas[name].link)
        await asyncio.sleep(self.adversary.pause_s(0.3))
        leaving = self.adversary.pick(pool.names)
        pool.retire(leaving)
        await asyncio.sleep(self.adversary.pause_s(0.3))
        await pool.leave(leaving)
        self._retired.append(self._replicas.pop(leaving).service)
