"""From logits to the distribution that is sampled. Float64 throughout, on the logits' device.

Order: logit bias; penalties; temperature; min-p; top-k; top-p; renormalise. Each filter looks at
what the one before it left, so top-p is a share of the mass that min-p and top-k kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from outrider.errors import check
from outrider.speculation.sampling import SamplingParams

_HEAD_ENTRIES: Final = 64
"""Largest weights looked at first for top-p; where they do not hold the mass, a wider search."""
_BITS_OF_ONE: Final = 0x3FF0000000000000
_BUCKET_SHIFT: Final = 46
"""Leaves exponent and six bits of fraction of a float64: 64 buckets an octave."""
_NUM_BUCKETS: Final = 64 * 64
"""64 octaves under the largest weight; what is smaller still shares the last bucket."""


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens that penalties count. Row i of a verification pass sees the output and
    `drafted_ids[:i]`; a drafter puts what it has drafted so far into `output_ids`."""

    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    drafted_ids: Sequence[int] = ()


NO_HISTORY: Final = TokenHistory()


def target_probabilities(
    logits: torch.Tensor, params: SamplingParams, history: TokenHistory = NO_HISTORY
) -> torch.Tensor:
    """The sampled distribution of every row: [R, V], float64, rows sum to 1. `logits` [R, V] of any
    float type, unchanged. Greedy parameters give a one-hot row at the largest logit (ties: lowest
    id). Raises `InvariantError` for a row with NaN, +inf or nothing above -inf; -inf is legal and
    gets no probability. Biased or past ids beyond V are ignored: a padded vocabulary may differ.
    """
    check(logits.dim() == 2 and logits.shape[1] > 0, "logits are [rows, vocabulary]")
    _check_rows(logits)
    logits = adjusted_logits(logits, params, history)
    if params.greedy:
        likeliest = logits.argmax(dim=1, keepdim=True)
        zeros = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        return zeros.scatter_(1, likeliest, 1.0)
    weights = logits.to(torch.float64, copy=True)
    weights -= weights.amax(dim=1, keepdim=True)
    if params.temperature != 1.0:
        weights /= params.temperature
    weights.exp_()
    if params.min_p > 0.0:
        weights.masked_fill_(weights < params.min_p, 0.0)
    if 0 < params.top_k < weights.shape[1]:
        _keep_top_k(weights, params.top_k)
    if params.top_p < 1.0:
        _keep_top_p(weights, params.top_p)
    weights /= weights.sum(dim=1, keepdim=True)
    return weights


def adjusted_logits(
    logits: torch.Tensor, params: SamplingParams, history: TokenHistory = NO_HISTORY
) -> torch.Tensor:
    """`logits` [R, V] after bias and penalties: a float64 copy, or themselves without either."""
    if not (params.logit_bias or params.penalised):
        return logits
    adjusted = logits.to(torch.float64, copy=True)
    _add_bias(adjusted, params)
    _penalise(adjusted, params, history)
    return adjusted


def raw_logprobs(
    logits: torch.Tensor,
    chosen: Sequence[int],
    num_top: int,
    rows: Sequence[int] | None = None,
) -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
    """Per chosen token its log-probability under the raw logits, and the `num_top` likeliest
    (id, log-probability), likeliest first, ties lowest id.

    `logits` [R, V]; token i is looked up in `rows[i]`, by default in row i. A token outside the
    vocabulary, or with a logit of -inf, has -inf."""
    rows = range(len(chosen)) if rows is None else rows
    check(len(rows) == len(chosen), "as many rows as chosen tokens")
    _check_rows(logits)
    exact = logits.double()
    normaliser = exact.logsumexp(dim=1, keepdim=True)
    tops: dict[int, tuple[tuple[int, float], ...]] = {}
    entries = []
    for row, token_id in zip(rows, chosen, strict=True):
        if row not in tops:
            ids = largest_ids(exact[row], num_top).tolist()
            values = (exact[row, ids] - normaliser[row]).tolist()
            ranked = sorted(zip(ids, values, strict=True), key=lambda entry: (-entry[1], entry[0]))
            tops[row] = tuple(ranked)
        inside = token_id < logits.shape[1]
        logprob = float(exact[row, token_id] - normaliser[row]) if inside else float("-inf")
        entries.append((logprob, tops[row]))
    return tuple(entries)


def largest_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the `count` largest of `values` [V], ascending; ties: lowest ids first."""
    count = min(count, len(values))
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    threshold = values.topk(count, sorted=False).values.amin()
    ids = (values >= threshold).nonzero()[:, 0]
    if len(ids) == count:
        return ids
    above = values[ids] > threshold
    ties_wanted = count - above.sum()
    return ids[above | ((~above).cumsum(0) <= ties_wanted)]


def check_maxima(maxima: Sequence[float]) -> None:
    """Raises `InvariantError` unless each row's largest logit is finite. That one number shows all
    that can be wrong: it is NaN where any logit is."""
    for row, largest in enumerate(maxima):
        check(
            math.isfinite(largest),
            f"logits of row {row} are no numbers to sample from: their maximum is {largest}",
        )


def _check_rows(logits: torch.Tensor) -> None:
    check_maxima(logits.amax(dim=1).tolist())


def _add_bias(logits: torch.Tensor, params: SamplingParams) -> None:
    vocab_size = logits.shape[1]
    entries = [(token_id, bias) for token_id, bias in params.logit_bias if token_id < vocab_size]
    if entries:
        ids, biases = zip(*entries, strict=True)
        logits[:, list(ids)] += torch.tensor(biases, dtype=torch.float64, device=logits.device)


def _penalise(logits: torch.Tensor, params: SamplingParams, history: TokenHistory) -> None:
    """Repetition over prompt and output divides a positive logit and multiplies a negative one
    (Keskar et al. 2019); presence and frequency over the output are subtracted."""
    num_rows, vocab_size = logits.shape
    drafted = list(history.drafted_ids[: num_rows - 1])
    output_counts = Counter(history.output_ids)
    prompt = set(history.prompt_ids)
    ids = sorted(v for v in prompt | set(output_counts) | set(drafted) if v < vocab_size)
    if not params.penalised or not ids:
        return
    base = torch.tensor([output_counts[v] for v in ids], dtype=torch.float64)
    counts = base.repeat(num_rows, 1)
    column = {token_id: i for i, token_id in enumerate(ids)}
    for row, token_id in enumerate(drafted, start=1):
        if token_id in column:
            counts[row:, column[token_id]] += 1
    in_prompt = torch.tensor([v in prompt for v in ids])
    seen = ((counts > 0) | in_prompt).to(logits.device)
    counts = counts.to(logits.device)
    where = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    before = logits[:, where]
    repetition = params.repetition_penalty
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    after = torch.where(seen, repeated, before)
    after -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    logits[:, where] = after.clamp_(max=torch.finfo(torch.float64).max)


def _keep_top_k(weights: torch.Tensor, top_k: int) -> None:
    thresholds = weights.topk(top_k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    _keep_head(weights, thresholds, torch.full_like(thresholds, top_k, dtype=torch.int64))


def _keep_top_p(weights: torch.Tensor, top_p: float) -> None:
    """Keeps the smallest head whose mass is at least `top_p` of the row's; at least one token.
    `weights` are at most 1. Nothing is sorted but the first few and, in rows whose head is longer,
    the few weights around its end."""
    goal = top_p * weights.sum(dim=1, keepdim=True)
    head = weights.topk(min(_HEAD_ENTRIES, weights.shape[1]), dim=1).values
    num_short = (head.cumsum(dim=1) < goal).sum(dim=1, keepdim=True)
    last = num_short.clamp(max=head.shape[1] - 1)
    thresholds, num_kept = head.gather(1, last), last + 1
    if head.shape[1] < weights.shape[1]:
        for row in (num_short > last)[:, 0].nonzero()[:, 0].tolist():
            thresholds[row], num_kept[row] = _long_head_end(weights[row], goal[row])
    _keep_head(weights, thresholds, num_kept)


def _long_head_end(weights: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last of `weights` [V] needed to reach `goal`, and how many are needed.

    The leading bits of a positive float count octaves and fractions of them, so they bucket the
    weights by size; only the bucket in which the goal is reached has to be sorted."""
    buckets = (_BITS_OF_ONE - weights.view(torch.int64)) >> _BUCKET_SHIFT
    buckets.clamp_(max=_NUM_BUCKETS - 1)
    mass = torch.bincount(buckets, weights=weights, minlength=_NUM_BUCKETS).cumsum(dim=0)
    end = (mass < goal).sum().clamp(max=buckets.amax())
    values = weights[buckets == end].sort(descending=True).values
    before = torch.where(end > 0, mass[end - 1], 0.0)
    last = (values.cumsum(dim=0) + before < goal).sum().clamp(max=len(values) - 1)
    return values[last], (buckets < end).sum() + last + 1


def _keep_head(weights: torch.Tensor, thresholds: torch.Tensor, num_kept: torch.Tensor) -> None:
    """Keeps the `num_kept` [R, 1] largest of each row, the last of which equals its threshold
    [R, 1]; of several equal to it the lowest ids. The others become 0."""
    weights *= weights >= thresholds
    excess = (weights > 0).sum(dim=1, keepdim=True) - num_kept
    for row in (excess > 0)[:, 0].nonzero()[:, 0].tolist():
        ties = (weights[row] == thresholds[row]).nonzero()[:, 0]
        weights[row, ties[-int(excess[row]) :]] = 0.0
