"""One step of a target: one forward pass over every item, then a verdict for each.

item ok?  -> prefix held?  -> room?      -> forward (all) -> mask, transforms, rule -> verdict
Refused      Resync           Unfinished    append + proposal      next to the logits
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from outrider.drafters.drafter import DraftDeadline, DraftRequest
from outrider.engine.interface import Engine, FeatureEngine, SequenceStep
from outrider.engine.threads import on_threads
from outrider.errors import BadRequest, EngineLost, Incompatible, InvariantError, OutriderError
from outrider.grammar.matcher import Matchers
from outrider.grammar.token_mask import Allowed
from outrider.hidden_states import BYTES_OF_A_NUMBER, Features
from outrider.kv_cache.session_table import Aligned, SessionTable
from outrider.messages import (
    PositionLogprobs,
    Refused,
    Resync,
    RoundHead,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.replica.admission import Admission, Admissions, Admitted, SlotDemand
from outrider.replica.step_request import StepFigures, Unfinished, refusal
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.accept_reject import Outcome, Verdict, decide, ending_at
from outrider.speculation.audit import audit
from outrider.speculation.logits_processing import (
    TokenHistory,
    masked_logits,
    raw_logprobs,
    row_masks,
)
from outrider.speculation.proposal import Proposal, SealedProposal, require_q
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.verification import Question, verdicts_from_logits

from .self_drafting import SelfDrafter

logger = logging.getLogger(__name__)

_REPLACEMENT: Final = 0
"""Runs in place of a draft token outside the target's vocabulary. Such a token has p = 0 and is
never accepted, so what follows it is never used."""

_ROWS_AT_ONCE: Final = 64
"""Rows of logits that verdicts are made from at once: on one thread a verdict on one row of 49,152
tokens takes 0.40 ms alone and 0.13 among eight, one on five rows 0.76 and 0.45. More gain nothing,
and take memory."""


@dataclass(frozen=True, slots=True)
class _Question:
    """An item that this model can answer."""

    item: VerifyItem
    proposal: Proposal
    sampling: SamplingParams

    @property
    def demand(self) -> SlotDemand:
        num_drafted = len(self.proposal.token_ids)
        return SlotDemand(self.item.head, num_drafted, num_drafted + 1)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One item's share of a forward pass."""

    question: _Question
    step: SequenceStep
    history: TokenHistory
    allowed: Allowed | None = None
    """What may follow the committed tokens; None = anything."""

    @property
    def is_whole(self) -> bool:
        """Whether a verdict follows; else it runs a part of the prefix."""
        return self.step.num_logits > 0


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """A pass of which a verdict is wanted."""

    entry: _Pass
    logits: torch.Tensor
    """[K+1, V], as the model gave them."""
    question: Question
    """Holds them under the constraint."""
    untold: frozenset[int]
    """See `RowMasks.untold`."""

    @classmethod
    def of(cls, entry: _Pass, logits: torch.Tensor) -> _Judged:
        head, proposal = entry.question.item.head, entry.question.proposal
        sampled, untold = logits, frozenset[int]()
        if entry.allowed is not None:
            rows = row_masks(entry.allowed, proposal)
            sampled, untold = masked_logits(logits, rows.masks), rows.untold
        question = Question(sampled, entry.question.sampling, entry.history, proposal, head.noise)
        return cls(entry, logits, question, untold)


class Verifier:
    """The target's `StepWorker`: owns the engine's sequences and what tokens they hold."""

    def __init__(
        self,
        engine: Engine,
        budget: TokenBudget,
        self_drafter: SelfDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        matchers: Matchers | None = None,
    ) -> None:
        """`budget` bounds each step. A `self_drafter` reads what the engine shows of its own, and
        takes the time of this clock, in seconds. Without `matchers` sessions with a constraint are
        refused."""
        self._engine = engine
        self._clock = clock
        self._shown = shown_by(engine)
        self._self_drafter = self_drafter
        if self_drafter is not None and self_drafter.reads_features and self._shown is None:
            raise InvariantError("a target whose heads draft shows its hidden states")
        self._table = SessionTable(engine)
        self._admissions = Admissions(engine, self._table, budget)
        self._figures = self._admissions.figures
        self._matchers = matchers

    @property
    def figures(self) -> StepFigures:
        return self._figures

    def step(self, items: Sequence[VerifyItem]) -> list[VerifyAnswer | Unfinished]:
        read = [self._read(item) for item in items]
        questions = [entry for entry in read if isinstance(entry, _Question)]
        admissions = self._admissions.admit([question.demand for question in questions])
        prepared = map(self._prepare, questions, admissions)
        entries = [next(prepared) if isinstance(entry, _Question) else entry for entry in read]
        with torch.inference_mode():
            answers = iter(self._run([entry for entry in entries if isinstance(entry, _Pass)]))
        self._figures = self._admissions.figures
        return [next(answers) if isinstance(entry, _Pass) else entry for entry in entries]

    def park(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            self._table.park(session_id)
        self._figures = self._admissions.figures

    def release(self, session_id: str) -> None:
        self._forget(session_id)

    def recover(self, items: Sequence[VerifyItem]) -> None:
        for item in items:
            self._forget(item.head.session_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless tokens and slots agree for every session."""
        self._table.check_integrity()

    def _read(self, item: VerifyItem) -> _Question | Refused:
        """Checks an item; nothing has changed then."""
        try:
            return _Question(item, item.proposal.open(), self._validate(item))
        except OutriderError as error:
            return refusal(item.head.key, error)

    def _prepare(
        self, question: _Question, admission: Admission
    ) -> _Pass | Resync | Refused | Unfinished:
        head = question.item.head
        if isinstance(admission, OutriderError):
            return refusal(head.key, admission)
        if not isinstance(admission, Admitted):
            return admission
        new_tokens = admission.aligned.new_tokens
        if not admission.is_whole:
            part = SequenceStep(head.session_id, new_tokens[: admission.num_granted], num_logits=0)
            return _Pass(question, part, TokenHistory())
        try:
            allowed = self._allowed(head, admission.aligned)
        except OutriderError as error:
            self._forget(head.session_id)
            return refusal(head.key, error)
        vocab_size = self._engine.info.vocab_size
        drafted = tuple(v if v < vocab_size else _REPLACEMENT for v in question.proposal.token_ids)
        step = SequenceStep(
            head.session_id,
            (*new_tokens, *drafted),
            num_logits=len(drafted) + 1,
            parents=_parents(len(new_tokens), question.proposal.parents),
        )
        return _Pass(question, step, _history(question, admission.aligned), allowed)

    def _allowed(self, head: RoundHead, aligned: Aligned) -> Allowed | None:
        """What may follow the committed tokens. Raises `Incompatible` for a constraint that cannot
        be held to here."""
        if head.constraint is None:
            return None
        if self._matchers is None or head.compiled is None:
            raise Incompatible(f"{head.constraint.kind}: this target has no tokenizer")
        completion = aligned.committed[head.prompt_length :]
        return self._matchers.follow(head.session_id, head.compiled, completion)

    def _forget(self, session_id: str) -> None:
        self._table.release(session_id)
        if self._matchers is not None:
            self._matchers.release(session_id)

    def _validate(self, item: VerifyItem) -> SamplingParams:
        """Raises `BadRequest` for what this model cannot do."""
        info, head = self._engine.info, item.head
        sampling = head.params()
        if head.append and max(head.append) >= info.vocab_size:
            raise BadRequest(
                "head.append",
                f"token {max(head.append)} is outside the vocabulary of {info.vocab_size}",
            )
        length = head.committed_length + len(item.proposal)
        if length > info.max_model_len:
            raise BadRequest(
                "head.append" if head.committed_length > info.max_model_len else "proposal",
                f"{head.committed_length} committed and {len(item.proposal)} draft tokens are more "
                f"than max_model_len {info.max_model_len}",
            )
        if item.next_siblings and (head.rule is Rule.BLOCK or sampling.penalised):
            raise BadRequest("next_siblings", "are wanted; block and penalties have chains alone")
        if item.audit and item.proposal.parents:
            raise BadRequest("proposal.parents", "are of a tree; committed tokens are a chain")
        if item.proposal.parents and head.rule is Rule.BLOCK:
            raise BadRequest("proposal.parents", "are of a tree; block verification has none")
        if item.proposal.parents and sampling.penalised:
            raise BadRequest("proposal.parents", "are of a tree; penalties count those of a chain")
        if sampling.top_k > info.vocab_size:
            raise BadRequest(
                "sampling.top_k", f"{sampling.top_k} is over {info.vocab_size}, the vocabulary"
            )
        for token_id, _ in sampling.logit_bias[-1:]:
            if token_id >= info.vocab_size:
                raise BadRequest(
                    "sampling.logit_bias",
                    f"token {token_id} is outside the vocabulary of {info.vocab_size}",
                )
        require_q(item.proposal, head.rule)
        return sampling

    def _run(self, passes: Sequence[_Pass]) -> list[VerifyAnswer | Unfinished]:
        """One forward pass for all. An error of the engine that has a name is some item's own: each
        then runs alone, so that it hurts nobody else. Raises `EngineLost`."""
        if not passes:
            return []
        try:
            logits = self._engine.forward([entry.step for entry in passes])
        except EngineLost:
            raise
        except OutriderError as error:
            if len(passes) > 1:
                return [self._run([entry])[0] for entry in passes]
            return [self._fail(passes[0], error)]
        # Before any verdict: whatever happens there, tokens and slots agree. A tree is noted
        # with its verdict; where none comes, the session's next step gives its slots up.
        for entry in passes:
            if not entry.question.proposal.parents or not entry.is_whole:
                self._table.record(entry.step.sequence_id, entry.step.token_ids)
        # Operators on a few rows gain little by threads, and wait for cores that others use.
        with on_threads(1):
            answers = self._judge(passes, logits)
        return self._with_next_proposals(passes, self._with_features(passes, answers))

    def _with_features(
        self, passes: Sequence[_Pass], answers: list[VerifyAnswer | Unfinished]
    ) -> list[VerifyAnswer | Unfinished]:
        """The answers of a pass, with what the head read at the tokens that verdicts commit, where
        that is wanted."""
        if self._shown is None or not any(e.question.item.wants_features for e in passes):
            return answers
        found, features = list(answers), self._shown.features()
        wanting = [
            (index, answer, _outcome(entry, answer.verdict).path)
            for index, (entry, answer) in enumerate(zip(passes, answers, strict=True))
            if isinstance(answer, VerdictReply) and entry.question.item.wants_features
        ]
        rows = [features[index][[0, *(place + 1 for place in path)]] for index, _, path in wanting]
        firsts = [passes[index].question.item.head.committed_length - 1 for index, *_ in wanting]
        for (index, answer, _), shown in zip(wanting, sealed_features(rows, firsts), strict=True):
            found[index] = replace(answer, features=shown)
        return found

    def _with_next_proposals(
        self, passes: Sequence[_Pass], answers: list[VerifyAnswer | Unfinished]
    ) -> list[VerifyAnswer | Unfinished]:
        """The answers of a pass, with what is drafted behind those that are verdicts and want it.
        A proposal that fails costs speed alone."""
        drafter = self._self_drafter
        if drafter is None:
            return answers
        found = list(answers)
        replies: list[tuple[int, VerdictReply]] = []
        requests: list[DraftRequest] = []
        features: list[torch.Tensor] = []
        proposals: list[Proposal] = []
        draft_ms = 0.0
        try:
            shown = self._shown.features() if self._shown and drafter.reads_features else ()
            for index, (entry, answer) in enumerate(zip(passes, answers, strict=True)):
                if not isinstance(answer, VerdictReply):
                    continue
                outcome = _outcome(entry, answer.verdict)
                request = self._next_request(entry, outcome)
                if request is not None:
                    found[index] = reply = self._given_up(answer, request)
                    replies.append((index, reply))
                    requests.append(request)
                    features += [rows[outcome.last] for rows in shown[index : index + 1]]
            if requests:
                began = self._clock()
                proposals = drafter.propose(requests, features)
                draft_ms = (self._clock() - began) * 1e3
        except Exception:
            logger.exception("nothing is proposed behind %d verdicts", len(requests))
            return found
        for (index, reply), request, proposal in zip(replies, requests, proposals, strict=True):
            found[index] = replace(
                reply,
                next_proposal=SealedProposal.of(proposal),
                next_base_length=request.noise.committed_length,
                next_draft_ms=draft_ms,
                next_work_ms=draft_ms / len(requests),
                next_out_of_time=request.deadline.has_cut,
            )
        return found

    def _given_up(self, reply: VerdictReply, request: DraftRequest) -> VerdictReply:
        num_run = request.noise.committed_length - 1
        return replace(reply, cached_length=self._table.keep(request.session_id, num_run))

    def _next_request(self, entry: _Pass, outcome: Outcome) -> DraftRequest | None:
        """Asks for the proposal behind an outcome; None where nothing is wanted of it, or nothing
        more fits."""
        head, sampling = entry.question.item.head, entry.question.sampling
        length = head.committed_length + len(outcome.token_ids)
        item = entry.question.item
        room = self._engine.info.max_model_len - length - sum(item.next_siblings)
        num_draft_tokens = min(item.num_next_draft_tokens, room)
        if num_draft_tokens <= 0:
            return None
        token_ids = outcome.token_ids[-1:]
        if sampling.penalised:
            token_ids = (*entry.history.prompt_ids, *entry.history.output_ids, *outcome.token_ids)
        return DraftRequest(
            session_id=head.session_id,
            tenant=head.tenant,
            token_ids=token_ids,
            prompt_length=len(entry.history.prompt_ids),
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            rule=head.rule,
            noise=RoundNoise(head.seed, head.rule, length),
            siblings=item.next_siblings,
            allowed=None if entry.allowed is None else entry.allowed.behind(outcome.token_ids),
            deadline=DraftDeadline.after(item.next_budget_us, self._clock),
        )

    def _judge(
        self, passes: Sequence[_Pass], logits: Sequence[torch.Tensor]
    ) -> list[VerifyAnswer | Unfinished]:
        """The verdicts on items from their logits [K+1, V] each."""
        answers: list[VerifyAnswer | Unfinished] = [Unfinished.CONTINUES] * len(passes)
        judged: list[_Judged] = []
        places: list[int] = []
        for place, (entry, rows) in enumerate(zip(passes, logits, strict=True)):
            if not entry.is_whole:
                continue
            try:
                judged.append(_Judged.of(entry, rows))
                places.append(place)
            except OutriderError as error:
                answers[place] = self._fail(entry, error)
        for place, one, verdict in zip(places, judged, _verdicts(judged), strict=True):
            try:
                answers[place] = self._reply(one, verdict)
            except OutriderError as error:
                answers[place] = self._fail(one.entry, error)
        return answers

    def _reply(self, judged: _Judged, verdict: Verdict | OutriderError) -> VerdictReply:
        """What is told of a verdict. Raises the error that came in its place."""
        if isinstance(verdict, OutriderError):
            raise verdict
        entry, question = judged.entry, judged.entry.question
        head, item = question.item.head, question.item
        verdict = _within(entry, verdict, judged.untold)
        logprobs = _logprobs(judged.logits, question.proposal, item.num_logprobs, verdict)
        audited = None
        if item.audit:
            rows = judged.question.logits[:-1]
            audited = audit(rows, question.proposal.token_ids, question.sampling, entry.history)
        if question.proposal.parents:
            self._keep_path(entry, _outcome(entry, verdict).path)
        cached_length = self._table.length(head.session_id)
        return VerdictReply(head.key, verdict, cached_length, logprobs, audit=audited)

    def _keep_path(self, entry: _Pass, path: Sequence[int]) -> None:
        """Of a tree the slots that its coordinator will find accepted, too."""
        proposal, step = entry.question.proposal, entry.step
        num_new = len(step.token_ids) - len(proposal)
        length = self._engine.length(step.sequence_id) - len(proposal)
        self._engine.keep(step.sequence_id, length, [length + index for index in path])
        drafted = (step.token_ids[num_new + index] for index in path)
        self._table.record(step.sequence_id, (*step.token_ids[:num_new], *drafted))

    def _fail(self, entry: _Pass, error: OutriderError) -> Refused:
        """What a failed pass has left of the session cannot be trusted, so it is forgotten."""
        self._forget(entry.step.sequence_id)
        return refusal(entry.question.item.head.key, error)


def _verdicts(judged: Sequence[_Judged]) -> list[Verdict | OutriderError]:
    """The verdict on each, or what is wrong with it; several are made at once."""
    found: list[Verdict | OutriderError] = []
    while len(found) < len(judged):
        part: list[Question] = []
        for one in judged[len(found) :]:
            num_rows = sum(len(question.logits) for question in part)
            if part and num_rows + len(one.question.logits) > _ROWS_AT_ONCE:
                break
            part.append(one.question)
        found += _verdicts_at_once(part)
    return found


def _verdicts_at_once(questions: Sequence[Question]) -> list[Verdict | OutriderError]:
    try:
        return [*verdicts_from_logits(questions)]
    except OutriderError as error:
        if len(questions) == 1:
            return [error]
        return [_verdicts_at_once([question])[0] for question in questions]


def _outcome(entry: _Pass, verdict: Verdict) -> Outcome:
    head, proposal = entry.question.item.head, entry.question.proposal
    uniforms = head.noise.accept_uniforms(len(proposal), proposal.parents)
    return decide(verdict, proposal.token_ids, head.rule, uniforms, proposal.parents)


def _within(entry: _Pass, verdict: Verdict, untold: frozenset[int]) -> Verdict:
    """The verdict, but if its outcome reaches one of the rows `untold`, the one that ends there.
    The next round then fails as plain decoding does."""
    if not untold:
        return verdict
    path, proposal = _outcome(entry, verdict).path, entry.question.proposal
    last = next((index for index in path if index + 1 in untold), None)
    if last is None:
        return verdict
    return ending_at(verdict, last, proposal.token_ids, proposal.parents)


def _history(question: _Question, aligned: Aligned) -> TokenHistory:
    """What penalties count; nothing where there are none, as the copy costs O(length)."""
    if not question.sampling.penalised:
        return TokenHistory()
    committed, prompt_length = aligned.committed, question.item.head.prompt_length
    return TokenHistory(
        prompt_ids=committed[:prompt_length],
        output_ids=committed[prompt_length:],
        drafted_ids=question.item.proposal.token_ids,
    )


def _parents(num_new: int, parents: tuple[int, ...]) -> tuple[int, ...]:
    """`SequenceStep.parents` of a tree behind so many tokens of a chain; () for a chain."""
    if not parents:
        return ()
    return (*range(-1, num_new - 1), *(num_new + parent for parent in parents))


def _logprobs(
    logits: torch.Tensor, proposal: Proposal, num_logprobs: int | None, verdict: Verdict
) -> tuple[PositionLogprobs, ...]:
    """Of the raw logits, where asked for: [2K+1], the K draft tokens (each from the row of the one
    that it follows), then the corrections n = 0..K (from row n)."""
    if num_logprobs is None:
        return ()
    entries = raw_logprobs(
        logits,
        (*proposal.token_ids, *verdict.correction),
        num_logprobs,
        rows=(*(parent + 1 for parent in proposal.tree.parents), *range(len(proposal) + 1)),
    )
    return tuple(PositionLogprobs(logprob, top) for logprob, top in entries)


def shown_by(engine: Engine) -> FeatureEngine | None:
    return engine if isinstance(engine, FeatureEngine) and engine.shows_features else None


def sealed_features(rows: Sequence[torch.Tensor], firsts: Sequence[int]) -> list[Features]:
    """Rows [n, D] of tokens from each of the places `firsts` on, as they travel."""
    if not rows:
        return []
    numbers = torch.cat([*rows]).to("cpu", torch.bfloat16).view(torch.uint8).numpy()
    sizes = np.cumsum([len(part) for part in rows])[:-1]
    return [
        Features(first, part.shape[1] // BYTES_OF_A_NUMBER, part.tobytes())
        for first, part in zip(firsts, np.split(numbers, sizes), strict=True)
    ]
