"""One step of a target: one forward pass over every item, then a verdict for each.

item ok?  -> prefix held?  -> forward (all items) -> transforms, rule -> verdict
Refused      Resync           append + proposal      next to the logits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.interface import Engine, SequenceStep
from outrider.engine.sequences import Aligned, SequenceTable
from outrider.errors import BadRequest, OutriderError
from outrider.messages import (
    PositionLogprobs,
    Refused,
    Resync,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import Proposal, require_q
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.transforms import TokenHistory, raw_logprobs
from outrider.speculation.verdict import Verdict
from outrider.speculation.verdicts import verdict_from_logits
from outrider.stepping import refusal

_STAND_IN = 0
"""Runs in place of a draft token outside the target's vocabulary. Such a token has p = 0 and is
never accepted, so nobody looks at what follows it."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One item's share of a forward pass."""

    item: VerifyItem
    proposal: Proposal
    sampling: SamplingParams
    step: SequenceStep
    history: TokenHistory


class Scorer:
    """The target's `StepWorker`: owns the engine's sequences and what tokens they hold."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table = SequenceTable(engine)

    def step(self, items: Sequence[VerifyItem]) -> list[VerifyAnswer]:
        """See `StepWorker.step`."""
        prepared = [self._prepare(item) for item in items]
        with torch.inference_mode():
            answers = iter(self._run([entry for entry in prepared if isinstance(entry, _Pass)]))
        return [next(answers) if isinstance(entry, _Pass) else entry for entry in prepared]

    def release(self, session_id: str, epoch: int) -> None:
        """See `StepWorker.release`."""
        if self._table.epoch(session_id) <= epoch:
            self._table.release(session_id)

    def recover(self, items: Sequence[VerifyItem]) -> None:
        """See `StepWorker.recover`."""
        for item in items:
            self._table.release(item.head.session_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless tokens and slots agree for every session."""
        self._table.check_integrity()

    def _prepare(self, item: VerifyItem) -> _Pass | Resync | Refused:
        """Checks an item and cuts its session back to the stated prefix."""
        head = item.head
        try:
            sampling = self._validate(item)
            proposal = item.proposal.open()
            aligned = self._table.align(head)
        except OutriderError as error:
            return refusal(head.key, error)
        if isinstance(aligned, Resync):
            return aligned
        vocab_size = self._engine.info.vocab_size
        drafted = tuple(v if v < vocab_size else _STAND_IN for v in proposal.token_ids)
        step = SequenceStep(
            head.session_id, (*aligned.new_tokens, *drafted), num_logits=len(drafted) + 1
        )
        return _Pass(item, proposal, sampling, step, _history(item, sampling, aligned))

    def _validate(self, item: VerifyItem) -> SamplingParams:
        """Raises `BadRequest` for what this model cannot do; nothing has changed then."""
        info, head = self._engine.info, item.head
        if head.sampling is None:
            raise BadRequest("head.sampling", "the parameters behind the hash are not known")
        if head.sampling.greedy != (head.rule is Rule.GREEDY):
            raise BadRequest(
                "head.rule",
                f"{head.rule.value} does not go with temperature {head.sampling.temperature}",
            )
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
        if head.sampling.top_k > info.vocab_size:
            raise BadRequest(
                "sampling.top_k", f"{head.sampling.top_k} is over {info.vocab_size}, the vocabulary"
            )
        for token_id, _ in head.sampling.logit_bias[-1:]:
            if token_id >= info.vocab_size:
                raise BadRequest(
                    "sampling.logit_bias",
                    f"token {token_id} is outside the vocabulary of {info.vocab_size}",
                )
        require_q(item.proposal, head.rule)
        return head.sampling

    def _run(self, passes: Sequence[_Pass]) -> list[VerifyAnswer]:
        """One forward pass for all. An error of the engine that has a name is some item's own: each
        then runs alone, so that it hurts nobody else."""
        if not passes:
            return []
        try:
            logits = self._engine.forward([entry.step for entry in passes])
        except OutriderError as error:
            if len(passes) > 1:
                return [self._run([entry])[0] for entry in passes]
            return [self._fail(passes[0], error)]
        # Before any verdict: whatever happens there, tokens and slots agree.
        held = [
            self._table.record(entry.step.sequence_id, entry.step.token_ids) for entry in passes
        ]
        return [
            self._judge(entry, rows, cached_length)
            for entry, rows, cached_length in zip(passes, logits, held, strict=True)
        ]

    def _judge(self, entry: _Pass, logits: torch.Tensor, cached_length: int) -> VerifyAnswer:
        """The verdict on one item from its logits [K+1, V]."""
        item = entry.item
        head = item.head
        try:
            noise = RoundNoise(head.seed, head.rule, head.committed_length)
            verdict = verdict_from_logits(
                logits, entry.sampling, entry.history, entry.proposal, noise
            )
            logprobs = _logprobs(logits, item, verdict)
        except OutriderError as error:
            return self._fail(entry, error)
        return VerdictReply(head.key, verdict, cached_length, logprobs)

    def _fail(self, entry: _Pass, error: OutriderError) -> Refused:
        """What a failed pass has left of the session cannot be trusted, so it is forgotten."""
        self._table.release(entry.step.sequence_id)
        return refusal(entry.item.head.key, error)


def _history(item: VerifyItem, sampling: SamplingParams, aligned: Aligned) -> TokenHistory:
    """What penalties count; nothing where there are none, as the copy costs O(length)."""
    if not sampling.penalised:
        return TokenHistory()
    committed, prompt_length = aligned.committed, item.head.prompt_length
    return TokenHistory(
        prompt_ids=committed[:prompt_length],
        output_ids=committed[prompt_length:],
        drafted_ids=item.proposal.token_ids,
    )


def _logprobs(
    logits: torch.Tensor, item: VerifyItem, verdict: Verdict
) -> tuple[PositionLogprobs, ...]:
    """Of the raw logits, where asked for: [2K+1], the K draft tokens (from rows 0..K-1), then the
    corrections n = 0..K (from row n)."""
    if item.num_logprobs is None:
        return ()
    num_drafted = len(item.proposal)
    entries = raw_logprobs(
        logits,
        (*item.proposal.token_ids, *verdict.correction),
        item.num_logprobs,
        rows=(*range(num_drafted), *range(num_drafted + 1)),
    )
    return tuple(PositionLogprobs(logprob, top) for logprob, top in entries)
