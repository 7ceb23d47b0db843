"""The sampled distribution as the few tokens that have a probability: the same transforms as
`transforms.target_probabilities`, for the CPU, where a pass over a whole vocabulary is what costs.

Weights are float64 from the first step on, and the mass that top-p is a share of is that of the
whole row. What makes it quick: one row at a time stays in the cache, and after the filters all
work is on the tokens that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outrider.speculation.philox import COUNTER_TOKENS, RowKeys, flat_uniforms
from outrider.speculation.philox_rows import row_uniforms
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.transforms import (
    NO_HISTORY,
    TokenHistory,
    adjusted_logits,
    check_maxima,
)

IdArray: TypeAlias = npt.NDArray[np.int64]
MassArray: TypeAlias = npt.NDArray[np.float64]
_TAIL_SHARE: Final = 0.5
"""Of the mass that top-p may drop: what is certainly dropped need not be sorted. Under 1, so that
rounding cannot make it too much."""


@dataclass(frozen=True, slots=True)
class Support:
    """Tokens with a probability: `ids` [M] ascending, and `mass` [M], positive. It sums to 1,
    unless some of them are left out by `largest`."""

    ids: IdArray
    mass: MassArray

    def largest(self, count: int) -> Support:
        """The `count` likeliest (ties: lowest ids), with the mass that they have."""
        if len(self.ids) <= count:
            return self
        kept = _top_k(self.mass, count)
        return Support(self.ids[kept], self.mass[kept])

    def at(self, token_id: int) -> float:
        """The probability of a token; 0 for one that is not listed."""
        index = int(self.ids.searchsorted(token_id))
        found = index < len(self.ids) and self.ids[index] == token_id
        return float(self.mass[index]) if found else 0.0


def host_rows(logits: torch.Tensor) -> npt.NDArray[Any]:
    """`logits` [R, V] on the CPU as an array of the same numbers; a view unless they are of half
    precision, which arrays do not all know."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits.detach().numpy()


def supports(
    logits: torch.Tensor, params: SamplingParams, history: TokenHistory = NO_HISTORY
) -> list[Support]:
    """`target_probabilities` of `logits` [R, V] on the CPU, a row each. The sums round differently
    in the last place; everything else, errors included, is the same."""
    if params.greedy:
        best = likeliest(logits, params, history)
        return [Support(np.array([token_id]), np.ones(1)) for token_id in best]
    rows = host_rows(logits)
    maxima = rows.max(axis=1).tolist()
    check_maxima(maxima)
    adjusted = adjusted_logits(logits, params, history)
    if adjusted is not logits:
        rows = host_rows(adjusted)
        maxima = rows.max(axis=1).tolist()
    vocab_size = rows.shape[1]
    filtered = params.min_p > 0.0 or 0 < params.top_k < vocab_size or params.top_p < 1.0
    # What the filters leave is copied, so that one array can serve all rows; large arrays that come
    # and go cost more than the arithmetic on them.
    places = np.empty((1 if filtered else len(rows), vocab_size))
    with np.errstate(over="ignore", under="ignore"):
        return [
            _support(row, top, params, places[0 if filtered else index])
            for index, (row, top) in enumerate(zip(rows, maxima, strict=True))
        ]


def likeliest(
    logits: torch.Tensor, params: SamplingParams, history: TokenHistory = NO_HISTORY
) -> list[int]:
    """The id of the largest logit of every row [R, V] (ties: lowest id), after bias and penalties:
    where greedy `target_probabilities` are 1. On any device. Errors as there."""
    found, largest = _largest(logits)
    check_maxima(largest)
    adjusted = adjusted_logits(logits, params, history)
    return found if adjusted is logits else _largest(adjusted)[0]


def draw(rows: Sequence[tuple[IdArray, MassArray]], keys: RowKeys) -> list[int]:
    """One token of each of R rows of ascending ids and weights >= 0: the winner of the race that
    `race.race` runs on full rows."""
    few = [row for row, (ids, _) in enumerate(rows) if len(ids) * COUNTER_TOKENS <= ids[-1]]
    sizes = [len(rows[row][0]) for row in few]
    drawn = [0] * len(rows)
    if few:
        listed = np.concatenate([rows[row][0] for row in few])
        numbers = flat_uniforms(keys.of(few), sizes, listed)
        for row, last in zip(few, np.cumsum(sizes), strict=True):
            drawn[row] = _winner(*rows[row], numbers[last - len(rows[row][0]) : last])
    for row in set(range(len(rows))).difference(few):
        ids = rows[row][0]
        whole = row_uniforms(keys.of(slice(row, row + 1)), int(ids[-1]) + 1, "cpu")[0].numpy()
        drawn[row] = _winner(*rows[row], whole if len(whole) == len(ids) else whole[ids])
    return drawn


def _winner(ids: IdArray, weights: MassArray, uniforms: MassArray) -> int:
    """The race's winner (ties: lowest id); `uniforms` are overwritten. The wait of a token is
    -log u; dividing by log u itself turns the order around and saves a pass."""
    np.log(uniforms, out=uniforms)
    return int(ids[np.divide(weights, uniforms, out=uniforms).argmin()])


def _largest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Where the largest of each row stands (ties: lowest id), and what it is; a NaN is larger than
    any number."""
    if logits.device.type != "cpu":
        return _largest_by_torch(logits)
    rows = host_rows(logits)
    found = rows.argmax(axis=1)
    return found.tolist(), rows[np.arange(len(rows)), found].tolist()


def _largest_by_torch(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    found = logits.argmax(dim=1, keepdim=True)
    return found[:, 0].tolist(), logits.gather(1, found)[:, 0].tolist()


def _support(
    row: npt.NDArray[Any], top: float, params: SamplingParams, weights: MassArray
) -> Support:
    """The support of one row of logits, the largest of which is `top`; `weights` [V] is written."""
    np.copyto(weights, row)
    weights -= top
    if params.temperature != 1.0:
        weights /= params.temperature
    np.exp(weights, out=weights)
    ids: IdArray | None = None  # None = every token
    if params.min_p > 0.0:
        ids = np.flatnonzero(weights >= params.min_p)
        weights = weights[ids]
    if 0 < params.top_k < len(weights):
        ids, weights = _among(ids, weights, _top_k(weights, params.top_k))
    if params.top_p < 1.0:
        ids, weights = _among(ids, weights, _top_p(weights, params.top_p))
    if weights.min() <= 0.0:
        ids, weights = _among(ids, weights, np.flatnonzero(weights))
    weights /= weights.sum()
    return Support(_every_id(len(weights)) if ids is None else ids, weights)


@lru_cache(maxsize=4)
def _every_id(vocab_size: int) -> IdArray:
    ids = np.arange(vocab_size)
    ids.flags.writeable = False
    return ids


def _among(ids: IdArray | None, weights: MassArray, kept: IdArray) -> tuple[IdArray, MassArray]:
    return kept if ids is None else ids[kept], weights[kept]


def _top_k(weights: MassArray, top_k: int) -> IdArray:
    """Indices, ascending, of the `top_k` < len(weights) largest."""
    threshold = float(np.partition(weights, len(weights) - top_k)[len(weights) - top_k])
    kept = np.flatnonzero(weights >= threshold)
    return _without_last_ties(weights, kept, threshold, len(kept) - top_k)


def _top_p(weights: MassArray, top_p: float) -> IdArray:
    """Indices, ascending, of the smallest head whose mass is at least `top_p` of the whole."""
    total = float(weights.sum())
    floor = _TAIL_SHARE * (1.0 - top_p) * total / len(weights)
    candidates = np.flatnonzero(weights > floor)
    ranked = weights[candidates]
    ranked.sort()
    mass = ranked[::-1].cumsum()
    num_kept = min(int(mass.searchsorted(top_p * total)) + 1, len(ranked))
    threshold = float(ranked[-num_kept])
    kept = candidates[weights[candidates] >= threshold]
    return _without_last_ties(weights, kept, threshold, len(kept) - num_kept)


def _without_last_ties(weights: MassArray, kept: IdArray, threshold: float, excess: int) -> IdArray:
    """`kept` without the `excess` highest indices whose weight is the threshold."""
    if excess <= 0:
        return kept
    ties = np.flatnonzero(weights[kept] == threshold)
    return np.delete(kept, ties[-excess:])
