"""One step of a draft: prefixes checked, then one call of the drafter for every session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from draft_service.model_drafter import ModelDrafter, Unended
from outrider.drafters.drafter import NO_DEADLINE, DraftRequest
from outrider.engine.interface import Engine
from outrider.errors import BadRequest, EngineLost, Incompatible, OutriderError, check
from outrider.grammar.matcher import Matchers
from outrider.grammar.token_mask import Allowed
from outrider.kv_cache.session_table import SessionTable
from outrider.messages import DraftAnswer, DraftItem, ProposalReply, Refused, Resync, RoundHead
from outrider.replica.admission import Admission, Admissions, Admitted, SlotDemand
from outrider.replica.step_request import Answers, StepFigures, Unfinished, refusal, undrawn
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.proposal import NOTHING_SEALED, Proposal, SealedProposal
from outrider.speculation.sampling_params import Rule, SamplingParams

from .lookahead import LookAhead

logger = logging.getLogger(__name__)

PASSES_MAX: Final = 2
"""Of one step. More would keep waiting who comes in an engine that states its time afterwards."""
_Answer = DraftAnswer | Unfinished | Answers


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An item, and what the drafter is asked for its sake."""

    item: DraftItem
    request: DraftRequest
    new_tokens: tuple[int, ...]
    """Of the request's tokens those that are not held."""
    is_whole: bool = True
    """Whether a proposal follows; else a part of the prefix is run."""


class FallibleDrafter(Protocol):
    """A `Drafter`, or one that may fail for one request and serve the others of the same call."""

    def propose(
        self, requests: Sequence[DraftRequest]
    ) -> Sequence[Proposal | OutriderError | Unended]:
        """See `Drafter.propose`; or why nothing could be proposed to one session; or that its
        proposal goes on when it is asked for again. Not all of them do."""
        ...

    def release(self, session_id: str) -> None: ...


class Proposer:
    """The draft's `StepWorker`: owns the drafter and what tokens it holds of which session.

    A session that finds no pages is answered an empty proposal: its round goes on without a draft,
    and lasts no longer. That is as exact as any, since it depends on no token's value.
    """

    def __init__(
        self,
        drafter: FallibleDrafter,
        engine: Engine | None = None,
        budget: TokenBudget | None = None,
        look_ahead: tuple[int, int] | None = None,
        matchers: Matchers | None = None,
    ) -> None:
        """`engine` is the one behind the drafter, and `budget` bounds each of its steps; None for a
        drafter that keeps no slots. With `look_ahead`, the bounds of `LookAhead`, a `ModelDrafter`
        works out what comes next where items ask for it. Without `matchers` what is drafted for
        sessions with a constraint may not meet it, and is then refused by the target."""
        check((engine is None) == (budget is None), "an engine has a budget, and nothing else has")
        self._drafter = drafter
        self._engine = engine
        self._table = SessionTable(engine)
        self._admissions: Admissions | None = None
        self._look_ahead: LookAhead | None = None
        if engine is not None and budget is not None:
            self._admissions = Admissions(engine, self._table, budget, self._give_way)
            if look_ahead is not None and isinstance(drafter, ModelDrafter):
                self._look_ahead = LookAhead(engine, self._table, drafter, *look_ahead)
        self._matchers = matchers
        self._unfinished: dict[str, _Prepared] = {}
        """By session: what the drafter goes on with when its item comes again."""
        self._has_news: Callable[[], bool] = lambda: True
        self._figures = self._now()

    def watch(self, has_news: Callable[[], bool]) -> None:
        """Names who knows, on any thread, whether anything has come since a step began."""
        self._has_news = has_news

    def looks_ahead(self, item: DraftItem) -> bool:
        """Whether tokens of the rounds behind an item may be drawn before these are asked for; may
        be called on any thread."""
        wants = item.look_ahead > 0 and item.head.constraint is None
        return wants and self._look_ahead is not None

    @property
    def figures(self) -> StepFigures:
        return self._figures

    def step(self, items: Sequence[DraftItem]) -> list[_Answer]:
        """See `StepWorker.step`. Where rounds are looked ahead of, those that are new begin, and
        then all of them advance by a pass; but what is known at once does not wait for it."""
        ahead = self._look_ahead
        if ahead is None:
            answers = self._begin(items)
        else:
            new = [index for index, item in enumerate(items) if not ahead.works_on(item)]
            begun = dict(zip(new, self._begin([items[index] for index in new]), strict=True))
            known_at_once = any(isinstance(a, Answers) and a.answers for a in begun.values())
            active = [index for index, item in enumerate(items) if ahead.works_on(item)]
            if active and not known_at_once:
                advanced = self._advance(ahead, [items[index] for index in active])
                begun |= dict(zip(active, advanced, strict=True))
            answers = [
                begun[index] if index in begun else ahead.progress(item)
                for index, item in enumerate(items)
            ]
        self._figures = self._now()
        return answers

    def _advance(self, ahead: LookAhead, items: Sequence[DraftItem]) -> list[Answers]:
        """A pass for these rounds; or two, where nobody waits and nothing has come meanwhile: to
        hand a step over takes as long as a good part of a quick pass."""
        for _ in range(PASSES_MAX):
            found = ahead.advance(items)
            is_calm = not any(entry.answers or entry.waited_for for entry in found)
            if not is_calm or self._has_news() or not any(entry.more for entry in found):
                break
        return found

    def _begin(self, items: Sequence[DraftItem]) -> list[_Answer]:
        known = [self._kept(item) or _refused(item) for item in items]
        new = [item for item, entry in zip(items, known, strict=True) if entry is None]
        prepared = map(self._prepare, new, self._admit(new))
        entries = [next(prepared) if entry is None else entry for entry in known]
        answers = iter(self._run([entry for entry in entries if isinstance(entry, _Prepared)]))
        return [next(answers) if isinstance(entry, _Prepared) else entry for entry in entries]

    def _kept(self, item: DraftItem) -> _Prepared | None:
        """What goes on of an item; what goes on of another one of its session is given up."""
        entry = self._unfinished.pop(item.head.session_id, None)
        return entry if entry is not None and entry.item is item else None

    def park(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            self._unfinished.pop(session_id, None)
            if self._look_ahead is not None:
                self._look_ahead.forget(session_id)
            self._table.park(session_id)
        self._figures = self._now()

    def release(self, session_id: str) -> None:
        self._forget(session_id)

    def forget_tokens(self, session_id: str) -> None:
        """The session is asked for again by a resync, with all that goes with its tokens."""
        self._table.release(session_id)

    def recover(self, items: Sequence[DraftItem]) -> None:
        for item in items:
            self._forget(item.head.session_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless tokens and slots agree for every session."""
        self._table.check_integrity()

    def _now(self) -> StepFigures:
        return StepFigures() if self._admissions is None else self._admissions.figures

    def _admit(self, items: Sequence[DraftItem]) -> Sequence[Admission]:
        if self._admissions is None:
            return [self._align(item.head) for item in items]
        return self._admissions.admit([_demand(item) for item in items])

    def _align(self, head: RoundHead) -> Admission:
        """Where there are no pages, nobody waits for any."""
        try:
            aligned = self._table.align(head)
        except OutriderError as error:
            return error
        return (
            aligned if isinstance(aligned, Resync) else Admitted(aligned, len(aligned.new_tokens))
        )

    def _prepare(self, item: DraftItem, admission: Admission) -> _Prepared | _Answer:
        head = item.head
        if isinstance(admission, OutriderError):
            return refusal(head.key, admission)
        if admission is Unfinished.WAITS:
            held = self._table.length(head.session_id)
            return ProposalReply(head.key, NOTHING_SEALED, head.committed_length, held)
        if not isinstance(admission, Admitted):
            return admission
        aligned = admission.aligned
        if admission.is_whole and self._look_ahead is not None and self.looks_ahead(item):
            return self._look_ahead.begin(item, aligned.committed, aligned.new_tokens)
        num_missing = len(aligned.new_tokens) - admission.num_granted
        committed = aligned.committed
        request = DraftRequest(
            session_id=head.session_id,
            tenant=head.tenant,
            token_ids=committed[: len(committed) - num_missing],
            prompt_length=head.prompt_length,
            num_draft_tokens=item.num_draft_tokens
            if admission.is_whole and item.held is None
            else 0,
            sampling=head.params(),
            rule=head.rule,
            noise=head.noise,
            siblings=item.siblings,
            features=item.features,
            allowed=self._allowed(head, committed) if admission.is_whole else None,
            digests=aligned.sequence,
            deadline=item.deadline if admission.is_whole else NO_DEADLINE,
        )
        new_tokens = aligned.new_tokens[: admission.num_granted]
        return _Prepared(item, request, new_tokens, admission.is_whole)

    def _allowed(self, head: RoundHead, committed: Sequence[int]) -> Allowed | None:
        """What may follow the committed tokens; None where anything may, or nobody knows here."""
        if head.compiled is None or self._matchers is None:
            return None
        completion = committed[head.prompt_length :]
        try:
            return self._matchers.follow(head.session_id, head.compiled, completion)
        except Incompatible as error:
            logger.info("a session is drafted for without its constraint: %s", error)
            return None

    def _run(self, prepared: Sequence[_Prepared]) -> list[_Answer]:
        """One call of the drafter for all; where it raises an error with a name, each session
        alone, so that the one with the error hurts nobody else. Raises `EngineLost`."""
        if not prepared:
            return []
        try:
            proposals = self._drafter.propose([entry.request for entry in prepared])
        except EngineLost:
            raise
        except OutriderError as error:
            if len(prepared) > 1:
                return [self._run_alone(entry) for entry in prepared]
            return [self._fail(prepared[0].item, error)]
        return [
            self._answer(entry, proposal)
            for entry, proposal in zip(prepared, proposals, strict=True)
        ]

    def _run_alone(self, entry: _Prepared) -> _Answer:
        """Again for one session. The failed call may have run some of its steps: back to where
        the session stood."""
        request = entry.request
        if self._engine is not None:
            before = len(request.token_ids) - len(entry.new_tokens)
            if not request.goes_on and self._engine.length(request.session_id) > before:
                self._engine.keep(request.session_id, before)
        return self._run([entry])[0]

    def _answer(self, entry: _Prepared, proposal: Proposal | OutriderError | Unended) -> _Answer:
        if isinstance(proposal, OutriderError):
            return self._fail(entry.item, proposal)
        head = entry.item.head
        if isinstance(proposal, Unended):
            self._record(entry, proposal.token_ids)
            self._unfinished[head.session_id] = replace(
                entry, request=replace(entry.request, goes_on=True, digests=None)
            )
            return Unfinished.CONTINUES
        # Without an engine nothing is cached of the guesses, and nothing needs to be.
        held = self._record(entry, () if self._engine is None else proposal.spine_ids)
        if not entry.is_whole and held == len(entry.request.token_ids):
            deadline = entry.item.deadline
            if deadline.is_over and deadline.close_undrawn():
                return Answers((undrawn(head.key),), more=True)
            return Unfinished.CONTINUES
        # A part that was not run holds what the model cannot read: no more of it will be.
        return ProposalReply(
            key=head.key,
            proposal=SealedProposal.of(proposal),
            base_length=head.committed_length,
            cached_length=held,
            out_of_time=entry.item.deadline.has_cut,
        )

    def _record(self, entry: _Prepared, drafted: Sequence[int]) -> int:
        """Notes what was run for an item; the tokens that are held now."""
        session_id, new_tokens = entry.item.head.session_id, entry.new_tokens
        if entry.request.goes_on:  # Some of it is noted, if it was not evicted.
            run = (*entry.request.token_ids, *drafted)
            return self._table.record(session_id, run[self._table.length(session_id) :])
        return self._table.record(session_id, (*new_tokens, *drafted))

    def _fail(self, item: DraftItem, error: OutriderError) -> Refused:
        """What a failed pass has left of the session cannot be trusted, so it is forgotten."""
        self._forget(item.head.session_id)
        return refusal(item.head.key, error)

    def _give_way(self) -> None:
        if self._look_ahead is not None:
            self._look_ahead.give_way()

    def _forget(self, session_id: str) -> None:
        self._unfinished.pop(session_id, None)
        if self._look_ahead is not None:
            self._look_ahead.forget(session_id)
        self._drafter.release(session_id)
        self._table.release(session_id)
        if self._matchers is not None:
            self._matchers.release(session_id)


def _demand(item: DraftItem) -> SlotDemand:
    """What it needs; the last token of a proposal is drawn, and run only to look ahead."""
    if item.held is not None:
        return SlotDemand(item.head, len(item.held), len(item.held) + 1)
    return SlotDemand(item.head, max(0, item.num_draft_tokens - (item.look_ahead == 0)))


def _refused(item: DraftItem) -> Refused | None:
    """Why an item cannot be answered; nothing has changed then."""
    try:
        sampling = item.head.params()
        if any(item.siblings) and (reason := _no_tree(item, sampling)):
            raise BadRequest("siblings", reason)
    except BadRequest as error:
        return refusal(item.head.key, error)
    return None


def _no_tree(item: DraftItem, sampling: SamplingParams) -> str:
    """Why no tree can be drafted; empty where one can."""
    if item.head.rule is Rule.BLOCK:
        return "block verification has no tree"
    if sampling.penalised:
        return "penalties count the tokens of a chain"
    return "a draft that looks ahead proposes chains" if item.look_ahead > 0 else ""
