"""The draft's service and its worker."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from draft_service.lookahead import LookAhead, RoundAhead
from draft_service.model_drafter import ModelDrafter
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.errors import Incompatible
from outrider.foundation.tokens import EMPTY_DIGEST
from outrider.grammar.compiler import Grammars
from outrider.interfaces.messages import DraftItem, ProposalReply
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import BATCHED_TOKENS_DEFAULT
from outrider.replica.admission import (
    Admission,
    Admitted,
    EngineWorker,
    SlotDemand,
    Work,
    draft_request,
)
from outrider.replica.drivers import StepDriver
from outrider.replica.service import SteppedService, describe_model
from outrider.replica.step_loop import StepLoop
from outrider.replica.step_request import (
    Answers,
    AnswerSender,
    StepAnswer,
    StepRequest,
    Unfinished,
    undrawn,
)
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal

logger = logging.getLogger(__name__)


class DraftService(SteppedService[DraftItem]):
    """Answers draft items with proposals of one drafter."""

    def __init__(
        self,
        drafter: ModelDrafter,
        driver: StepDriver,
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
        # With costs, coordinators expect a pass for each token. A one-pass drafter needs only one.
        described_costs = None if drafter.in_one_pass else costs
        description = replace(
            describe_model(drafter.engine.info, max_num_seqs, described_costs),
            reads_features=drafter.reads_features,
        )
        steps = StepLoop(self._proposer, max_num_seqs)
        super().__init__(steps, driver, description, grammars)

    def _work(self, item: DraftItem, sender: AnswerSender) -> StepRequest[DraftItem]:
        """Starts the time limit of an item's draft. If the time ends before a token is drawn, a
        timer tells the coordinator. With look-ahead there is no timer, and only steps check the
        limit, because the round's tokens may already be drawn."""
        loop, engine = asyncio.get_running_loop(), self._engine
        deadline = DraftDeadline.after(
            item.budget_us, lambda: loop.time() + engine.stated_seconds, loop.time()
        )
        work = super()._work(item, sender)
        work.draft_deadline = deadline
        if not self._proposer.looks_ahead(item) and deadline is not NO_DEADLINE:
            work.timer = loop.call_at(deadline.ends_at, self._report_undrawn, work, deadline)
        return work

    def _report_undrawn(self, work: StepRequest[DraftItem], deadline: DraftDeadline) -> None:
        """If no token is drawn yet, reports this to the coordinator, and prevents draws. The item's
        prefix still runs. Then an empty proposal reports how many tokens the replica holds."""
        if deadline.close_undrawn():
            work.answered = True
            work.sender.send([undrawn(work.key)])


class _Drafting(Work[DraftItem]):
    draft: AutoregressiveDraft
    num_held: int  # how many of the session's tokens the engine held before the item's first step
    is_whole: bool  # whether the step runs all missing tokens of the prefix, and may propose

    def __init__(self, request: StepRequest[DraftItem], drafter: ModelDrafter) -> None:
        super().__init__(request.item, request.grammar)
        self.deadline = request.draft_deadline
        self._drafter = drafter

    @property
    def must_be_whole(self) -> bool:
        """Whether neither time nor a lack of pages may shorten the proposal. So it is in a session
        with a repeated seed (docs/exactness.md). Such items have no look-ahead."""
        item = self.item
        return self.deadline is NO_DEADLINE and item.held is None and item.look_ahead == 0

    @property
    def demand(self) -> SlotDemand:
        """Without look-ahead, the proposal's last token is never run and needs no slot. A head runs
        a token only if it has the feature of the token before. So features limit `reach`."""
        item = self.item
        if self._drafter.reads_features:
            reach = 0 if item.features is None else item.features.end + 1
            if reach < item.head.committed_length:
                return SlotDemand(item.head, 0, reach=reach)
        if item.held is not None:
            return SlotDemand(item.head, len(item.held), len(item.held) + 1)
        num_extra = max(0, item.num_draft_tokens - (item.look_ahead == 0))
        num_rows = 1 + num_extra if self._drafter.in_one_pass else 1
        return SlotDemand(item.head, num_extra, num_rows, takes_idle=self.must_be_whole)


class Proposer(EngineWorker[DraftItem, _Drafting]):
    """Drafts for the items of a step. A session without pages gets an empty proposal. The output
    stays exact, because the lack of pages does not depend on the values of tokens. But it may
    depend on the tokens of a session with the same seed. So an item that must be whole waits for
    pages."""

    def __init__(
        self, drafter: ModelDrafter, budget: TokenBudget, grammars: Grammars | None = None
    ) -> None:
        """Without `grammars`, drafts ignore constraints. The target then rejects more tokens."""
        engine, look_ahead = drafter.engine, LookAhead(drafter, budget.max_steps)
        admission = Admission(engine, budget, grammars, look_ahead.drop_drafts, self._forget)
        super().__init__(budget, admission)
        self._engine, self._drafter, self._look_ahead = engine, drafter, look_ahead
        self._unfinished: dict[str, _Drafting] = {}  # by session; a later step continues them

    def looks_ahead(self, item: DraftItem) -> bool:
        """Whether the draft looks ahead for the item's session. Any thread may call this."""
        wants = item.look_ahead > 0 and item.head.constraint is None
        return wants and self._drafter.looks_ahead

    def prepare(self, requests: Sequence[StepRequest[DraftItem]]) -> list[_Drafting]:
        works = [self._work(request) for request in requests]
        self._begin([work for work in works if not self._look_ahead.works_on(work.item)])
        return works

    def launch(self, prepared: Sequence[_Drafting]) -> Callable[[], list[StepAnswer]]:
        """Runs all passes while the caller waits, because each pass needs the tokens of the one
        before."""
        return partial(self._run, prepared)

    def _run(self, prepared: Sequence[_Drafting]) -> list[StepAnswer]:
        """If look-ahead already knows the answer to an item, runs no pass of look-ahead, because it
        would delay the answer."""
        ahead = self._look_ahead
        active = [work for work in prepared if ahead.works_on(work.item)]
        waiting = [work for work in prepared if not ahead.works_on(work.item)]
        admitted = [work for work in waiting if work.answer is None]
        for works, drafts in self._admission.passes(admitted, self._launch, self._undo):
            self._finish(works, drafts)
        if any(isinstance(work.answer, Answers) and work.answer.answers for work in active):
            self._budget.drop_step()
            for work in active:
                work.answer = work.answer or ahead.progress(work.item)
        elif active:
            results = ahead.advance([work.item for work in active])
            for work, answers in zip(active, results, strict=True):
                work.answer = answers
        self._admission.note_pages()
        return [work.result for work in prepared]

    def _work(self, request: StepRequest[DraftItem]) -> _Drafting:
        name = request.session_id
        work = self._unfinished.pop(name, None)
        if work is not None and work.item is request.item:
            work.answer = None
            return work
        if work is not None:
            # Drops the draft tokens of an earlier item. A head has run them on guessed features, so
            # they cannot be kept even if the same tokens were committed.
            self._engine.keep(name, len(work.draft.request.token_ids))
        return _Drafting(request, self._drafter)

    def _begin(self, works: Sequence[_Drafting]) -> None:
        new = [work for work in works if not hasattr(work, "draft")]
        self._admission.admit(new, lambda work: None, self._prepare, len(works) - len(new))
        for work in new:
            if work.answer is Unfinished.WAITS and not self._waits_for_pages(work):
                held = self._engine.length(work.head.session_id)
                length = work.head.committed_length
                work.answer = ProposalReply(work.head.key, EMPTY_ENCODED_PROPOSAL, length, held)

    def _waits_for_pages(self, work: _Drafting) -> bool:
        """Whether an item keeps waiting for pages, of which the replica has enough altogether."""
        length = work.head.committed_length + work.demand.num_extra
        return work.must_be_whole and length <= self._admission.num_slots

    def _forget(self, session_id: str) -> None:
        self._unfinished.pop(session_id, None)
        self._look_ahead.forget(session_id)

    def _prepare(self, work: _Drafting, admitted: Admitted) -> None:
        item, aligned, is_whole = work.item, admitted.aligned, admitted.is_whole
        committed = aligned.committed
        if is_whole and self.looks_ahead(item):
            new_tokens, digest = aligned.new_tokens, aligned.digest
            ahead = RoundAhead(item, work.deadline, committed, new_tokens, digest)
            work.answer = self._look_ahead.begin(ahead)
            return
        if not self.looks_ahead(item):
            self._look_ahead.forget(work.head.session_id)  # Earlier items may have had look-ahead.
        num_missing = len(aligned.new_tokens) - admitted.num_granted
        num_draft_tokens, deadline, allowed = 0, NO_DEADLINE, None
        if is_whole:
            deadline = work.deadline
            if item.held is None:
                num_draft_tokens = item.num_draft_tokens
            try:
                allowed = self._admission.allowed(work, aligned)
            except Incompatible as error:
                logger.debug("a draft ignores its session's constraint: %s", error)
        work.is_whole, work.num_held = is_whole, len(aligned.sequence)
        request = draft_request(
            work.head,
            work.sampling,
            committed[: len(committed) - num_missing],
            len(committed),
            aligned.digest if is_whole else EMPTY_DIGEST,
            num_draft_tokens=num_draft_tokens,
            allowed=allowed,
            deadline=deadline,
            features=item.features,
        )
        work.draft = self._drafter.begin(request)
        work.draft.must_be_whole = work.must_be_whole

    def _launch(self, works: Sequence[_Drafting]) -> Callable[[], Sequence[AutoregressiveDraft]]:
        return partial(self._passes, works)

    def _passes(self, works: Sequence[_Drafting]) -> Sequence[AutoregressiveDraft]:
        drafts = [work.draft for work in works]
        self._drafter.extend(drafts)
        self._budget.note_passes(max(1, self._drafter.num_passes))
        return drafts

    def _undo(self, work: _Drafting) -> None:
        if not work.draft.token_ids:
            self._engine.keep(work.head.session_id, work.num_held)
            # If the engine has forgotten the sequence, the new draft runs all tokens.
            work.draft = self._drafter.begin(work.draft.request)
            work.draft.must_be_whole = work.must_be_whole

    def _finish(self, works: Sequence[_Drafting], drafts: Sequence[AutoregressiveDraft]) -> None:
        for work, draft in zip(works, drafts, strict=True):
            if draft.error is not None:
                self._admission.fail(work, draft.error)
            elif draft.is_lost:
                work.answer = Unfinished.CONTINUES  # The next step begins a new draft.
            elif draft.is_whole:
                self._answer(work)
            else:
                self._unfinished[work.head.session_id] = work
                work.answer = Unfinished.CONTINUES

    def _answer(self, work: _Drafting) -> None:
        key, deadline = work.head.key, work.deadline
        held = self._engine.length(work.head.session_id)
        if work.is_whole or held < len(work.draft.request.token_ids):
            encoded = EncodedProposal.of(work.draft.proposal)
            length = work.head.committed_length
            work.answer = ProposalReply(key, encoded, length, held, out_of_time=deadline.has_cut)
        elif deadline.is_over and deadline.close_undrawn():
            work.answer = Answers((undrawn(key),), more=True)
        else:
            work.answer = Unfinished.CONTINUES
