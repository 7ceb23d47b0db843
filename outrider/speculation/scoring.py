"""What the target says of a proposal. Rows are p_1..p_{K+1}; row n (from 0) follows n draft tokens.

| rule    | acceptance probability of x_i       | law of correction n < K     | source         |
| ------- | ----------------------------------- | --------------------------- | -------------- |
| token   | min(1, p_i(x_i) / q_i(x_i))         | pos(p_{n+1} - q_{n+1})      | Leviathan 2023 |
| block   | h_i = Z_i / (Z_i + 1 - pi_i), i < K | pos(pi_n p_{n+1} - q_{n+1}) | Sun, ICLR 2025 |
|         | h_K = pi_K                          | with sum Z_n                |                |
| coupled | 1 if x_i is the target's own draw   | the target's own draw       | Daliri 2024    |
| greedy  | 1 if x_i is the likeliest token     | the likeliest token         |                |

Correction K is a draw from p_{K+1} under every rule. pi_0 = 1, and
pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)); pos(z) = max(z, 0).

Of a tree row 0 follows the last committed token and row i + 1 draft token i. Under coupled and
greedy a draft token is accepted that is the row's own token before it. Under token siblings
s_1, s_2, .. behind a row p, drawn from q without replacement, are tried in turn: with p^1 = p and
q^1 = q, s_j is accepted with min(1, p^j(s_j) / q^j(s_j)), and then p^{j+1} = norm(pos(p^j - q^j)),
q^{j+1} = norm(q^j without s_j); what follows if all are refused is drawn from the last p^{j+1}, and
what follows a leaf from p (recursive rejection: SpecInfer, arXiv 2305.09781; without replacement:
Sequoia, arXiv 2402.12374). Block has no tree.

A token beyond the width of p has p = 0, a token outside a q's support q = 0: the vocabularies of
draft and target may be padded differently, and a residual always covers the target's whole one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from outrider.errors import check
from outrider.speculation.noise import RoundNoise
from outrider.speculation.noise_rows import NoiseBatch
from outrider.speculation.proposal import COUNT_TOTAL, Proposal
from outrider.speculation.race import race
from outrider.speculation.sampling import Rule
from outrider.speculation.verdict import Verdict


@dataclass(frozen=True, slots=True)
class DraftRows:
    """B proposals of K tokens each, with sparse q of at most M entries a position.

    `token_ids` [B, K] int64; `support` [B, K, M] int64 ids, distinct among those with mass;
    `mass` [B, K, M] float64, q of each (0 pads). Under rules without q, M = 0."""

    token_ids: torch.Tensor
    support: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True, slots=True)
class VerdictLaw:
    """`accept` [B, K] float64, and `weights` [B, K+1, V] float64: correction n of proposal b is
    token v with probability weights[b, n, v] / weights[b, n].sum()."""

    accept: torch.Tensor
    weights: torch.Tensor


def score(probabilities: torch.Tensor, proposal: Proposal, noise: RoundNoise) -> Verdict:
    """The verdict on one proposal under `noise.rule`. `probabilities` [K+1, V] float64, after every
    sampling transform, rows summing to 1; unchanged. Raises `InvariantError` for other shapes or
    a q that is missing where the rule needs it (`require_q` refuses such a request)."""
    num_draft_tokens = len(proposal)
    check(
        probabilities.dim() == 2 and len(probabilities) == num_draft_tokens + 1,
        f"a proposal of {num_draft_tokens} tokens needs {num_draft_tokens + 1} rows, got "
        f"{tuple(probabilities.shape)}",
    )
    check_q(proposal, noise.rule)
    if proposal.parents:
        return _score_tree(probabilities, proposal, noise)
    drafts = _draft_rows(proposal, noise.rule, probabilities.device)
    accept, correction = score_rows(probabilities[None], drafts, NoiseBatch.of([noise]))
    return Verdict(tuple(accept[0].tolist()), tuple(correction[0].tolist()))


def check_q(proposal: Proposal, rule: Rule) -> None:
    """Raises `InvariantError` for a q that is missing where the rule needs it, and for a tree where
    the rule has none."""
    check(rule is not Rule.BLOCK or not proposal.parents, "block verification has no tree")
    check(
        not rule.needs_q or len(proposal.q) == len(proposal.tree.groups),
        f"rule {rule.value} needs q for each of {len(proposal)} tokens",
    )


def _score_tree(probabilities: torch.Tensor, proposal: Proposal, noise: RoundNoise) -> Verdict:
    """The verdict on a tree, from rows [N + 1, V]."""
    tree = proposal.tree
    if noise.rule is Rule.TOKEN:
        accept, weights = tree_law(probabilities, proposal)
        return Verdict(accept, tuple(race(weights, noise.tree_keys(tree)).tolist()))
    if noise.rule is Rule.GREEDY:
        own = probabilities.argmax(dim=1).tolist()
    else:
        own = race(probabilities, noise.tree_keys(tree)).tolist()
    return own_tokens(own, proposal)


def own_tokens(own: list[int], proposal: Proposal) -> Verdict:
    """Each draft token is accepted iff it is what the target takes itself there: `own` [N + 1]."""
    pairs = zip(proposal.tree.parents, proposal.token_ids, strict=True)
    return Verdict(tuple(float(own[parent + 1] == ids) for parent, ids in pairs), tuple(own))


def tree_law(
    probabilities: torch.Tensor, proposal: Proposal
) -> tuple[tuple[float, ...], torch.Tensor]:
    """The verdict on a tree before any noise, under token: accept [N] and weights [N + 1, V] of
    what follows, see `VerdictLaw`. `probabilities` [N + 1, V] unchanged."""
    tree, vocab_size = proposal.tree, probabilities.shape[1]
    weights = probabilities.clone()
    accept = [0.0] * len(proposal)
    for group, entry in zip(tree.groups, proposal.q, strict=True):
        p = weights[tree.parents[group[0]] + 1]
        left = {} if entry is None else dict(zip(entry.token_ids, entry.counts, strict=True))
        for index in group:
            token_id = proposal.token_ids[index]
            if entry is None:
                left = {token_id: 1}
            check(token_id in left, "a draft token lies outside what it was drawn from")
            whole = sum(left.values())
            known = {v: count / whole for v, count in left.items() if v < vocab_size}
            p /= p.sum()
            likely = float(p[token_id]) if token_id < vocab_size else 0.0
            accept[index] = min(1.0, likely * whole / left.pop(token_id))
            rest = p.clone()
            ids = torch.tensor(list(known), dtype=torch.int64, device=p.device)
            rest[ids] -= torch.tensor(list(known.values()), dtype=p.dtype, device=p.device)
            if bool((rest > 0).any()):
                p.copy_(rest.clamp_(min=0.0))
    return tuple(accept), weights


def score_rows(
    probabilities: torch.Tensor, drafts: DraftRows, noise: NoiseBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verdicts on B proposals of K tokens: accept [B, K] float64 and correction [B, K+1] int64.
    `probabilities` [B, K+1, V], unchanged."""
    shape = probabilities.shape[:2]
    if noise.rule.needs_q:
        law = verdict_law(noise.rule, probabilities, drafts)
        keys = noise.correction_keys(shape[1] - 1)
        return law.accept, race(law.weights.flatten(0, 1), keys).view(shape)
    if noise.rule is Rule.GREEDY:
        own = probabilities.argmax(dim=2)
    else:
        keys = noise.correction_keys(shape[1] - 1)
        own = race(probabilities.flatten(0, 1), keys).view(shape)
    return (own[:, :-1] == drafts.token_ids).double(), own


def verdict_law(rule: Rule, probabilities: torch.Tensor, drafts: DraftRows) -> VerdictLaw:
    """The verdict before any noise, under token or block. `probabilities` [B, K+1, V] unchanged."""
    check(rule.needs_q, f"under rule {rule.value} a verdict is not a law but a draw")
    p = _probability_of(probabilities[:, :-1], drafts.token_ids)
    q = (drafts.mass * (drafts.support == drafts.token_ids[..., None])).sum(dim=2)
    check(bool((q > 0).all()), "a draft token lies outside the distribution it was drawn from")
    if rule is Rule.TOKEN:
        weights = correction_weights(probabilities, None, drafts)
        accept = (p / q).clamp_(max=1.0)
        return VerdictLaw(accept, _or_target(weights, weights.sum(dim=2), probabilities))
    pi = _path_ratios(p, q)
    weights = correction_weights(probabilities, pi[:, :-1], drafts)
    totals = weights.sum(dim=2)
    accept = _block_acceptance(pi, totals)
    return VerdictLaw(accept, _or_target(weights, totals, probabilities))


def correction_weights(
    probabilities: torch.Tensor, scale: torch.Tensor | None, drafts: DraftRows
) -> torch.Tensor:
    """pos(scale_n p_{n+1} - q_{n+1}) for n < K and p_{K+1} for n = K: [B, K+1, V], unnormalised,
    over the target's whole vocabulary. `scale` [B, K]; None = 1 everywhere."""
    weights = probabilities.clone()
    residual = weights[:, :-1]
    if scale is not None:
        residual *= scale[..., None]
    inside = (drafts.support >= 0) & (drafts.support < weights.shape[2])
    ids = torch.where(inside, drafts.support, 0)
    residual.scatter_add_(2, ids, torch.where(inside, -drafts.mass, 0.0))
    return weights.clamp_(min=0.0)


def _path_ratios(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """pi_0..pi_K, [B, K+1], from p and q at the draft tokens, [B, K]; summed as logarithms, so that
    a long path of small ratios does not vanish before a large one comes."""
    log_ratio = p.log() - q.log()
    log_pi = [p.new_zeros(len(p))]
    for i in range(p.shape[1]):
        log_pi.append((log_pi[-1] + log_ratio[:, i]).clamp(max=0.0))
    return torch.stack(log_pi, dim=1).exp()


def _block_acceptance(pi: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """h_1..h_K, [B, K], from pi_0..pi_K and Z_0..Z_K, [B, K+1] (Z_K is not used)."""
    inner, z = pi[:, 1:-1], totals[:, 1:-1]
    room = z + (1.0 - inner)
    h = torch.where(room > 0, z / room, 1.0)
    return torch.cat([h, pi[:, -1:]], dim=1) if pi.shape[1] > 1 else pi[:, :0]


def _or_target(
    weights: torch.Tensor, totals: torch.Tensor, probabilities: torch.Tensor
) -> torch.Tensor:
    """`weights`, but rows without any mass become p. Nobody asks for the token of such a row but
    through a rounding error: either p = q and the draft token is accepted, or pi = 0 and none of
    the path up to here is."""
    empty = totals <= 0
    if bool(empty.any()):
        weights[empty] = probabilities[empty]
    return weights


def _probability_of(probabilities: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`probabilities` [B, K, V] at `token_ids` [B, K]; 0 for a token beyond V."""
    inside = token_ids < probabilities.shape[2]
    at = probabilities.gather(2, torch.where(inside, token_ids, 0)[..., None])[..., 0]
    return torch.where(inside, at, 0.0)


def _draft_rows(proposal: Proposal, rule: Rule, device: torch.device) -> DraftRows:
    """One proposal as rows; a one-hot position is a support of its own token."""
    num_tokens = len(proposal)
    q = proposal.q if rule.needs_q else ()
    width = max((len(entry.token_ids) if entry else 1 for entry in q), default=0)
    support = np.zeros((1, num_tokens, width), dtype=np.int64)
    counts = np.zeros((1, num_tokens, width), dtype=np.float64)
    for i, entry in enumerate(q):
        ids = entry.token_ids if entry else (proposal.token_ids[i],)
        support[0, i, : len(ids)] = ids
        counts[0, i, : len(ids)] = entry.counts if entry else COUNT_TOTAL
    token_ids = torch.tensor([proposal.token_ids], dtype=torch.int64)
    return DraftRows(
        token_ids=token_ids.to(device),
        support=torch.from_numpy(support).to(device),
        mass=torch.from_numpy(counts / COUNT_TOTAL).to(device),
    )
