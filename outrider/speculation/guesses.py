"""Guessing what a round will come to, before the target says it.

A round of K draft tokens has K + 1 kinds of outcome: n of them are accepted, and a correction
follows (n = K: the bonus). The correction is the winner of a race over the target's distribution or
over what is left of it after a refusal, in which each token has a number that anyone can compute.
So a draft does better than to guess its likeliest tokens: it runs the same race over its own
distribution q and takes the first tokens that arrive (an order by log q + Gumbel noise). Under
coupled that race, with q = p, is the target's own.

The numbers are those of the current round. What is drafted for an outcome has numbers of its own,
so that guessing says nothing about them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.errors import check
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.drafting import draft_rows
from outrider.speculation.noise import NoiseBatch, RoundNoise
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.sparse_rows import SparseRows
from outrider.speculation.supports import Support
from outrider.speculation.transforms import largest_ids, target_probabilities


def ranked_corrections(
    logits: torch.Tensor,
    params: SamplingParams,
    noise: RoundNoise,
    drafted: Sequence[int],
    count: int,
    vocabulary: ReducedVocabulary | None = None,
) -> list[list[int]]:
    """For n = 0..K accepted tokens of the K that were `drafted` in the round of `noise`: up to
    `count` tokens that the correction may be, the best guess first. `logits` [K + 1, V] are the
    draft's: row n says what follows the first n draft tokens; with a `vocabulary` they are its
    columns, and what is returned has the target's ids. The draft token that must have been refused
    is not among them. Parameters without penalties. Raises what `target_probabilities` does."""
    check(len(logits) == len(drafted) + 1, "one row of logits for each outcome")
    check(not params.penalised, "penalties would count draft tokens")
    if vocabulary is not None:
        params = vocabulary.params(params)
    if params.greedy:
        ranked = _by_logit(logits, count + 1)
        if vocabulary is not None:
            ranked = [vocabulary.token_ids[row].tolist() for row in ranked]
    else:
        ranked = _by_arrival(_rows(logits, params, vocabulary), noise, len(drafted))
    refused = (*drafted, None)
    return [
        [token_id for token_id in row if token_id != out][:count]
        for row, out in zip(ranked, refused, strict=True)
    ]


def _by_logit(logits: torch.Tensor, count: int) -> list[list[int]]:
    ranked: list[list[int]] = logits.topk(min(count, logits.shape[1]), dim=1).indices.tolist()
    return ranked


def _rows(
    logits: torch.Tensor, params: SamplingParams, vocabulary: ReducedVocabulary | None
) -> SparseRows:
    """The likeliest tokens of each row, with their probability up to a factor."""
    if logits.device.type == "cpu":
        return draft_rows(logits, params, vocabulary=vocabulary).largest(DRAFT_SUPPORT_ENTRIES)
    found = []
    for row in target_probabilities(logits, params):
        ids = largest_ids(row, DRAFT_SUPPORT_ENTRIES)
        found.append(Support(ids.cpu().numpy(), row[ids].cpu().numpy()))
    rows = SparseRows.of(found)
    return rows if vocabulary is None else rows.with_ids(vocabulary.token_ids[rows.ids])


def _by_arrival(rows: SparseRows, noise: RoundNoise, num_drafted: int) -> list[list[int]]:
    """The tokens of each row in the order in which they would win the round's race."""
    speeds = rows.speeds(NoiseBatch.of([noise]).correction_keys(num_drafted))
    order = np.lexsort((-speeds, np.arange(len(rows)).repeat(rows.sizes)))
    return rows.split(rows.ids[order])
