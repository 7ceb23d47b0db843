"""Draws draft tokens.

Under the rules token and block, a draft truncates its distribution, quantises it into counts, draws
from the counts, and sends the counts to the target. So q is exactly the distribution of the draw.
Let F_j be the probability of the j likeliest tokens together, and T = `COUNT_TOTAL`. The j-th
likeliest token has the count round(F_j T) - round(F_{j-1} T). A draw takes one uniform u, and
returns the first token at which the running sum of counts exceeds u T.

Under the rule coupled, a draw is a Gumbel-max race with the target's noise (`gumbel_max.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import check
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.cuda_verdicts import (
    filters,
    has_kernels,
    on_device,
    send_rows,
    settle,
    weigh,
)
from outrider.speculation.gumbel_max import (
    IntArray,
    RealArray,
    numbers,
    race,
    scores,
    token_keys,
    uniforms,
    whole_blocks,
)
from outrider.speculation.kernel_rows import JUDGED, RESULTS, as_words
from outrider.speculation.logits_processing import (
    DraftVocabulary,
    adjusted_logits,
    check_maxima,
    largest,
    largest_of_rows,
    write_weights,
)
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution
from outrider.speculation.random_streams import RoundNoise, RowKeys, draft_keys
from outrider.speculation.sampling_params import NO_HISTORY, Rule, SamplingParams, TokenHistory

DraftedToken = tuple[int, DraftDistribution | None]
"""A token, and its q. The q is None if the rule does not use it, or if the draw was certain."""


@dataclass(frozen=True, slots=True, eq=False)
class LikelyTokens:
    """The M likeliest tokens of each of R rows, likeliest first, on the CPU."""

    ids: IntArray  # [R, M]: token ids of the target
    mass: RealArray  # [R, M]: proportional to the probabilities

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def joined(cls, parts: Sequence[LikelyTokens]) -> LikelyTokens:
        """The rows of all parts, which must have the same M."""
        ids = np.concatenate([part.ids for part in parts])
        return cls(ids, np.concatenate([part.mass for part in parts]))

    def split(self, sizes: Sequence[int]) -> list[LikelyTokens]:
        """Splits the rows into consecutive parts of these `sizes`."""
        ends = [*accumulate(sizes)][:-1]
        parts = zip(np.split(self.ids, ends), np.split(self.mass, ends), strict=True)
        return [LikelyTokens(ids, mass) for ids, mass in parts]


def draw_from_logits(
    logits: Tensor,
    params: Sequence[SamplingParams],
    noises: Sequence[RoundNoise],
    indices: Sequence[int],
    histories: Sequence[TokenHistory] = (),
    vocabulary: DraftVocabulary | None = None,
) -> tuple[list[DraftedToken], list[LikelyTokens | None]]:
    """Draws the next token for each of B sessions. Session b draws token `indices[b]` of its
    round (the first is token 0) from row b of `logits`: [B, V], or [B, N] for a `vocabulary` of N
    tokens. All other arguments and results have the target's ids. Only penalties need `histories`.

    Also returns the likely tokens of each row, or None under greedy. Waits for the device once.
    Raises `InvariantError` for rows that `target_probabilities` refuses."""
    fits = len(noises) == len(indices) == len(logits)
    check(fits, f"{len(noises)} noises and {len(indices)} indices for {len(logits)} rows")
    if not noises:
        return [], []
    rules = [noise.rule for noise in noises]
    transforms = [*zip(params, histories or [NO_HISTORY] * len(rules), strict=True)]
    keys = draft_keys(noises, indices)
    read_rows = _read(_Batch(logits, transforms, rules, keys, vocabulary))
    tokens: list[DraftedToken] = [(token_id, None) for token_id in read_rows.tokens.tolist()]
    if set(rules) == {Rule.GREEDY}:
        return tokens, [None] * len(rules)
    likely = read_rows.likely(params)
    quantised = [index for index, rule in enumerate(rules) if rule.needs_q]
    if quantised:
        levels, ids = count_levels(likely.mass[quantised]), likely.ids[quantised]
        digests = np.array([[noises[index].prefix_digest] for index in quantised], dtype=np.uint64)
        drawn = numbers(token_keys(keys[quantised]), digests.view(np.int64))
        counts = uniforms(drawn) * COUNT_TOTAL // 1
        places = (levels <= counts).sum(axis=1).tolist()
        for index, row, own, place in zip(quantised, ids, levels, places, strict=True):
            q = _as_distribution(row, own)
            tokens[index] = int(row[place]), q if len(q.token_ids) > 1 else None
    rows = zip(likely.split([1] * len(rules)), rules, strict=True)
    return tokens, [None if rule is Rule.GREEDY else row for row, rule in rows]


def likely_tokens(
    logits: Tensor, params: Sequence[SamplingParams], vocabulary: DraftVocabulary | None = None
) -> LikelyTokens:
    """The `DRAFT_SUPPORT_ENTRIES` likeliest tokens of each row of a draft's `logits` [R, V], or
    [R, N] for a `vocabulary` of N tokens. Greedy `params` count as temperature 1. Raises
    `InvariantError` for penalties, and for rows that `target_probabilities` refuses."""
    check(not any(each.penalised for each in params), "likely tokens do not support penalties")
    params = [SamplingParams(logit_bias=own.logit_bias) if own.greedy else own for own in params]
    transforms = [(each, NO_HISTORY) for each in params]
    no_keys = np.zeros((len(params), 5), dtype=np.uint64)
    batch = _Batch(logits, transforms, [Rule.TOKEN] * len(params), no_keys, vocabulary)
    return _read(batch).likely(params)


class _Batch(NamedTuple):
    """Rows of logits, and how to draw from them. Only the rule coupled uses `keys`."""

    logits: Tensor
    transforms: Sequence[tuple[SamplingParams, TokenHistory]]
    rules: Sequence[Rule]
    keys: RowKeys
    vocabulary: DraftVocabulary | None

    @property
    def any_changed(self) -> bool:
        return any(params.penalised or params.logit_bias for params, _ in self.transforms)


class _Rows(NamedTuple):
    tokens: IntArray
    """[R]: the likeliest token under greedy, the race's winner under coupled, else arbitrary."""
    maxima: RealArray  # [R]: the largest logit
    ids: IntArray
    """[R, M]: the likeliest tokens, likeliest first. Arbitrary under greedy."""
    values: RealArray
    """[R, M]: the logits of `ids`. Tokens that a filter drops come last and have -inf."""

    def likely(self, params: Sequence[SamplingParams]) -> LikelyTokens:
        temperatures = np.array([filters(each)[:1] for each in params])
        return LikelyTokens(self.ids, np.exp((self.values - self.maxima[:, None]) / temperatures))


def _read(batch: _Batch) -> _Rows:
    logits = batch.logits
    by_kernels = has_kernels(logits.device) and logits.dtype != torch.float64
    rows = _read_by_kernels(batch) if by_kernels else _read_on_host(batch)
    check_maxima(rows.maxima.tolist())
    return rows


def _read_on_host(batch: _Batch) -> _Rows:
    logits, transforms, rules, keys, vocabulary = batch
    logits = logits.cpu()
    rows = logits if logits.dtype == torch.float64 else logits.float()
    if batch.any_changed:
        parts = zip(torch.split(rows, 1), transforms, strict=True)
        rows = torch.cat([adjusted_logits(row, *each, vocabulary) for row, each in parts])
    groups: dict[tuple[Rule, SamplingParams], list[int]] = {}
    for index, (rule, (params, _)) in enumerate(zip(rules, transforms, strict=True)):
        groups.setdefault((rule, params), []).append(index)
    num_rows, width = rows.shape
    tokens, maxima = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows)
    ids, values = np.zeros((2, num_rows, min(width, DRAFT_SUPPORT_ENTRIES)))
    for (rule, params), indices in groups.items():
        part = rows if len(groups) == 1 else rows[indices]
        if rule is Rule.GREEDY:
            largest_columns, maxima[indices] = largest_of_rows(part)
            tokens[indices] = _token_ids(np.array(largest_columns), vocabulary)
            continue
        source = part
        if rule is Rule.COUPLED or params.filtered:
            source = torch.empty((len(part), whole_blocks(width)), dtype=rows.dtype)
            write_weights(part, params, source)
        if rule is Rule.COUPLED:
            tokens[indices] = race(_spread(source, vocabulary), keys[indices])
        top, columns = largest(source, ids.shape[1])
        maxima[indices] = (top[:, 0] if source is part else part.amax(dim=1)).numpy()
        columns.clamp_(max=width - 1)  # Changes only columns that pad a row. Their weight is 0.
        if source is not part:
            top = part.gather(1, columns).masked_fill_(top == 0, -torch.inf)
        ids[indices], values[indices] = _token_ids(columns.numpy(), vocabulary), top.numpy()
    return _Rows(tokens, maxima, ids.astype(np.int64), values)


def _read_by_kernels(batch: _Batch) -> _Rows:
    logits, transforms, rules, keys, vocabulary = batch
    any_coupled = Rule.COUPLED in rules
    any_filtered = any(params.filtered for params, _ in transforms)
    with on_device(logits.device):
        if any_coupled or any_filtered or batch.any_changed:
            judged = np.zeros(len(rules), dtype=JUDGED)
            judged["keys"], judged["num_before"] = keys, -1
            parts, ones = [(*each, ()) for each in transforms], np.ones(len(rules), dtype=np.int64)
            words, judged_words, logits = send_rows(
                logits, parts, ones, -1, as_words(judged), vocabulary
            )
        maxima, likeliest = logits.max(dim=1, keepdim=True)
        results = [likeliest, maxima.double(), likeliest]
        if any_coupled or any_filtered:
            weights = torch.empty_like(logits, dtype=torch.float32)
            kernel_results = torch.empty(
                (len(RESULTS), len(rules)), dtype=torch.float64, device=logits.device
            )
            weigh(weights, kernel_results, logits, words)
        if any_filtered:
            logits = logits.masked_fill(weights == 0, float("-inf"))
        if any_coupled:
            settle(_spread(weights, vocabulary), kernel_results, words, judged_words)
            results[2] = kernel_results[-1, :, None]
        if set(rules) != {Rule.GREEDY}:
            values, columns = largest(logits, DRAFT_SUPPORT_ENTRIES)
            results += [columns, values]
        read = torch.cat(results, dim=1).cpu().numpy()
    is_coupled = [rule is Rule.COUPLED for rule in rules]
    best, raced = read[:, 0].astype(np.int64), read[:, 2].astype(np.int64)
    tokens = np.where(is_coupled, raced, _token_ids(best, vocabulary))
    likely, logits_of_likely = np.split(read[:, 3:], 2, axis=1)
    ids = _token_ids(likely.astype(np.int64), vocabulary)
    return _Rows(tokens, read[:, 1], ids, logits_of_likely)


def _spread(weights: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """Moves each weight from its column to its token id, because races use noise by token id."""
    if vocabulary is None:
        return weights
    table = vocabulary.table(weights.device)
    wide = weights.new_zeros((len(weights), int(vocabulary.token_ids[-1]) + 1))
    return wide.index_copy_(1, table, weights[:, : len(table)])


def _token_ids(columns: IntArray, vocabulary: DraftVocabulary | None) -> IntArray:
    return columns if vocabulary is None else vocabulary.token_ids[columns]


def arrival_order(rows: LikelyTokens, keys: RowKeys) -> tuple[IntArray, RealArray]:
    """Runs a race among the tokens of each row. A token's score is log mass + Gumbel noise. Returns
    tokens and scores, both [R, M], highest first. Tokens without mass come last, as -1 and -inf."""
    raced = scores(rows.mass, rows.ids, keys)
    order = np.argsort(-raced, axis=1)
    raced = np.take_along_axis(raced, order, 1)
    ids = np.where(raced > 0, np.take_along_axis(rows.ids, order, 1), -1)
    with np.errstate(divide="ignore"):
        return ids, np.log(raced)


def quantise(
    probabilities: Tensor, entries_max: int, vocabulary: DraftVocabulary | None = None
) -> DraftDistribution:
    """Quantises the `entries_max` likeliest of `probabilities` [V], or [N] with a `vocabulary`.
    Leaves out tokens whose count would be 0. The result has the target's ids."""
    values, columns = largest(probabilities[None], entries_max)
    levels = count_levels(values.double().numpy())
    return _as_distribution(_token_ids(columns.numpy(), vocabulary)[0], levels[0])


def count_levels(mass: RealArray) -> RealArray:
    """Quantises `mass` [R, M] into cumulative counts [R, M], which are whole numbers."""
    sums = mass.cumsum(axis=1)
    levels: RealArray = (sums / sums[:, -1:] * COUNT_TOTAL).round()
    return levels


def _as_distribution(ids: IntArray, levels: RealArray) -> DraftDistribution:
    check(bool(np.isfinite(levels).all()), "draft probabilities are not finite, or their sum is 0")
    counts = np.diff(levels, prepend=0.0).astype(np.int64)
    kept = counts > 0
    return DraftDistribution(tuple(ids[kept].tolist()), tuple(counts[kept].tolist()))
