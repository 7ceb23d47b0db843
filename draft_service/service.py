"""The draft's `ReplicaService`."""

import asyncio
from dataclasses import replace
from typing import Any

from draft_service.model_drafter import ModelDrafter
from draft_service.worker import Proposer
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.engine.step_costs import StepCosts
from outrider.grammar.compiler import Grammars
from outrider.limits import BATCHED_TOKENS_DEFAULT
from outrider.messages import DraftItem
from outrider.replica.executors import StepExecutor
from outrider.replica.service import SteppedService, describe_model
from outrider.replica.step_request import Answers, AnswerSender, StepRequest, undrawn
from outrider.replica.token_budget import TokenBudget


class DraftService(SteppedService):
    """Serves any number of streams with one drafter."""

    def __init__(
        self,
        drafter: ModelDrafter,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = BATCHED_TOKENS_DEFAULT,
        costs: StepCosts | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """A step has at most `max_num_seqs` sessions and `max_num_batched_tokens` tokens. A step
        has fewer tokens if `costs` show that a longer step would delay other sessions too much."""
        budget = TokenBudget(max_num_batched_tokens, max_num_seqs, costs)
        self._proposer, self._engine = Proposer(drafter, budget, grammars), drafter.engine
        # Coordinators that know `costs` assume that each draft token takes a pass.
        told = None if drafter.in_one_pass else costs
        description = replace(
            describe_model(drafter.engine.info, max_num_seqs, told),
            reads_features=drafter.reads_features,
        )
        super().__init__(self._proposer, executor, description)

    def _work(self, item: DraftItem, sender: AnswerSender) -> StepRequest:
        """Starts the time limit of an item's draft. Without look-ahead, a timer reports when the
        time is over and nothing is drawn. With look-ahead, only steps check the limit, because the
        round's tokens may already be drawn."""
        loop, engine = asyncio.get_running_loop(), self._engine
        deadline = DraftDeadline.after(
            item.budget_us, lambda: loop.time() + engine.stated_seconds, loop.time()
        )
        item = replace(item, deadline=deadline)
        work = super()._work(item, sender)
        work.follow = _next_item
        if not self._proposer.looks_ahead(item) and deadline is not NO_DEADLINE:
            work.timer = loop.call_at(deadline.ends_at, self._tell_undrawn, work, deadline)
        return work

    def _tell_undrawn(self, work: StepRequest, deadline: DraftDeadline) -> None:
        """If no token is drawn yet, tells the coordinator, and prevents draws. The item's prefix
        still runs, and then an empty proposal reports how many tokens the replica holds."""
        if deadline.close_undrawn():
            work.answered = True
            work.sender.send([undrawn(work.key)])


def _next_item(item: DraftItem, answer: Any, _: float) -> DraftItem | None:
    """See `StepRequest.follow`. If an item continues and no caller waits for its next answer, it
    runs again."""
    calm = isinstance(answer, Answers) and not answer.answers and not answer.waited_for
    return item if calm and answer.more else None
