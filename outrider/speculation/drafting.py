"""Drawing draft tokens. What is drawn from is what goes on the wire: under token and block a draft
distribution is truncated and quantised first and sampled afterwards, so its q is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from outrider.errors import check
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.noise import RoundNoise
from outrider.speculation.noise_rows import NoiseBatch
from outrider.speculation.philox import RowKeys
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution
from outrider.speculation.race import race, race_at
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.sparse_rows import SparseRows
from outrider.speculation.supports import Support, likeliest, supports
from outrider.speculation.transforms import (
    NO_HISTORY,
    TokenHistory,
    adjusted_logits,
    check_maxima,
    largest_ids,
    target_probabilities,
)

_FLOOR: Final = 1e-7
"""Part of the likeliest token's probability that a draft token must have: so tokens of a flat tail
are lost that all together make up V / 10^7 of the distribution at most."""
_SPARSE_SHARE: Final = 1 / 8
"""Part of a row above which a pass over all of it is quicker than picking tokens out of it."""
DraftedToken = tuple[int, DraftDistribution | None]
"""A token and what it was drawn from; None where the rule does not look or the draw is one-hot."""
DraftedGroup = tuple[tuple[int, ...], DraftDistribution | None]
"""Siblings, and what they were drawn from without replacement."""


def draft_token(
    probabilities: torch.Tensor,
    noise: RoundNoise,
    index: int,
    entries_max: int = DRAFT_SUPPORT_ENTRIES,
) -> DraftedToken:
    """Draft token `index` (from 0) of a round, from the draft's `probabilities` [V], float64."""
    return draft_tokens(probabilities[None], [noise], [index], entries_max)[0]


def draft_tokens(
    probabilities: torch.Tensor,
    noises: Sequence[RoundNoise],
    indices: Sequence[int],
    entries_max: int = DRAFT_SUPPORT_ENTRIES,
    vocabulary: ReducedVocabulary | None = None,
) -> list[DraftedToken]:
    """`draft_token` for B sessions of one rule: `probabilities` [B, V], float64, unchanged;
    `indices[b]` is the depth of session b's token. With a `vocabulary` they are [B, N], of its
    columns; tokens and distributions have the target's ids all the same."""
    check(len(noises) == len(indices) == len(probabilities), "one noise and index for each row")
    if not noises:
        return []
    batch = NoiseBatch.of(noises)
    if batch.rule is Rule.GREEDY:
        return _one_hot(probabilities.argmax(dim=1).tolist(), vocabulary)
    keys = batch.draft_keys(indices)
    if batch.rule is Rule.COUPLED:
        return [(token_id, None) for token_id in _raced(probabilities, keys, vocabulary).tolist()]
    supports = [quantise(row, entries_max, vocabulary) for row in probabilities]
    tokens = draw_quantised(supports, keys).tolist()
    return [
        (token_id, support if len(support.token_ids) > 1 else None)
        for token_id, support in zip(tokens, supports, strict=True)
    ]


def draw_from_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    noises: Sequence[RoundNoise],
    indices: Sequence[int],
    entries_max: int = DRAFT_SUPPORT_ENTRIES,
    history: TokenHistory = NO_HISTORY,
    vocabulary: ReducedVocabulary | None = None,
) -> tuple[list[DraftedToken], SparseRows | None]:
    """`draft_tokens` of `target_probabilities(logits, params, history)` for B sessions that share
    rule and parameters (and the history, where it counts): `logits` [B, V], unchanged. With a
    `vocabulary` they are [B, N]; parameters, history, tokens and noise have the target's ids. With
    them the `draft_rows` that they were drawn from; None where that took none."""
    check(len(noises) == len(indices) == len(logits), "one noise and index for each row")
    _check_entries(entries_max)
    if not noises:
        return [], None
    batch = NoiseBatch.of(noises)
    if vocabulary is not None:
        params = vocabulary.params(params)
        history = vocabulary.history(history) if params.penalised else history
    if params.greedy:
        return _one_hot(likeliest(logits, params, history), vocabulary), None
    if logits.device.type != "cpu" or batch.rule is Rule.GREEDY:
        probabilities = target_probabilities(logits, params, history)
        return draft_tokens(probabilities, noises, indices, entries_max, vocabulary), None
    rows, keys = draft_rows(logits, params, history, vocabulary), batch.draft_keys(indices)
    if batch.rule is Rule.COUPLED:
        return [(token_id, None) for token_id in rows.draw(keys)], rows
    counted = rows.largest(entries_max).quantised()
    lists = zip(
        counted.split(counted.ids), counted.split(counted.mass.astype(np.int64)), strict=True
    )
    tokens = [
        (token_id, DraftDistribution(tuple(ids), tuple(counts)) if len(ids) > 1 else None)
        for token_id, (ids, counts) in zip(counted.draw(keys), lists, strict=True)
    ]
    return tokens, rows


def draw_siblings(
    logits: torch.Tensor,
    params: SamplingParams,
    noises: Sequence[RoundNoise],
    indices: Sequence[int],
    counts: Sequence[int],
    entries_max: int = DRAFT_SUPPORT_ENTRIES,
    vocabulary: ReducedVocabulary | None = None,
) -> list[DraftedGroup]:
    """Up to `counts[b]` candidates for one place of each of B sessions that share rule and
    parameters, none of them penalties; the first is what `draw_from_logits` draws, and the others
    are what its race brings next, or under greedy what is next likely. Under token these are draws
    without replacement from the q that comes with them."""
    check(len(noises) == len(indices) == len(counts) == len(logits), "a count for each row")
    check(not params.penalised, "penalties would count siblings")
    batch = NoiseBatch.of(noises)
    if vocabulary is not None:
        params = vocabulary.params(params)
    logits = logits.cpu()
    if batch.rule is Rule.GREEDY:
        check_maxima(logits.amax(dim=1).tolist())
        adjusted = adjusted_logits(logits, params, NO_HISTORY)
        likely = [_likeliest_first(row, count) for row, count in zip(adjusted, counts, strict=True)]
        return [_certain(columns, vocabulary) for columns in likely]
    rows, keys = draft_rows(logits, params, NO_HISTORY, vocabulary), batch.draft_keys(indices)
    if batch.rule is Rule.COUPLED:
        return [(tuple(ids), None) for ids in rows.ranked(keys, counts)]
    counted = rows.largest(entries_max).quantised()
    lists = zip(
        counted.split(counted.ids), counted.split(counted.mass.astype(np.int64)), strict=True
    )
    return [
        (tuple(drawn), DraftDistribution(tuple(ids), tuple(mass)) if len(ids) > 1 else None)
        for drawn, (ids, mass) in zip(counted.ranked(keys, counts), lists, strict=True)
    ]


def _likeliest_first(logits: torch.Tensor, count: int) -> list[int]:
    """The columns of the largest of `logits` [V], in order (ties: lowest first)."""
    columns = largest_ids(logits, count)
    order = logits[columns].argsort(descending=True, stable=True)
    found: list[int] = columns[order].tolist()
    return found


def _certain(columns: Sequence[int], vocabulary: ReducedVocabulary | None) -> DraftedGroup:
    return tuple(token_id for token_id, _ in _one_hot(columns, vocabulary)), None


def draft_rows(
    logits: torch.Tensor,
    params: SamplingParams,
    history: TokenHistory = NO_HISTORY,
    vocabulary: ReducedVocabulary | None = None,
) -> SparseRows:
    """The sampled distributions of a draft's `logits` [R, V] on the CPU, up to a factor and without
    what is next to impossible where that is most of it. With a `vocabulary` parameters and history
    are in its columns, and the rows have the target's ids. Raises as `target_probabilities` does.
    """
    if params.tempered_alone:
        rows, flat = SparseRows.likeliest(logits, params.temperature, _FLOOR, _SPARSE_SHARE)
        if flat.any():  # Each row is what it would be alone.
            sparse = iter([rows.row(index) for index in range(len(rows))])
            whole = iter(supports(logits[torch.from_numpy(flat)], params, history))
            rows = SparseRows.of([next(whole if is_flat else sparse) for is_flat in flat])
    else:
        rows = SparseRows.of(supports(logits, params, history))
    return rows if vocabulary is None else rows.with_ids(vocabulary.token_ids[rows.ids])


def _one_hot(columns: Sequence[int], vocabulary: ReducedVocabulary | None) -> list[DraftedToken]:
    """The tokens of columns of the logits, each drawn with certainty."""
    if vocabulary is not None:
        columns = vocabulary.token_ids[list(columns)].tolist()
    return [(token_id, None) for token_id in columns]


def _raced(
    probabilities: torch.Tensor, keys: RowKeys, vocabulary: ReducedVocabulary | None
) -> torch.Tensor:
    """The race's winner in each row, whose noise is that of the tokens and not of the columns."""
    if vocabulary is None:
        return race(probabilities, keys)
    token_ids = vocabulary.table(probabilities.device).expand(probabilities.shape)
    return race_at(token_ids, probabilities, keys)


def quantise(
    probabilities: torch.Tensor, entries_max: int, vocabulary: ReducedVocabulary | None = None
) -> DraftDistribution:
    """The `entries_max` likeliest of `probabilities` [V] (ties: lowest ids) as counts that sum to
    `COUNT_TOTAL`, by largest remainders; tokens left without a count are dropped. Ids ascend, and
    are those of `vocabulary` where the probabilities are its columns'.

    The support may have one entry; whoever puts it on the wire turns that into None."""
    _check_entries(entries_max)
    largest = largest_ids(probabilities, entries_max)
    mass = probabilities[largest].cpu().numpy().astype(np.float64)
    ids = largest.cpu().numpy()
    if vocabulary is not None:
        ids = vocabulary.token_ids[ids]
    counted = SparseRows.of([Support(ids, mass)]).quantised()
    return DraftDistribution(
        tuple(counted.ids.tolist()), tuple(counted.mass.astype(np.int64).tolist())
    )


def _check_entries(entries_max: int) -> None:
    check(1 <= entries_max <= COUNT_TOTAL, f"entries_max {entries_max} is not in 1..{COUNT_TOTAL}")


def draw_quantised(supports: Sequence[DraftDistribution], keys: RowKeys) -> torch.Tensor:
    """One token of each of R quantised distributions: [R], int64, on the CPU."""
    width = max(len(support.token_ids) for support in supports)
    ids = np.zeros((len(supports), width), dtype=np.int64)
    counts = np.zeros((len(supports), width), dtype=np.float64)
    for row, support in enumerate(supports):
        ids[row, : len(support.token_ids)] = support.token_ids
        counts[row, : len(support.counts)] = support.counts
    return race_at(torch.from_numpy(ids), torch.from_numpy(counts), keys)
