"""The draft as a `ReplicaService`: receives items from streams, answers with proposals."""

import asyncio
from dataclasses import replace

from draft_service.model_drafter import ModelDrafter
from draft_service.worker import Proposer
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.engine.step_costs import StepCosts
from outrider.grammar.compiler import Grammars
from outrider.limits import BATCHED_TOKENS_DEFAULT
from outrider.messages import DraftItem
from outrider.replica.executors import StepExecutor
from outrider.replica.service import SteppedService, describe_model
from outrider.replica.step_request import AnswerSender, StepRequest
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
        """Steps are limited as in `TargetService`. A drafter that looks ahead pushes at most
        `LOOK_AHEAD_BYTES_MAX` bytes of proposals for a round of a session. With `grammars` (of the
        engine's tokenizer) it drafts what a session's constraint allows. The description has the
        `costs`, unless all tokens are drafted `in_one_pass`: then no pass is of one token."""
        budget = TokenBudget(max_num_batched_tokens, max_num_seqs, costs)
        self._proposer, self._engine = Proposer(drafter, budget, grammars), drafter.engine
        told = None if drafter.in_one_pass else costs
        description = replace(
            describe_model(drafter.engine.info, max_num_seqs, told),
            reads_features=drafter.reads_features,
        )
        super().__init__(self._proposer, executor, description, budget.note_seconds)

    def _work(self, item: DraftItem, sender: AnswerSender) -> StepRequest:
        """Starts the time limit of an item's draws. If a session looks ahead, a round's tokens may
        be drawn before they are requested, so only steps check the limit. A running step is ahead
        of the clock by the time that its engine states."""
        time, engine = asyncio.get_running_loop().time, self._engine
        deadline = DraftDeadline.after(
            item.budget_us, lambda: time() + engine.stated_seconds, time()
        )
        work = super()._work(replace(item, deadline=deadline), sender)
        if not self._proposer.looks_ahead(item) and deadline is not NO_DEADLINE:
            work.deadline = deadline
        return work
