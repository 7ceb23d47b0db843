"""Targets and drafts of the simulation: each a real service in a process, with its announcer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftService
from outrider.errors import InvariantError
from outrider.messages import ProposalReply
from outrider.registry.registry import Engagement, Role
from outrider.replica.scheduler import InlineExecutor
from target_service.service import TargetService
from tests.simulation.machines import Node
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


def target_service(kind: type[QuickEngine] = QuickEngine, drafter: Any = None) -> TargetService:
    engine = kind(SPEC, "target", NUM_SEQUENCES)
    return TargetService(
        engine, InlineExecutor(engine.take_step_seconds), max_num_seqs=NUM_SEQUENCES,
        self_drafter=None if drafter is None else drafter(SPEC, engine), clock=lambda: 0.0,
    )  # fmt: skip


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
KINDS: tuple[Builders, ...] = (
    {"target": target_service, "draft": draft_service},
    {"target": target_service, "draft": draft_service},
    {"target": partial(target_service, ShownEngine, ShownDrafter), "draft": draft_service},
    {"target": partial(target_service, ShallowEngine, exit_drafter), "draft": draft_service},
    {"target": partial(target_service, ShownEngine), "draft": eagle_service},
)
"""Drafts beside a target that drafts itself are asked by nobody."""
HASTY: Builders = {"target": target_service, "draft": partial(draft_service, UnevenEngine)}
"""For coordinators that give a draft little time."""


class ReplicaNode(Node):
    """A target or a draft."""

    def __init__(self, role: Role, name: str, build: Callable[[], Any]) -> None:
        super().__init__(role, name)
        self._build = build

    async def _serve(self, config: Any, world: Any) -> str:
        self.service = self._build()
        self._watch_steps(world)
        if self.role == "draft" and not world.looks_ahead:
            self._watch_draws(world)
        return f"host:{config.port}" if config.port else f"{self.name}:1"

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

    async def traffic(self) -> int:
        found: int = self.service.num_items
        return found

    async def leave(self) -> None:
        self._engagement = replace(self._engagement, leaving=True)
        if self._lease is not None:
            self._lease.say_again()

    async def stop(self, grace_s: float, world: Any) -> None:
        lease, self._lease = self._lease, None
        self._engagement = Engagement()
        if lease is not None:
            await lease.close()
        if self.service is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.service.drain()
            world.hang_up(self, "the replica has stopped")
            await self.service.close()
            self.check_integrity()
        self._ended.set()
