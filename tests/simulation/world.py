"""Coordinator, draft, target and store in one process on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from coordinator.request import RequestDefaults
from coordinator.service import CoordinatorOptions, CoordinatorService
from coordinator.sides import Patience
from draft_service.service import DraftService
from outrider.drafting.ngram import NgramDrafter
from outrider.engine.emulated import EmulatedEngine, EmulatedSpec
from outrider.engine.executor import InlineExecutor
from outrider.errors import LinkLost
from outrider.sessions.memory_store import MemoryStore
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


class World:
    """Everything that runs, and how it is harmed."""

    def __init__(self, rng: random.Random, adversary: Adversary) -> None:
        loop = asyncio.get_running_loop()
        self.adversary = adversary
        self.store = MemoryStore(lambda: loop.time() * 1e3)
        self._build: dict[str, Callable[[], Any]] = {**rng.choice(WORLDS)}
        self._services: dict[str, Any] = {role: build() for role, build in self._build.items()}
        self._retired: list[Any] = []
        self._links: dict[str, Any] = {
            role: MemoryLink(service, adversary.deliver) for role, service in self._services.items()
        }
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
            target=self._links["target"],
            draft=self._links["draft"],
            stand_in=NgramDrafter(),
            text=None,
            random_bits=rng.getrandbits,
            random_seed=lambda: rng.getrandbits(64),
        )
        self._harm: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.coordinator.start()
        for role, build in self._build.items():
            harm = self.adversary.crashes(lambda role=role, build=build: self._crash(role, build))
            self._harm.append(asyncio.create_task(harm))

    async def stop(self) -> None:
        """Stops the harm and everything else, and looks whether anything is left over."""
        for task in self._harm:
            task.cancel()
        await asyncio.gather(*self._harm, return_exceptions=True)
        await self.coordinator.close()
        self.coordinator.check_integrity()
        for service in (*self._services.values(), *self._retired):
            await service.close()
            service.check_integrity()

    async def _crash(self, role: str, build: Any) -> None:
        """The replica dies with all it holds; after a while another one is there."""
        link = self._links[role]
        link.sever(LinkLost(f"the {role} died"), reachable=False)
        self._retired.append(self._services[role])
        await asyncio.sleep(self.adversary.pause_s(0.5))
        self._services[role] = build()
        link.restore(self._services[role])
