"""The draft as a `ReplicaService`: takes items from streams, answers proposals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from draft_service.eagle_drafter import EagleDrafter
from draft_service.model_drafter import ModelDrafter
from draft_service.worker import Proposer
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.engine.interface import Engine, ModelInfo
from outrider.engine.step_costs import StepCosts
from outrider.grammar.compiler import Grammars
from outrider.grammar.constraint import Constraint
from outrider.limits import BATCHED_TOKENS_DEFAULT, DRAFT_SUPPORT_ENTRIES, LOOK_AHEAD_BYTES_MAX
from outrider.messages import DraftAnswer, DraftItem, ReplicaDescription
from outrider.replica.scheduler import StepExecutor
from outrider.replica.service import SteppedService, describe_model
from outrider.replica.step_request import AnswerSender, StepObserver, StepRequest, undrawn
from outrider.replica.token_budget import TokenBudget


class DraftService(SteppedService[DraftItem, DraftAnswer]):
    """Serves any number of streams with one drafter."""

    def __init__(
        self,
        proposer: Proposer,
        executor: StepExecutor,
        description: ReplicaDescription,
        observer: StepObserver | None = None,
        grammars: Grammars | None = None,
        stated_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """See `SteppedService`. A step that runs is `stated_seconds` ahead of the clock, where its
        engine states its time."""
        self._proposer = proposer
        self._stated_seconds = stated_seconds
        super().__init__(proposer, executor, description, observer, grammars=grammars)
        proposer.has_news = lambda: self._scheduler.has_news

    def take(self, item: DraftItem, sender: AnswerSender) -> None:
        """The time that an item leaves for its draws runs from here."""
        time, stated = asyncio.get_running_loop().time, self._stated_seconds
        deadline = DraftDeadline.after(item.budget_us, lambda: time() + stated(), time())
        super().take(replace(item, deadline=deadline), sender)

    def _work(self, item: DraftItem, sender: AnswerSender) -> StepRequest:
        """Where a session looks ahead, tokens of a round may be drawn before it is asked for, so
        only the steps decide whether there is time for more."""
        work = super()._work(item, sender)
        if not self._proposer.looks_ahead(item) and item.deadline is not NO_DEADLINE:
            work.deadline = item.deadline
        return work

    async def _compile(
        self,
        grammars: Grammars,
        constraint: Constraint,
        item: DraftItem,
        sender: AnswerSender,
    ) -> None:
        """See `SteppedService._compile`. Those who wait are told when its time is over."""

        def tell_undrawn() -> None:
            if item.deadline.close_undrawn():
                sender.send([undrawn(item.head.key)])

        timer = None
        if item.deadline is not NO_DEADLINE:
            timer = asyncio.get_running_loop().call_at(item.deadline.ends_at, tell_undrawn)
        try:
            await super()._compile(grammars, constraint, item, sender)
        finally:
            if timer is not None:
                timer.cancel()

    @classmethod
    def with_model(
        cls,
        engine: Engine,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = BATCHED_TOKENS_DEFAULT,
        entries_max: int = DRAFT_SUPPORT_ENTRIES,
        look_ahead_bytes_max: int = LOOK_AHEAD_BYTES_MAX,
        costs: StepCosts | None = None,
        observer: StepObserver | None = None,
        grammars: Grammars | None = None,
    ) -> DraftService:
        """Drafts with a model. A step runs as little as `TargetService` says; a distribution keeps
        `entries_max` tokens at most. It looks ahead, and pushes `look_ahead_bytes_max` bytes of
        proposals at most for one round of a session. By `grammars`, those of the engine's
        tokenizer, it drafts what a session's constraint allows."""
        budget = TokenBudget(max_num_batched_tokens, max_num_seqs, costs)
        drafter = ModelDrafter(engine, entries_max)
        limits = (max_num_seqs, look_ahead_bytes_max)
        proposer = Proposer(drafter, engine, budget, limits, grammars)
        description = describe_model(engine.info, max_num_seqs, costs)
        return cls(
            proposer, executor, description, observer, grammars, lambda: engine.stated_seconds
        )

    @classmethod
    def with_eagle(
        cls,
        eagle: EagleDrafter,
        info: ModelInfo,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        observer: StepObserver | None = None,
        grammars: Grammars | None = None,
    ) -> DraftService:
        """Drafts from what the target's head reads, with a head that is told by `info`; by
        `grammars` what a session's constraint allows."""
        description = replace(describe_model(info, max_num_seqs, None), reads_features=True)
        proposer = Proposer(eagle, grammars=grammars)
        eagle.on_dropped = proposer.forget_tokens
        return cls(proposer, executor, description, observer, grammars)
