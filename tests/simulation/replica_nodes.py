"""Targets and drafts of the simulation: each a real service in a process, with its announcer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftService
from outrider.errors import InvariantError, OutriderError
from outrider.messages import ProposalReply
from outrider.registry.redis_registry import Lease
from outrider.registry.registry import Engagement, ReplicaRecord, Role
from outrider.replica.scheduler import InlineExecutor
from target_service.service import TargetService
from tests.simulation.processes import Process
from tests.simulation.shown import (
    CheckedEagle,
    ShallowEngine,
    ShownDrafter,
    ShownEngine,
    exit_drafter,
)
from tests.simulation.toy import SPEC, QuickEngine, UnevenEngine

EAGLE_STEP_S = 0.002
NUM_SEQUENCES = 3
"""In a step: fewer than sessions at times. Nor do the pages of `SPEC` suffice for all of them, so
that some are preempted."""


def _target(engine: Any, self_drafter: Any = None) -> TargetService:
    executor = InlineExecutor(engine.take_step_seconds)
    return TargetService(
        engine, executor, max_num_seqs=NUM_SEQUENCES, self_drafter=self_drafter,
        clock=lambda: 0.0,
    )  # fmt: skip


def target_service() -> TargetService:
    return _target(QuickEngine(SPEC, "target", NUM_SEQUENCES))


def showing_service() -> TargetService:
    return _target(ShownEngine(SPEC, "target", NUM_SEQUENCES))


def self_drafting_service() -> TargetService:
    return _target(ShownEngine(SPEC, "target", NUM_SEQUENCES), ShownDrafter(SPEC))


def early_exit_service() -> TargetService:
    engine = ShallowEngine(SPEC, "target", NUM_SEQUENCES)
    return _target(engine, exit_drafter(SPEC, engine))


def draft_service(kind: type[QuickEngine] = QuickEngine) -> DraftService:
    engine = kind(SPEC, "draft", NUM_SEQUENCES)
    executor = InlineExecutor(engine.take_step_seconds)
    return DraftService.with_model(engine, executor, max_num_seqs=NUM_SEQUENCES)


def eagle_service() -> DraftService:
    info = QuickEngine(SPEC, "draft", NUM_SEQUENCES).info
    drafter = CheckedEagle(SPEC, sessions_max=NUM_SEQUENCES)
    executor = InlineExecutor(lambda: EAGLE_STEP_S)
    return DraftService.with_eagle(drafter, info, executor, max_num_seqs=NUM_SEQUENCES)


Builders = dict[str, Callable[[], Any]]
"""Of the services of each role."""
KINDS: tuple[Builders, ...] = (
    {"target": target_service, "draft": draft_service},
    {"target": target_service, "draft": draft_service},
    {"target": self_drafting_service, "draft": draft_service},  # which nobody asks
    {"target": early_exit_service, "draft": draft_service},
    {"target": showing_service, "draft": eagle_service},
)


HASTY: Builders = {"target": target_service, "draft": lambda: draft_service(UnevenEngine)}
"""For coordinators that give a draft little time."""


class ReplicaNode:
    """What `ReplicaHost` is around a service, without gRPC."""

    def __init__(self, role: Role, name: str, build: Callable[[], Any]) -> None:
        self.role: Role = role
        self.name = name
        self.process = Process(name)
        self.address = ""
        self.service: Any = None
        self._build = build
        self._announcer: Lease | None = None
        self._is_leaving = False
        self._plan: str | None = None
        self._slot = 0
        self._ended = asyncio.Event()

    async def start(self, config: Any, world: Any) -> str:
        """Serves, and says so."""
        self.service = self._build()
        self._watch_steps(world)
        if self.role == "draft" and not world.looks_ahead:
            self._watch_draws(world)
        self.address = f"host:{config.port}" if config.port else f"{self.name}:1"
        world.serve(self, self.service)
        self._announcer = Lease(world.redis.registry(), self._record)
        await self._announcer.start()
        self._plan, self._slot = config.plan, config.slot
        return self.address

    async def engagement(self) -> Engagement:
        """See `ReplicaHost`."""
        if self._announcer is None or self._plan is None:
            return Engagement(address="")
        return Engagement(
            address=self.address, slot=self._slot, plan=self._plan, leaving=self._is_leaving
        )

    def _watch_steps(self, world: Any) -> None:
        """A step that crashes is answered with a refusal; of a draft nobody would notice."""
        worker = self.service._worker
        step = worker.step

        def watched(items: Any) -> Any:
            try:
                return step(items)
            except Exception as error:
                world.hear_failure(InvariantError(f"a step of {self.name} crashed: {error!r}"))
                raise

        worker.step = watched

    def _watch_draws(self, world: Any) -> None:
        """Every token that a model draws must be in its proposal, whatever the time is: one that
        is dropped for being late biases the output."""
        proposer = self.service._worker
        drafter, step = proposer._drafter, proposer.step
        if not isinstance(drafter, ModelDrafter):
            return
        sampler = drafter._sampler
        draw = sampler._drawn
        num_drawn: dict[tuple[str, int], int] = {}

        def counted(branches: Any, rows: Any) -> Any:
            drawn = draw(branches, rows)
            for branch in branches:
                request = branch.request
                key = request.session_id, request.noise.committed_length
                num_drawn[key] = len(branch.token_ids) + 1
            return drawn

        def compared(items: Any) -> Any:
            answers = step(items)
            for answer in answers:
                if isinstance(answer, ProposalReply):
                    drawn = num_drawn.pop((answer.key.session_id, answer.base_length), 0)
                    depth = answer.proposal.tree.num_depths
                    if depth < drawn:
                        found = f"{self.name} proposes {depth} of {drawn} tokens that it drew"
                        world.hear_failure(InvariantError(found))
            return answers

        sampler._drawn, proposer.step = counted, compared  # type: ignore[method-assign]

    def _record(self) -> ReplicaRecord:
        runs = self.service.describe()
        return ReplicaRecord(
            role=self.role, name=self.name, address=self.address, host="host", pid=1,
            model=runs.model, weights=runs.weights, leaving=self._is_leaving,
            load=self.service.num_items,
        )  # fmt: skip

    async def wait(self) -> None:
        """Until it has stopped."""
        await self._ended.wait()

    async def traffic(self) -> int:
        """See `ReplicaHost`."""
        found: int = self.service.num_items
        return found

    async def leave(self) -> None:
        """See `ReplicaHost`."""
        self._is_leaving = True
        if self._announcer is not None:
            self._announcer.say_again()

    async def stop(self, grace_s: float, world: Any) -> None:
        """See `ReplicaHost.stop`."""
        announcer, self._announcer = self._announcer, None
        if announcer is not None:
            await announcer.close()
        if self.service is not None:
            try:
                async with asyncio.timeout(grace_s):
                    await self.service.drain()
            except TimeoutError:
                pass
            world.hang_up(self, "the replica has stopped")
            await self.service.close()
            self.check_integrity()
        self._ended.set()

    def check_integrity(self) -> None:
        """Of its service. Raises `OutriderError`."""
        try:
            if self.service is not None:
                self.service.check_integrity()
        except OutriderError as error:
            error.add_note(f"of {self.name}")
            raise
