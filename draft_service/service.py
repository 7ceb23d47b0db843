"""The draft's `ReplicaService`."""

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
        """A step has at most `max_num_seqs` sessions and `max_num_batched_tokens` tokens. A step
        has fewer tokens if `costs` show that other sessions would notice the longer step."""
        budget = TokenBudget(max_num_batched_tokens, max_num_seqs, costs)
        self._proposer, self._engine = Proposer(drafter, budget, grammars), drafter.engine
        # From `costs`, coordinators would compute the time of a pass for each draft token.
        told = None if drafter.in_one_pass else costs
        description = replace(
            describe_model(drafter.engine.info, max_num_seqs, told),
            reads_features=drafter.reads_features,
        )
        super().__init__(self._proposer, executor, description, budget.note_seconds)

    def _work(self, item: DraftItem, sender: AnswerSender) -> StepRequest:
        """Starts the time limit of an item's draft. Without look-ahead, `work.deadline` makes a
        timer report an empty draft if nothing is drawn when the time is over. With look-ahead, only
        steps check the limit, because the round's tokens may already be drawn."""
        time, engine = asyncio.get_running_loop().time, self._engine
        deadline = DraftDeadline.after(
            item.budget_us, lambda: time() + engine.stated_seconds, time()
        )
        work = super()._work(replace(item, deadline=deadline), sender)
        if not self._proposer.looks_ahead(item) and deadline is not NO_DEADLINE:
            work.deadline = deadline
        return work
