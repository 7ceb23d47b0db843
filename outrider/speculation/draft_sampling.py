"""Draws draft tokens.

Under the rules token and block, a draft truncates its distribution, quantises it into counts, draws
from the counts, and sends them to the target. So q is exactly the distribution of the draw. The
counts are the differences of the cumulative distribution, after it is multiplied by `COUNT_TOTAL`
and rounded. A draw takes one uniform u, and returns the first token at which the running sum of
counts exceeds u times their total.

Under the rule coupled, a draw is the race that the target runs (`gumbel_max.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.errors import check
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.cuda_verdicts import (
    FOUND,
    filters,
    has_kernels,
    on_device,
    send,
    settle,
    weigh,
)  # fmt: skip
from outrider.speculation.gumbel_max import (
    BLOCK,
    IntArray,
    RealArray,
    race,
    scores,
    token_keys,
    uniforms,
)
from outrider.speculation.logits_processing import (
    NO_HISTORY,
    DraftVocabulary,
    TokenHistory,
    check_maxima,
    check_weights,
    largest,
    likeliest,
    write_weights,
)
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution
from outrider.speculation.random_streams import RoundNoise, RowKeys, draft_keys
from outrider.speculation.sampling_params import Rule, SamplingParams

_Reals = TypeVar("_Reals", RealArray, Tensor)
DraftedToken = tuple[int, DraftDistribution | None]
"""A token and the distribution from which it was drawn. The distribution is None if the rule does
not use q, or if the draw was certain."""


@dataclass(frozen=True, slots=True, eq=False)
class LikelyTokens:
    """The M likeliest tokens of each of R rows, likeliest first, on the CPU. `ids` [R, M], int64,
    are the target's. `mass` [R, M], float64, is proportional to the probabilities."""

    ids: IntArray
    mass: RealArray

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def joined(cls, parts: Sequence[LikelyTokens]) -> LikelyTokens:
        """The rows of all parts, which must have the same M."""
        ids = np.concatenate([part.ids for part in parts])
        return cls(ids, np.concatenate([part.mass for part in parts]))

    def split(self, sizes: Sequence[int]) -> list[LikelyTokens]:
        """Splits the rows into consecutive parts of these sizes."""
        ends = [*accumulate(sizes)][:-1]
        parts = zip(np.split(self.ids, ends), np.split(self.mass, ends), strict=True)
        return [LikelyTokens(ids, mass) for ids, mass in parts]

    def row(self, index: int) -> LikelyTokens:
        """One row."""
        return LikelyTokens(self.ids[index : index + 1], self.mass[index : index + 1])


def draw_from_logits(
    logits: Tensor,
    params: SamplingParams,
    noises: Sequence[RoundNoise],
    indices: Sequence[int],
    history: TokenHistory = NO_HISTORY,
    vocabulary: DraftVocabulary | None = None,
) -> tuple[list[DraftedToken], LikelyTokens | None]:
    """Draws the next token for each of B sessions with the same rule and parameters. With
    penalties, they also have the same `history`. Session b draws at depth `indices[b]` of its
    round, from row b of `logits` [B, V]. With a `vocabulary`, `logits` are [B, N]. All other
    arguments and results use the target's ids.

    Also returns the `likely_tokens` of the rows, or None if each draw takes the likeliest token.
    Raises `InvariantError` for rows that `target_probabilities` refuses."""
    check(len(noises) == len(indices) == len(logits), "one noise and index for each row")
    if not noises:
        return [], None
    rule = _shared_rule(noises)
    if vocabulary is not None:
        params = vocabulary.params(params)
        history = vocabulary.history(history) if params.penalised else history
    if params.greedy or rule is Rule.GREEDY:
        return one_hot(likeliest(logits, params, history), vocabulary), None
    keys = draft_keys(noises, indices)
    if rule is Rule.COUPLED:
        weights = _weights(logits, params, history)
        count = min(DRAFT_SUPPORT_ENTRIES, logits.shape[1])
        return raced(weights, keys, vocabulary), likely_by_weight(weights, count, vocabulary)
    rows = likely_tokens(logits, params, history, vocabulary)
    return quantised_draws(rows, keys), rows


def likely_tokens(
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory = NO_HISTORY,
    vocabulary: DraftVocabulary | None = None,
) -> LikelyTokens:
    """The `DRAFT_SUPPORT_ENTRIES` likeliest tokens of each row of a draft's `logits` [R, V]. With a
    `vocabulary`, the ids in `params` and `history` must be columns of `logits`. Raises
    `InvariantError` for rows that `target_probabilities` refuses."""
    count = min(DRAFT_SUPPORT_ENTRIES, logits.shape[1])
    if not params.tempered_alone:
        return likely_by_weight(_weights(logits, params, history), count, vocabulary)
    width = -(-logits.shape[1] // BLOCK) * BLOCK
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    padded = torch.empty((len(logits), width), dtype=dtype, device=logits.device)
    padded[:, : logits.shape[1]] = logits
    padded[:, logits.shape[1] :] = float("-inf")
    values, columns = largest(padded, count)
    if values.device.type != "cpu":  # Waits for the device once.
        values, columns = torch.stack([values.double(), columns.double()]).cpu()
        columns = columns.long()
    mass = values.double().numpy()
    check_maxima(mass[:, 0].tolist())
    mass = np.exp((mass - mass[:, :1]) / params.temperature)
    return LikelyTokens(_token_ids(columns, vocabulary), mass)


def arrival_order(rows: LikelyTokens, keys: RowKeys) -> tuple[IntArray, RealArray]:
    """Runs a race among the tokens of each row. Returns the tokens, highest score first, and the
    logarithms of their scores (log mass + Gumbel noise): [R, M] each. Tokens without mass become -1
    with the logarithm -inf, and come last."""
    found = scores(rows.mass, rows.ids, keys)
    order = np.argsort(-found, axis=1)
    found = np.take_along_axis(found, order, 1)
    ids = np.where(found > 0, np.take_along_axis(rows.ids, order, 1), -1)
    with np.errstate(divide="ignore"):
        return ids, np.log(found)


def quantise(
    probabilities: Tensor, entries_max: int, vocabulary: DraftVocabulary | None = None
) -> DraftDistribution:
    """Quantises the `entries_max` likeliest of `probabilities` [V], or [N] with a `vocabulary`.
    Tokens whose count would be 0 are left out. The result has the target's ids."""
    rows = likely_by_weight(probabilities[None], entries_max, vocabulary)
    return _as_distributions(rows.ids, _host_levels(rows.mass))[0]


def count_levels(mass: _Reals) -> _Reals:
    """Quantises `mass` [R, M], float64. Returns cumulative counts, whole numbers: [R, M]."""
    sums = mass.cumsum(1)
    levels: _Reals = (sums / sums[:, -1:] * COUNT_TOTAL).round()
    return levels


def _host_levels(mass: RealArray) -> RealArray:
    check(bool((mass.sum(1) > 0).all()), "a row without mass is no distribution")
    return count_levels(mass)


def place_of(levels: Any, count: Any) -> Any:
    """For each row, the index of the first of its `levels` [R, M] above its `count` [R, 1]: [R]."""
    return (levels <= count).sum(1)


def _drawn_counts(keys: RowKeys) -> RealArray:
    """A uniform whole number in 0..`COUNT_TOTAL` - 1 for each row: [R, 1]."""
    return uniforms(token_keys(keys), np.zeros((1, 1), dtype=np.int64)) * COUNT_TOTAL // 1


def _weights(logits: Tensor, params: SamplingParams, history: TokenHistory) -> Tensor:
    """The distributions of `logits` [B, V] up to a factor, padded to whole blocks."""
    logits = logits.cpu()
    width = -(-logits.shape[1] // BLOCK) * BLOCK
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weights = torch.empty((len(logits), width), dtype=dtype)
    write_weights(logits, params, history, weights)
    check_weights(weights, [logits])
    return weights


def likely_by_weight(
    weights: Tensor, count: int, vocabulary: DraftVocabulary | None
) -> LikelyTokens:
    values, columns = largest(weights, count)
    return LikelyTokens(_token_ids(columns, vocabulary), values.double().numpy())


def _token_ids(columns: Tensor, vocabulary: DraftVocabulary | None) -> IntArray:
    """The tokens of these columns. A column that pads a row gets an arbitrary token."""
    found: IntArray = columns.numpy()
    if vocabulary is None:
        return found
    tokens: IntArray = vocabulary.token_ids[found.clip(max=len(vocabulary.token_ids) - 1)]
    return tokens


def quantised_draws(rows: LikelyTokens, keys: RowKeys) -> list[DraftedToken]:
    levels = _host_levels(rows.mass)
    places = place_of(levels, _drawn_counts(keys))
    tokens = rows.ids[np.arange(len(levels)), places].tolist()
    return [
        (token_id, q if len(q.token_ids) > 1 else None)
        for token_id, q in zip(tokens, _as_distributions(rows.ids, levels), strict=True)
    ]


def _as_distributions(ids: IntArray, levels: RealArray) -> list[DraftDistribution]:
    check(bool(np.isfinite(levels).all()), "draft probabilities are numbers with a positive sum")
    counts = np.diff(levels, axis=1, prepend=0.0).astype(np.int64)
    found = []
    for row_ids, row in zip(ids, counts, strict=True):
        kept = row > 0
        found.append(DraftDistribution(tuple(row_ids[kept].tolist()), tuple(row[kept].tolist())))
    return found


def one_hot(columns: Sequence[int], vocabulary: DraftVocabulary | None) -> list[DraftedToken]:
    if vocabulary is not None:
        columns = vocabulary.token_ids[list(columns)].tolist()
    return [(token_id, None) for token_id in columns]


def raced(weights: Tensor, keys: RowKeys, vocabulary: DraftVocabulary | None) -> list[DraftedToken]:
    """The winner of the race in each row. The noise belongs to token ids, so the weights of a
    `vocabulary` are first moved from their columns to their ids."""
    if vocabulary is not None:
        table = vocabulary.table(weights.device)
        columns = weights[:, : len(table)]
        weights = weights.new_zeros((len(weights), int(vocabulary.token_ids[-1]) + 1))
        weights[:, table] = columns
    return [(token_id, None) for token_id in race(weights, keys).tolist()]


def _shared_rule(noises: Sequence[RoundNoise]) -> Rule:
    [rule] = {noise.rule for noise in noises}
    return rule


_ROW_WORDS = 16
"""Number of int64 words for each row. Words 0..5 are for `weigh_rows`, and 8..13 for `settle_rows`.
Words 6 and 7 say whether the draw is coupled or quantised. Word 14 is the drawn count (float64)."""
_COUPLED, _QUANTISED, _KEYS, _COUNT = 6, 7, 8, 14


def can_draw_on_device(logits: Tensor, params: SamplingParams) -> bool:
    """Whether `draw_on_device` can be used."""
    is_narrow = logits.dtype != torch.float64
    return is_narrow and has_kernels(logits.device) and not (params.penalised or params.logit_bias)


def draw_on_device(
    logits: Tensor,
    params: Sequence[SamplingParams],
    noises: Sequence[RoundNoise],
    indices: Sequence[int],
    vocabulary: DraftVocabulary | None = None,
) -> tuple[list[DraftedToken], list[LikelyTokens | None]]:
    """Like `draw_from_logits`, for sessions whose rules and parameters may differ. The second
    result has an entry for each row. Waits for the device only once."""
    is_greedy = np.array(
        [one.greedy or noise.rule is Rule.GREEDY for one, noise in zip(params, noises, strict=True)]
    )
    is_coupled = ~is_greedy & [noise.rule is Rule.COUPLED for noise in noises]
    if is_greedy.all():
        parts = _likeliest_columns(logits, vocabulary)
    else:
        keys = draft_keys(noises, indices)
        kept = np.array([filters(one) for one in params])
        words = np.full((len(logits), _ROW_WORDS), -1, dtype=np.int64)
        words[:, :3], words[:, 3], words[:, 5] = kept.view(np.int64)[:, :3], kept[:, 3], 0
        words[:, _COUPLED], words[:, _QUANTISED] = is_coupled, ~(is_greedy | is_coupled)
        words[:, _KEYS : _KEYS + 5] = keys.view(np.int64)
        words[:, _COUNT] = _drawn_counts(keys)[:, 0].view(np.int64)
        rows = send([words], logits.device).view(torch.int64).view(words.shape)
        any_coupled, any_filtered = bool(is_coupled.any()), any(one.filtered for one in params)
        with on_device(logits.device):
            parts = _drawn_columns(logits, rows, vocabulary, any_coupled, any_filtered)
    drawn = torch.cat(parts, dim=1).cpu().numpy()
    check_maxima(drawn[:, 1].tolist())
    tokens: list[DraftedToken] = [(int(token_id), None) for token_id in drawn[:, 0]]
    likely: list[LikelyTokens | None] = [None] * len(tokens)
    if is_greedy.all():
        return tokens, likely
    ends = np.cumsum([2, *(part.shape[1] for part in parts[2:4])])
    _, ids, mass, levels = np.split(drawn, ends, axis=1)
    found = LikelyTokens(ids.astype(np.int64), mass)
    for index in (~is_greedy).nonzero()[0].tolist():
        likely[index] = found.row(index)
        if not is_coupled[index]:
            own = slice(index, index + 1)
            [q] = _as_distributions(found.ids[own], levels[own])
            if len(q.token_ids) > 1:
                tokens[index] = tokens[index][0], q
    return tokens, likely


def _likeliest_columns(logits: Tensor, vocabulary: DraftVocabulary | None) -> list[Tensor]:
    """The likeliest token and the largest logit of each row, [R, 1] each."""
    maxima, columns = logits.max(dim=1, keepdim=True)
    return [_ids_on_device(columns, vocabulary), maxima.double()]


def _drawn_columns(
    logits: Tensor,
    rows: Tensor,
    vocabulary: DraftVocabulary | None,
    any_coupled: bool,
    any_filtered: bool,
) -> list[Tensor]:
    """For each row, the drawn token and the largest logit, [R, 1] each. Then the likeliest tokens,
    their masses and the `count_levels` of the masses, [R, M] each."""
    reals, flags = rows.view(torch.float64), rows.view(torch.bool)
    token, maxima = _likeliest_columns(logits, vocabulary)
    if any_coupled or any_filtered:
        weights = torch.empty_like(logits, dtype=torch.float32)
        found = torch.empty((FOUND, len(rows)), dtype=torch.float64, device=logits.device)
        weigh(weights, found, logits, rows)
        if any_filtered:
            logits = logits.masked_fill(weights == 0, float("-inf"))
    if any_coupled:
        if vocabulary is not None:
            wide = weights.new_zeros((len(rows), int(vocabulary.token_ids[-1]) + 1))
            weights = wide.index_copy_(1, vocabulary.table(logits.device), weights)
        settle(weights, found, rows, rows.view(-1)[_KEYS:], rows.stride(0))
        token = torch.where(flags[:, _COUPLED * 8, None], found[-1, :, None], token)
    values, columns = largest(logits, DRAFT_SUPPORT_ENTRIES)
    ids, mass = _ids_on_device(columns, vocabulary), ((values - maxima) / reals[:, :1]).exp()
    levels = count_levels(mass)
    winner = ids.gather(1, place_of(levels, reals[:, _COUNT, None])[:, None])
    token = torch.where(flags[:, _QUANTISED * 8, None], winner, token)
    return [token, maxima, ids, mass, levels]


def _ids_on_device(columns: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    return columns if vocabulary is None else vocabulary.table(columns.device)[columns]
