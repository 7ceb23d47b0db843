"""Sampling by an exponential race: argmax over v of w_v / -log u_v is v with probability
w_v / sum w, for any weights that need not be normalised (equivalently Gumbel-argmax over log w)."""

from __future__ import annotations

from typing import Final

import torch

from outrider.speculation.philox import RowKeys
from outrider.speculation.philox_rows import row_uniforms, row_uniforms_at

_SPARSE_SHARE: Final = 8
"""Rows of which at most one weight in so many is positive get noise at those alone: a token on its
own costs four times as much as one of a full row."""
_SMALL_VOCABULARY: Final = 256
"""Below it looking for zeros costs more than it saves."""


def race(weights: torch.Tensor, keys: RowKeys) -> torch.Tensor:
    """One token a row: [R], int64. `weights` [R, V], float64, >= 0, unchanged; a row without any
    positive weight gives 0. Ties: lowest id. Works on the device of `weights`."""
    vocab_size = weights.shape[1]
    if vocab_size > _SMALL_VOCABULARY:
        num_positive = int(weights.count_nonzero())
        if num_positive * _SPARSE_SHARE <= weights.numel():
            return _race_at_nonzero(weights, keys)
    waits = row_uniforms(keys, vocab_size, weights.device).log_().neg_()
    return torch.div(weights, waits, out=waits).argmax(dim=1)


def race_at(token_ids: torch.Tensor, weights: torch.Tensor, keys: RowKeys) -> torch.Tensor:
    """The same race among listed tokens: `token_ids` [R, M] ascending in each row, `weights`
    [R, M] float64 (0 where a row lists fewer): [R], int64."""
    waits = row_uniforms_at(keys, token_ids).log_().neg_()
    first = (weights / waits).argmax(dim=1, keepdim=True)
    return token_ids.gather(1, first)[:, 0]


def _race_at_nonzero(weights: torch.Tensor, keys: RowKeys) -> torch.Tensor:
    rows, ids = weights.nonzero(as_tuple=True)
    each = keys.of(rows.cpu().numpy())
    waits = row_uniforms_at(each, ids[:, None])[:, 0].log_().neg_()
    scores = torch.zeros_like(weights)
    scores[rows, ids] = weights[rows, ids] / waits
    return scores.argmax(dim=1)
