"""Attention of a deterministic step: the same as `gathered_attention`, in shapes that do not depend
on the step (`fixed_shapes.py`).

Scores are exact sums over a head's width whatever else there is; the largest of them does not
depend on an order. All other sums go over one split, in products of one shape, and then over the
splits from the first to the last. A split in which a token sees nothing adds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.engine.batch import Group
from outrider.engine.fixed_shapes import SPLIT_SLOTS
from outrider.engine.gathered_attention import gathered
from outrider.errors import InvariantError
from outrider.kv_cache.storage import KeysAndValues


def attend_in_splits(
    query: torch.Tensor,
    cache: KeysAndValues,
    groups: Sequence[Group],
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """`attend` of groups in fixed shapes; 0 for rows that are in no group."""
    queries = query[0]
    num_heads, num_rows, _ = queries.shape
    output = queries.new_zeros((num_rows + 1, num_heads, cache.values.shape[2]))
    for group in groups:
        if group.targets is None or isinstance(group.rows, slice) or group.bias is None:
            raise InvariantError("a group is not in fixed shapes")
        chosen = queries.index_select(1, group.rows)
        attended = _attend_group(chosen, cache, group, group.bias, scaling, softcap)
        output.index_copy_(0, group.targets, attended)
    return output[None, :num_rows]


def _attend_group(
    queries: torch.Tensor,
    cache: KeysAndValues,
    group: Group,
    bias: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """[N * T, query heads, value width] of queries [query heads, N * T, key width]."""
    num, size = group.num_segments, group.num_tokens
    key_heads, _, key_width = cache.keys.shape
    value_width = cache.values.shape[2]
    shared = queries.shape[0] // key_heads
    splits = group.slots.numel() // (num * SPLIT_SLOTS)
    products = key_heads * num * splits
    keys, values = gathered(cache, group)
    keys = keys.view(products, SPLIT_SLOTS, key_width)
    values = values.view(products, SPLIT_SLOTS, value_width)
    rows = queries.view(key_heads, shared, num, size, key_width).transpose(1, 2)
    rows = rows.reshape(key_heads, num, 1, shared * size, key_width)
    rows = rows.expand(-1, -1, splits, -1, -1).reshape(products, shared * size, key_width)
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = torch.bmm(rows, keys.transpose(1, 2)).to(wide)
    if softcap is None:
        scores.mul_(scaling)
    else:
        scores.mul_(scaling / softcap).tanh_().mul_(softcap)
    weights = scores.view(key_heads, num, splits, shared, size, SPLIT_SLOTS)
    weights.add_(bias.view(num, 1, size, splits, SPLIT_SLOTS).permute(0, 3, 1, 2, 4))
    weights.sub_(weights.amax((2, 5), keepdim=True)).exp_()
    sums = _in_order(weights.sum(-1), wide)
    parts = torch.bmm(scores.to(queries.dtype), values)
    total = _in_order(parts.view(key_heads, num, splits, shared, size, value_width), wide)
    output = total.div_(sums.unsqueeze(-1)).permute(1, 3, 0, 2, 4)
    return output.reshape(num * size, key_heads * shared, value_width).to(queries.dtype)


def _in_order(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over axis 2, from the first to the last."""
    total = parts.select(2, 0).to(dtype, copy=True)
    for index in range(1, parts.shape[2]):
        total.add_(parts.select(2, index))
    return total
