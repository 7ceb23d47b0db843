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
from outrider.speculation.noise import RoundNoise
from outrider.speculation.noise_rows import NoiseBatch
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, Proposal
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.scoring import check_q, own_tokens, score
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
    type on any device, unchanged. Raises `InvariantError` where those two do, and for a tree under
    penalties, whose history is a chain's."""
    num_draft_tokens = len(proposal)
    check(
        logits.dim() == 2 and logits.shape[1] > 0 and len(logits) == num_draft_tokens + 1,
        f"a proposal of {num_draft_tokens} tokens needs logits [{num_draft_tokens + 1}, "
        f"vocabulary], got {tuple(logits.shape)}",
    )
    check(not (params.penalised and proposal.parents), "penalties count the tokens of a chain")
    if noise.rule is Rule.GREEDY and params.greedy:
        return own_tokens(likeliest(logits, params, history), proposal)
    if logits.device.type != "cpu" or noise.rule is Rule.GREEDY:
        return score(target_probabilities(logits, params, history), proposal, noise)
    check_q(proposal, noise.rule)
    rows = supports(logits, params, history)
    if proposal.parents:
        keys = noise.tree_keys(proposal.tree)
    else:
        keys = NoiseBatch.of([noise]).correction_keys(num_draft_tokens)
    if noise.rule is Rule.COUPLED:
        return own_tokens(draw([(row.ids, row.mass) for row in rows], keys), proposal)
    law = _token_law if noise.rule is Rule.TOKEN else _block_law
    accept, weights = law(rows, proposal)
    return Verdict(accept, tuple(draw(weights, keys)))


def _token_law(
    rows: list[Support], proposal: Proposal
) -> tuple[tuple[float, ...], list[tuple[IdArray, MassArray]]]:
    """`scoring.tree_law`, or of a chain `scoring.verdict_law`: acceptance, and ids and weights of
    each row. The rows' mass becomes the weights: whole rows are too large to be copied for
    nothing."""
    tree = proposal.tree
    accept = [0.0] * len(proposal)
    for group, entry in zip(tree.groups, proposal.q, strict=True):
        row = rows[tree.parents[group[0]] + 1]
        total, left = 1.0, 1.0
        q_ids, q_mass = _q(proposal.token_ids[group[0]], entry)
        for index in group:
            token_id = proposal.token_ids[index]
            if entry is None:
                q_ids[0] = token_id
            place = q_ids == token_id
            at = float(q_mass[place].sum())
            check(at > 0, "a draft token lies outside the distribution it was drawn from")
            accept[index] = min(1.0, row.at(token_id) / total * left / at)
            total = _to_residual(row, 1.0 / total, q_ids, q_mass / left) * total or total
            if entry is not None:
                q_mass[place] = 0.0
                left -= at
    return tuple(accept), [(row.ids, row.mass) for row in rows]


def _block_law(
    rows: list[Support], proposal: Proposal
) -> tuple[tuple[float, ...], list[tuple[IdArray, MassArray]]]:
    """`scoring.verdict_law` under block, for one proposal: as `_token_law` otherwise."""
    accept: list[float] = []
    log_pi = 0.0
    for index, (row, token_id, entry) in enumerate(
        zip(rows, proposal.token_ids, proposal.q, strict=False)
    ):
        q_ids, q_mass = _q(token_id, entry)
        p, q = row.at(token_id), float(q_mass[q_ids == token_id].sum())
        check(q > 0, "a draft token lies outside the distribution it was drawn from")
        scale = math.exp(log_pi)
        residual = _to_residual(row, scale, q_ids, q_mass)
        if index > 0:  # the row behind a token is the one that its h looks at
            accept.append(_h(scale, residual))
        log_ratio = math.log(p) - math.log(q) if p > 0 else _MINUS_INFINITY
        log_pi = min(0.0, log_pi + log_ratio)
    if len(proposal) > 0:
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
