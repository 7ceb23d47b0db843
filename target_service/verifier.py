"""One step of a target: one forward pass over every item, then a verdict for each.

item ok?  -> prefix held?  -> room?      -> forward (all) -> mask, transforms, rule -> verdict
Refused      Resync           Unfinished    append + proposal      next to the logits
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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


class _Round:
    """An item that this model can answer, on its way through a step."""

    __slots__ = ("allowed", "history", "item", "logits", "proposal", "question", "sampling", "step",
                 "untold")  # fmt: skip

    step: SequenceStep
    """Its share of the forward pass; without logits it runs a part of the prefix."""
    question: Question
    """What its verdict is made from: the logits under the constraint."""

    def __init__(self, item: VerifyItem, sampling: SamplingParams) -> None:
        self.item = item
        self.sampling = sampling
        self.proposal = item.proposal.open()
        self.history = TokenHistory()
        """What penalties count."""
        self.allowed: Allowed | None = None
        """What may follow the committed tokens; None = anything."""
        self.logits = torch.empty(0)
        """[K+1, V], as the model gave them."""
        self.untold: frozenset[int] = frozenset()
        """See `RowMasks.untold`."""

    @property
    def head(self) -> RoundHead:
        return self.item.head

    @property
    def demand(self) -> SlotDemand:
        num_drafted = len(self.proposal.token_ids)
        return SlotDemand(self.head, num_drafted, num_drafted + 1)

    def ask(self, logits: torch.Tensor) -> None:
        """Takes the pass's logits. Raises what a constraint that cannot be told does."""
        self.logits = sampled = logits
        if self.allowed is not None:
            rows = row_masks(self.allowed, self.proposal)
            sampled, self.untold = masked_logits(logits, rows.masks), rows.untold
        self.question = Question(
            sampled, self.sampling, self.history, self.proposal, self.head.noise
        )

    def outcome(self, verdict: Verdict) -> Outcome:
        """What its coordinator will make of a verdict."""
        proposal, head = self.proposal, self.head
        uniforms = head.noise.accept_uniforms(len(proposal), proposal.parents)
        return decide(verdict, proposal.token_ids, head.rule, uniforms, proposal.parents)

    def within(self, verdict: Verdict) -> Verdict:
        """The verdict, but if its outcome reaches one of the rows `untold`, the one that ends
        there. The next round then fails as plain decoding does."""
        path = self.outcome(verdict).path if self.untold else ()
        last = next((index for index in path if index + 1 in self.untold), None)
        if last is None:
            return verdict
        return ending_at(verdict, last, self.proposal.token_ids, self.proposal.parents)


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
        answers: dict[int, VerifyAnswer | Unfinished] = {}
        rounds: dict[int, _Round] = {}
        for index, item in enumerate(items):
            try:
                rounds[index] = _Round(item, self._validate(item))
            except OutriderError as error:
                answers[index] = refusal(item.head.key, error)
        admissions = self._admissions.admit([one.demand for one in rounds.values()])
        passes: dict[int, _Round] = {}
        for (index, one), admission in zip(rounds.items(), admissions, strict=True):
            stopped = self._prepare(one, admission)
            if stopped is None:
                passes[index] = one
            else:
                answers[index] = stopped
        with torch.inference_mode():
            answers |= zip(passes, self._run([*passes.values()]), strict=True)
        self._figures = self._admissions.figures
        return [answers[index] for index in range(len(items))]

    def park(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            self._table.park(session_id)
        self._figures = self._admissions.figures

    def release(self, session_id: str) -> None:
        self._table.release(session_id)
        if self._matchers is not None:
            self._matchers.release(session_id)

    def recover(self, items: Sequence[VerifyItem]) -> None:
        for item in items:
            self.release(item.head.session_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless tokens and slots agree for every session."""
        self._table.check_integrity()

    def _prepare(self, one: _Round, admission: Admission) -> Resync | Refused | Unfinished | None:
        """Gives a round its share of the pass; or says why it has none."""
        head, proposal = one.head, one.proposal
        if isinstance(admission, OutriderError):
            return refusal(head.key, admission)
        if not isinstance(admission, Admitted):
            return admission
        aligned, new_tokens = admission.aligned, admission.aligned.new_tokens
        if not admission.is_whole:
            part = new_tokens[: admission.num_granted]
            one.step = SequenceStep(head.session_id, part, num_logits=0)
            return None
        try:
            one.allowed = self._allowed(head, aligned)
        except OutriderError as error:
            return self._fail(one, error)
        vocab_size, num_new = self._engine.info.vocab_size, len(new_tokens)
        drafted = tuple(v if v < vocab_size else _REPLACEMENT for v in proposal.token_ids)
        parents: tuple[int, ...] = ()
        if proposal.parents:
            parents = (*range(-1, num_new - 1), *(num_new + v for v in proposal.parents))
        one.step = SequenceStep(
            head.session_id, (*new_tokens, *drafted), len(drafted) + 1, parents=parents
        )
        if one.sampling.penalised:  # Else nothing counts them, and the copy costs O(length).
            committed, num = aligned.committed, head.prompt_length
            one.history = TokenHistory(committed[:num], committed[num:], proposal.token_ids)
        return None

    def _allowed(self, head: RoundHead, aligned: Aligned) -> Allowed | None:
        """What may follow the committed tokens. Raises `Incompatible` for a constraint that cannot
        be held to here."""
        if head.constraint is None:
            return None
        if self._matchers is None or head.compiled is None:
            raise Incompatible(f"{head.constraint.kind}: this target has no tokenizer")
        completion = aligned.committed[head.prompt_length :]
        return self._matchers.follow(head.session_id, head.compiled, completion)

    def _validate(self, item: VerifyItem) -> SamplingParams:
        """Raises `BadRequest` for what this model cannot do; nothing has changed then."""
        info, head = self._engine.info, item.head
        sampling, size = head.params(), info.vocab_size
        key, reason = "", ""
        if head.append and max(head.append) >= size:
            key = "head.append"
            reason = f"token {max(head.append)} is outside the vocabulary of {size}"
        elif head.committed_length + len(item.proposal) > info.max_model_len:
            key = "head.append" if head.committed_length > info.max_model_len else "proposal"
            reason = (
                f"{head.committed_length} committed and {len(item.proposal)} draft tokens are more "
                f"than max_model_len {info.max_model_len}"
            )
        elif head.rule is Rule.BLOCK or sampling.penalised or item.audit:
            reason = "are of a tree; block verification, penalties and audits have chains alone"
            key = "next_siblings" if item.next_siblings else ""
            key = "proposal.parents" if item.proposal.parents else key
        if sampling.top_k > size:
            key, reason = "sampling.top_k", f"{sampling.top_k} is over {size}, the vocabulary"
        for token_id, _ in sampling.logit_bias[-1:]:
            if token_id >= size:
                key = "sampling.logit_bias"
                reason = f"token {token_id} is outside the vocabulary of {size}"
        if key:
            raise BadRequest(key, reason)
        require_q(item.proposal, head.rule)
        return sampling

    def _run(self, rounds: Sequence[_Round]) -> list[VerifyAnswer | Unfinished]:
        """One forward pass for all. An error of the engine that has a name is some item's own: each
        then runs alone, so that it hurts nobody else. Raises `EngineLost`."""
        if not rounds:
            return []
        try:
            logits = self._engine.forward([one.step for one in rounds])
        except EngineLost:
            raise
        except OutriderError as error:
            if len(rounds) > 1:
                return [self._run([one])[0] for one in rounds]
            return [self._fail(rounds[0], error)]
        # Before any verdict: whatever happens there, tokens and slots agree. A tree is noted
        # with its verdict; where none comes, the session's next step gives its slots up.
        for one in rounds:
            if not one.step.parents:
                self._table.record(one.step.sequence_id, one.step.token_ids)
        # Operators on a few rows gain little by threads, and wait for cores that others use.
        with on_threads(1):
            answers = self._judge(rounds, logits)
        if self._shown is not None:
            self._add_features(rounds, answers, self._shown)
        if self._self_drafter is not None:
            self._add_proposals(rounds, answers, self._self_drafter)
        return answers

    def _judge(
        self, rounds: Sequence[_Round], logits: Sequence[torch.Tensor]
    ) -> list[VerifyAnswer | Unfinished]:
        """The answers to rounds from their logits [K+1, V] each."""
        answers: list[VerifyAnswer | Unfinished] = [Unfinished.CONTINUES] * len(rounds)
        judged: dict[int, _Round] = {}
        for index, (one, rows) in enumerate(zip(rounds, logits, strict=True)):
            if one.step.num_logits > 0:
                try:
                    one.ask(rows)
                    judged[index] = one
                except OutriderError as error:
                    answers[index] = self._fail(one, error)
        verdicts = _verdicts([one.question for one in judged.values()])
        for (index, one), verdict in zip(judged.items(), verdicts, strict=True):
            try:
                answers[index] = self._reply(one, verdict)
            except OutriderError as error:
                answers[index] = self._fail(one, error)
        return answers

    def _reply(self, one: _Round, verdict: Verdict | OutriderError) -> VerdictReply:
        """What is told of a verdict. Raises the error that came in its place."""
        if isinstance(verdict, OutriderError):
            raise verdict
        item, proposal = one.item, one.proposal
        verdict = one.within(verdict)
        logprobs: tuple[PositionLogprobs, ...] = ()
        if item.num_logprobs is not None:
            logprobs = _logprobs(one.logits, proposal, item.num_logprobs, verdict)
        audited = None
        if item.audit:
            rows = one.question.logits[:-1]
            audited = audit(rows, proposal.token_ids, one.sampling, one.history)
        if proposal.parents:
            self._keep_path(one, one.outcome(verdict).path)
        cached_length = self._table.length(one.head.session_id)
        return VerdictReply(one.head.key, verdict, cached_length, logprobs, audit=audited)

    def _keep_path(self, one: _Round, path: Sequence[int]) -> None:
        """Of a tree the slots that its coordinator will find accepted, too."""
        name, token_ids = one.step.sequence_id, one.step.token_ids
        num_drafted = len(one.proposal)
        new, drafted = token_ids[:-num_drafted], token_ids[-num_drafted:]
        length = self._engine.length(name) - num_drafted
        self._engine.keep(name, length, [length + index for index in path])
        self._table.record(name, (*new, *(drafted[index] for index in path)))

    def _fail(self, one: _Round, error: OutriderError) -> Refused:
        """What a failed pass has left of the session cannot be trusted, so it is forgotten."""
        self.release(one.head.session_id)
        return refusal(one.head.key, error)

    def _add_features(
        self, rounds: Sequence[_Round], answers: list[VerifyAnswer | Unfinished],
        shown: FeatureEngine,
    ) -> None:  # fmt: skip
        """To verdicts that want it, what the head read at the tokens that they commit."""
        rows: dict[int, torch.Tensor] = {}
        for index, (one, answer) in enumerate(zip(rounds, answers, strict=True)):
            if isinstance(answer, VerdictReply) and one.item.wants_features:
                path = one.outcome(answer.verdict).path
                rows[index] = shown.features()[index][[0, *(place + 1 for place in path)]]
        firsts = [rounds[index].head.committed_length - 1 for index in rows]
        sealed = sealed_features([*rows.values()], firsts)
        for index, features in zip(rows, sealed, strict=True):
            answer = answers[index]
            if isinstance(answer, VerdictReply):
                answers[index] = replace(answer, features=features)

    def _add_proposals(
        self, rounds: Sequence[_Round], answers: list[VerifyAnswer | Unfinished],
        drafter: SelfDrafter,
    ) -> None:  # fmt: skip
        """To verdicts that want it, what is drafted behind them. A proposal that fails costs speed
        alone."""
        replies: dict[int, VerdictReply] = {}
        requests: list[DraftRequest] = []
        features: list[torch.Tensor] = []
        try:
            shown = self._shown.features() if self._shown and drafter.reads_features else ()
            for index, (one, answer) in enumerate(zip(rounds, answers, strict=True)):
                if not isinstance(answer, VerdictReply) or not one.item.num_next_draft_tokens:
                    continue
                outcome = one.outcome(answer.verdict)
                request = self._next_request(one, outcome)
                if request is not None:
                    held = self._table.keep(request.session_id, request.noise.committed_length - 1)
                    answers[index] = replies[index] = replace(answer, cached_length=held)
                    requests.append(request)
                    features += [rows[outcome.last] for rows in shown[index : index + 1]]
            if not requests:
                return
            began = self._clock()
            proposals = drafter.propose(requests, features)
            draft_ms = (self._clock() - began) * 1e3
        except Exception:
            logger.exception("nothing is proposed behind %d verdicts", len(requests))
            return
        for index, request, proposal in zip(replies, requests, proposals, strict=True):
            answers[index] = replace(
                replies[index],
                next_proposal=SealedProposal.of(proposal),
                next_base_length=request.noise.committed_length,
                next_draft_ms=draft_ms,
                next_work_ms=draft_ms / len(requests),
                next_out_of_time=request.deadline.has_cut,
            )

    def _next_request(self, one: _Round, outcome: Outcome) -> DraftRequest | None:
        """Asks for the proposal behind an outcome; None where nothing more fits."""
        head, item, history = one.head, one.item, one.history
        length = head.committed_length + len(outcome.token_ids)
        room = self._engine.info.max_model_len - length - sum(item.next_siblings)
        if room <= 0:
            return None
        token_ids = outcome.token_ids[-1:]
        if one.sampling.penalised:
            token_ids = (*history.prompt_ids, *history.output_ids, *outcome.token_ids)
        return DraftRequest(
            session_id=head.session_id,
            tenant=head.tenant,
            token_ids=token_ids,
            prompt_length=len(history.prompt_ids),
            num_draft_tokens=min(item.num_next_draft_tokens, room),
            sampling=one.sampling,
            rule=head.rule,
            noise=RoundNoise(head.seed, head.rule, length),
            siblings=item.next_siblings,
            allowed=None if one.allowed is None else one.allowed.behind(outcome.token_ids),
            deadline=DraftDeadline.after(item.next_budget_us, self._clock),
        )


def _verdicts(questions: Sequence[Question]) -> list[Verdict | OutriderError]:
    """The verdict on each, or what is wrong with it; several are made at once."""
    found: list[Verdict | OutriderError] = []
    while len(found) < len(questions):
        end, num_rows = len(found), 0
        while end < len(questions):
            num_rows += len(questions[end].logits)
            if num_rows > _ROWS_AT_ONCE and end > len(found):
                break
            end += 1
        found += _verdicts_at_once(questions[len(found) : end])
    return found


def _verdicts_at_once(questions: Sequence[Question]) -> list[Verdict | OutriderError]:
    try:
        return [*verdicts_from_logits(questions)]
    except OutriderError as error:
        if len(questions) == 1:
            return [error]
        return [_verdicts_at_once([question])[0] for question in questions]


def _logprobs(
    logits: torch.Tensor, proposal: Proposal, num_logprobs: int, verdict: Verdict
) -> tuple[PositionLogprobs, ...]:
    """Of the raw logits: [2K+1], the K draft tokens (each from the row of the one that it follows),
    then the corrections n = 0..K (from row n)."""
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
