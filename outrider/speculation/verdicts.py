"""From logits to a verdict in one call: what a target replica runs for every item of a step.

`target_probabilities` and `score` say what a verdict is, on full rows and on any device. Here the
same verdict is made from the tokens that the filters leave, and noise is drawn for those alone.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from outrider.errors import check
from outrider.speculation.noise import NoiseBatch, RoundNoise
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, Proposal
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.scoring import score
from outrider.speculation.supports import IdArray, MassArray, Support, draw, likeliest, supports
from outrider.speculation.transforms import TokenHistory, target_probabilities
from outrider.speculation.verdict import Verdict

_MINUS_INFINITY: Final = float("-inf")


def verdict_from_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    history: TokenHistory,
    proposal: Proposal,
    noise: RoundNoise,
) -> Verdict:
    """`score(target_probabilities(logits, params, history), proposal, noise)`: the same tokens, and
    acceptance probabilities that differ by rounding (1e-12 at most). `logits` [K+1, V] of any float
    type on any device, unchanged. Raises `InvariantError` where those two do."""
    num_draft_tokens = len(proposal)
    check(
        logits.dim() == 2 and logits.shape[1] > 0 and len(logits) == num_draft_tokens + 1,
        f"a proposal of {num_draft_tokens} tokens needs logits [{num_draft_tokens + 1}, "
        f"vocabulary], got {tuple(logits.shape)}",
    )
    if noise.rule is Rule.GREEDY and params.greedy:
        return _same_or_not(likeliest(logits, params, history), proposal)
    if logits.device.type != "cpu" or noise.rule is Rule.GREEDY:
        return score(target_probabilities(logits, params, history), proposal, noise)
    check(
        not noise.rule.needs_q or len(proposal.q) == num_draft_tokens,
        f"rule {noise.rule.value} needs q for each of {num_draft_tokens} tokens",
    )
    rows = supports(logits, params, history)
    keys = NoiseBatch.of([noise]).correction_keys(num_draft_tokens)
    if noise.rule is Rule.COUPLED:
        return _same_or_not(draw([(row.ids, row.mass) for row in rows], keys), proposal)
    accept, weights = _law(noise.rule, rows, proposal)
    return Verdict(accept, tuple(draw(weights, keys)))


def _same_or_not(own: list[int], proposal: Proposal) -> Verdict:
    """Each draft token is accepted iff it is what the target takes itself."""
    pairs = zip(own, proposal.token_ids, strict=False)
    return Verdict(tuple(float(ours == theirs) for ours, theirs in pairs), tuple(own))


def _law(
    rule: Rule, rows: list[Support], proposal: Proposal
) -> tuple[tuple[float, ...], list[tuple[IdArray, MassArray]]]:
    """`scoring.verdict_law` for one proposal: its acceptance, and ids and weights of each row. The
    rows' mass becomes the weights: whole rows are too large to be copied for nothing."""
    accept: list[float] = []
    log_pi = 0.0
    for index, (row, token_id, entry) in enumerate(
        zip(rows, proposal.token_ids, proposal.q, strict=False)
    ):
        q_ids, q_mass = _q(token_id, entry)
        p, q = row.at(token_id), float(q_mass[q_ids == token_id].sum())
        check(q > 0, "a draft token lies outside the distribution it was drawn from")
        scale = math.exp(log_pi) if rule is Rule.BLOCK else 1.0
        residual = _to_residual(row, scale, q_ids, q_mass)
        if rule is Rule.TOKEN:
            accept.append(min(1.0, p / q))
            continue
        if index > 0:  # the row behind a token is the one that its h looks at
            accept.append(_h(scale, residual))
        log_ratio = math.log(p) - math.log(q) if p > 0 else _MINUS_INFINITY
        log_pi = min(0.0, log_pi + log_ratio)
    if rule is Rule.BLOCK and len(proposal) > 0:
        accept.append(math.exp(log_pi))
    return tuple(accept), [(row.ids, row.mass) for row in rows]


def _q(token_id: int, entry: DraftDistribution | None) -> tuple[IdArray, MassArray]:
    """A draft distribution as arrays; without one the draw was one-hot."""
    if entry is None:
        return np.array([token_id], dtype=np.int64), np.ones(1)
    counts = np.array(entry.counts, dtype=np.float64)
    return np.array(entry.token_ids, dtype=np.int64), counts / COUNT_TOTAL


def _to_residual(row: Support, scale: float, q_ids: IdArray, q_mass: MassArray) -> float:
    """Turns `row.mass` into weights proportional to pos(scale p - q), and returns the sum of that.
    Where it is 0 the row stays p: nobody asks for such a row's token but through a rounding error
    (`scoring` says when). The other tokens keep their p, as only
    ratios matter."""
    if scale <= 0.0:
        return 0.0
    places = row.ids.searchsorted(q_ids)
    places[places == len(row.ids)] = 0
    listed = row.ids[places] == q_ids
    places = places[listed]
    before = row.mass[places]
    row.mass[places] = np.maximum(scale * before - q_mass[listed], 0.0) / scale
    total = scale * float(row.mass.sum())
    if total <= 0.0:
        row.mass[places] = before
    return total


def _h(pi: float, residual: float) -> float:
    """Block acceptance of a token that is not the last, from pi and the residual's sum after it."""
    room = residual + (1.0 - pi)
    return residual / room if room > 0 else 1.0
