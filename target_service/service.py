"""The target as a `ReplicaService`: takes items from streams, answers verdicts, runs ahead."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from outrider.engine.interface import Engine
from outrider.engine.step_costs import StepCosts
from outrider.grammar.compiler import Grammars
from outrider.grammar.matcher import Matchers
from outrider.limits import BATCHED_TOKENS_DEFAULT, SEQUENCES_PER_REPLICA_MAX
from outrider.messages import VerdictReply, VerifyAnswer, VerifyItem
from outrider.replica.batching_delay import BatchingDelay
from outrider.replica.scheduler import StepExecutor
from outrider.replica.service import SteppedService, describe_model
from outrider.replica.step_request import AnswerSender, StepObserver, StepRequest
from outrider.replica.token_budget import TokenBudget
from target_service.run_ahead import RunAhead
from target_service.self_drafting import SelfDrafter

from .hidden_states import shown_by
from .verifier import Verifier


class TargetService(SteppedService[VerifyItem, VerifyAnswer]):
    """Serves any number of streams with one engine."""

    def __init__(
        self,
        engine: Engine,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = BATCHED_TOKENS_DEFAULT,
        costs: StepCosts | None = None,
        observer: StepObserver | None = None,
        self_drafter: SelfDrafter | None = None,
        gathers: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
    ) -> None:
        """`max_num_seqs` sessions and `max_num_batched_tokens` tokens share a step at most, and
        fewer where its `costs` are known and would be felt. If it `gathers`, a step waits for
        sessions that will soon want it too, where `costs` say that this pays. With a
        `self_drafter` it needs a `FeatureEngine` or a `ShallowEngine`; what it takes is told by
        `clock`, in seconds. Without `grammars`, those of the engine's tokenizer, sessions with a
        constraint are refused."""
        description = replace(
            describe_model(engine.info, max_num_seqs, costs),
            drafts_itself=self_drafter is not None,
            shows_features=shown_by(engine) is not None,
        )
        budget = TokenBudget(max_num_batched_tokens, max_num_seqs, costs)
        matchers = None if grammars is None else Matchers(grammars)
        scorer = Verifier(engine, budget, self_drafter, clock, matchers)
        gathering = None
        if gathers and costs is not None:
            gathering = BatchingDelay(costs.step_seconds, max_num_seqs, SEQUENCES_PER_REPLICA_MAX)
        super().__init__(
            scorer, executor, description, observer, budget.note_seconds, gathering, grammars
        )
        self._ahead: OrderedDict[str, RunAhead] = OrderedDict()

    def _accept(self, item: VerifyItem, outlet: AnswerSender[VerifyAnswer]) -> None:
        """Extends the rounds that run ahead of `item`, begins such rounds, or queues it."""
        session_id = item.head.session_id
        ahead = self._ahead.get(session_id)
        if ahead is not None and ahead.continues(item):
            outlet.send(ahead.extend(item, outlet))
            if ahead.running is None:
                self._run_next(session_id, ahead)
            return
        self._stop_running_ahead(session_id)
        if item.run_ahead > 0 and not item.proposal:
            ahead = self._ahead[session_id] = RunAhead(item, outlet)
            if len(self._ahead) > SEQUENCES_PER_REPLICA_MAX:
                self._stop_running_ahead(next(iter(self._ahead)))
            self._run_next(session_id, ahead)
        else:
            super()._accept(item, outlet)

    def _on_release(self, session_id: str) -> None:
        self._stop_running_ahead(session_id)

    def _run_next(self, session_id: str, ahead: RunAhead) -> None:
        """Queues the next round of a session that runs ahead, if it may have one. It joins the
        queue at its end like any other work."""
        item = ahead.next_item(self._description.max_model_len)
        if item is None:
            ahead.outlet.flush(session_id)
            return
        work = self._work(item, ahead.outlet)
        work.may_wait = ahead.is_ahead
        work.on_done = lambda work, answer: self._on_round_done(session_id, ahead, work, answer)
        ahead.running = work
        if not self._submit(work):
            self._forget(session_id, ahead)

    def _on_round_done(
        self,
        session_id: str,
        ahead: RunAhead,
        work: StepRequest[VerifyItem, VerifyAnswer],
        answer: VerifyAnswer | None,
    ) -> None:
        if self._ahead.get(session_id) is not ahead or ahead.running is not work:
            return
        ahead.running = None
        if isinstance(answer, VerdictReply):
            ahead.add(answer)
            if answer.verdict.correction[0] in self._description.eos_token_ids:
                ahead.outlet.flush(session_id)  # The session probably ends.
            self._run_next(session_id, ahead)
        else:
            self._forget(session_id, ahead)

    def _stop_running_ahead(self, session_id: str) -> None:
        ahead = self._ahead.pop(session_id, None)
        if ahead is not None and ahead.running is not None:
            ahead.running.cancelled = True

    def _forget(self, session_id: str, ahead: RunAhead) -> None:
        if self._ahead.get(session_id) is ahead:
            del self._ahead[session_id]
