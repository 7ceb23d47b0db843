"""The product's verdicts and draws as rows of probabilities, before any random number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.errors import check
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.draft_sampling import DraftedToken, draw_from_logits
from outrider.speculation.proposal import Proposal
from outrider.speculation.proposal_rows import ProposalRows
from outrider.speculation.random_streams import (
    WORD_MASK,
    Place,
    RoundNoise,
    RowKeys,
    Stream,
    row_words,
    uniform,
)
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams, TokenHistory
from outrider.speculation.verification import VerifyInput, judge, verdicts_from_logits


def row_keys(seed: int, places: Sequence[Place], streams: Sequence[Stream]) -> RowKeys:
    """A row for each place and its stream, of one session."""
    pairs = zip(places, streams, strict=True)
    rows = [(*place, stream, seed & WORD_MASK, seed >> 32) for place, stream in pairs]
    return np.array(rows, dtype=np.uint64)


def absolute_place(noise: RoundNoise, index: int) -> Place:
    return Place(noise.committed_length + index, 0)


def absolute_uniforms(noise: RoundNoise, num: int) -> list[float]:
    places = [noise.place(index) for index in range(num)]
    return [*map(uniform, row_words(row_keys(noise.seed, places, [Stream.ACCEPT] * num))[0])]


ABSOLUTE_PLACES = {"place": absolute_place, "accept_uniforms": absolute_uniforms}
"""A fault to plant in `RoundNoise`: every number is keyed by its absolute position, so that a
discarded position of one round lends its noise to the next round."""


@dataclass(frozen=True)
class VerdictLaw:
    """`accept` [B, K], and `weights` [B, K+1, V]: correction n of proposal b is token v with
    probability weights[b, n, v] / weights[b, n].sum()."""

    accept: torch.Tensor
    weights: torch.Tensor


def verdict_from_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    history: TokenHistory,
    proposal: Proposal,
    noise: RoundNoise,
) -> Verdict:
    """The verdict on one proposal."""
    return verdicts_from_logits([VerifyInput(logits, params, history, proposal, noise)])[0]


def score(probabilities: torch.Tensor, proposal: Proposal, noise: RoundNoise) -> Verdict:
    """The verdict on one proposal, from `probabilities` [K + 1, V], whose rows sum to 1. Leaves
    them unchanged."""
    if noise.rule is Rule.GREEDY:
        greedy = SamplingParams(temperature=0.0)
        return verdict_from_logits(probabilities.log(), greedy, NO_HISTORY, proposal, noise)
    rows = ProposalRows([(proposal, noise)])
    weights = probabilities.clone()
    return rows.verdicts(judge(weights, rows))[0]


def verdict_law(
    rule: Rule, probabilities: torch.Tensor, proposals: Sequence[Proposal]
) -> VerdictLaw:
    """The verdict under token or block, from `probabilities` [B, K+1, V]. Leaves them unchanged.
    From a row of NaN on, neither `accept` nor `weights` is defined."""
    check(rule.needs_q, f"under rule {rule.value} a verdict is not a law but a draw")
    weights = probabilities.flatten(0, 1).clone()
    rows = ProposalRows([(proposal, RoundNoise(0, rule, 0)) for proposal in proposals])
    accept = rows.accept_probability(judge(weights, rows))
    accept = accept.reshape(probabilities.shape[:2])[:, :-1]
    return VerdictLaw(torch.from_numpy(accept), weights.view(probabilities.shape))


def drafted(logits: torch.Tensor, params: SamplingParams, noise: RoundNoise) -> Proposal:
    """A proposal with a token drawn from each row of `logits`."""
    num = len(logits)
    drawn, _ = draw_from_logits(logits, [params] * num, [noise] * num, range(num))
    q = tuple(q for _, q in drawn) if noise.rule.needs_q else ()
    return Proposal(tuple(token_id for token_id, _ in drawn), q)


def draft_token(probabilities: torch.Tensor, noise: RoundNoise, index: int) -> DraftedToken:
    """Token `index` (from 0) of a round's draft, drawn from `probabilities` [V]."""
    params = SamplingParams(temperature=float(noise.rule is not Rule.GREEDY))
    return draw_from_logits(probabilities.log()[None], [params], [noise], [index])[0][0]
