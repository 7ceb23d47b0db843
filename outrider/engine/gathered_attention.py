"""Attention over gathered slots of a paged cache, on any device.

The scores have the model's dtype, and are rounded as in the `eager` attention of transformers. In
bfloat16 on one CPU thread, 16 sequences or a long prompt take half as long as with PyTorch's
`scaled_dot_product_attention`. One sequence with one new token takes 1.1 times as long."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.engine.batch import SPLIT_SLOTS, Group, HeldStep, plan_step
from outrider.kv_cache.attention import LayerPages, running
from outrider.kv_cache.storage import KeysAndValues


def attend(query: Tensor, layer: LayerPages, groups: Sequence[Group]) -> Tensor:
    """Returns the attention output [1, T, query heads, value width] of queries [1, query heads, T,
    key width]. The output of rows that are in no group is 0. With Hq query heads and Hkv key heads,
    query head h reads key head h * Hkv // Hq."""
    queries = query[0]
    if len(groups) == 1 and isinstance(groups[0].rows, slice):
        return _attend_group(queries, layer, groups[0])[None]
    num_heads, num_rows, _ = queries.shape
    output = queries.new_zeros((num_rows + 1, num_heads, layer.cache.values.shape[2]))
    for group in groups:
        rows = group.rows
        if isinstance(rows, slice):
            output[rows] = _attend_group(queries[:, rows], layer, group)
        else:
            attend_them = _attend_group if group.targets is None else _attend_group_in_splits
            attended = attend_them(queries.index_select(1, rows), layer, group)
            output.index_copy_(0, rows if group.targets is None else group.targets, attended)
    return output[None, :num_rows]


def _gathered(cache: KeysAndValues, group: Group) -> tuple[Tensor, Tensor]:
    """Keys and values [heads, N * L, width] of a group's slots. `Group` defines N, T and L.

    `index_select` divides only the first dimension among threads. So with several threads, heads
    and slots are merged into one dimension. For 16 sequences of 320 slots, this shortens the call
    from 120 to 76 us on two threads. On one thread, the call would grow from 125 to 155 us."""
    if torch.get_num_threads() == 1:
        return cache.gather(group.slots)
    num_heads, num_slots, _ = cache.keys.shape
    return cache.gather_rows(group.rows_by_head(num_heads, num_slots))


def _attend_group(queries: Tensor, layer: LayerPages, group: Group) -> Tensor:
    """Returns the output [N * T, query heads, value width] of queries [query heads, N * T, key
    width]. The query heads that share a key head are rows of one matrix."""
    num, size = group.num_segments, group.num_tokens
    keys, values = _gathered(layer.cache, group)
    products, num_heads = len(keys) * num, len(queries)
    keys = keys.view(products, -1, keys.shape[2])
    values = values.view(products, -1, values.shape[2])
    # [key heads, N, query heads of a key head, T, width]
    rows = queries.view(len(layer.cache.keys), -1, num, size, queries.shape[2]).transpose(1, 2)
    scores = torch.bmm(rows.reshape(products, -1, queries.shape[2]), keys.transpose(1, 2))
    scaling, softcap = layer.scaling, layer.softcap
    by_token = scores.view(-1, num, num_heads // len(layer.cache.keys), size, keys.shape[1])
    if softcap is not None:
        scores.mul_(scaling / softcap).tanh_().mul_(softcap)
        if group.bias is not None:
            by_token.add_(group.bias)
    elif group.bias is None:
        scores.mul_(scaling)
    else:
        torch.add(group.bias, by_token, alpha=scaling, out=by_token)
    torch.softmax(scores, -1, out=scores)
    output = torch.bmm(scores, values).view(*by_token.shape[:4], values.shape[2])
    return output.permute(1, 3, 0, 2, 4).reshape(num * size, num_heads, values.shape[2])


def _attend_group_in_splits(queries: Tensor, layer: LayerPages, group: Group) -> Tensor:
    """Like `_attend_group`, for steps with `fixed_shapes`. Sums over each split of `SPLIT_SLOTS`
    slots, then over the splits in order. So masked splits at the end do not change the result."""
    num, size = group.num_segments, group.num_tokens
    key_heads, _, key_width = layer.cache.keys.shape
    value_width = layer.cache.values.shape[2]
    shared = queries.shape[0] // key_heads
    splits = group.slots.numel() // (num * SPLIT_SLOTS)
    products = key_heads * num * splits
    keys, values = _gathered(layer.cache, group)
    keys = keys.view(products, SPLIT_SLOTS, key_width)
    values = values.view(products, SPLIT_SLOTS, value_width)
    rows = queries.view(key_heads, shared, num, size, key_width).transpose(1, 2)
    rows = rows.reshape(key_heads, num, 1, shared * size, key_width)
    rows = rows.expand(-1, -1, splits, -1, -1).reshape(products, shared * size, key_width)
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = torch.bmm(rows, keys.transpose(1, 2)).to(wide)
    if layer.softcap is None:
        scores.mul_(layer.scaling)
    else:
        scores.mul_(layer.scaling / layer.softcap).tanh_().mul_(layer.softcap)
    weights = scores.view(key_heads, num, splits, shared, size, SPLIT_SLOTS)
    if group.bias is not None:
        bias = group.bias.view(num, 1, size, splits, SPLIT_SLOTS)
        weights.add_(bias.permute(0, 3, 1, 2, 4))
    weights.sub_(weights.amax((2, 5), keepdim=True)).exp_()
    sums = _in_order(weights.sum(-1), wide)
    parts = torch.bmm(scores.to(queries.dtype), values)
    total = _in_order(parts.view(key_heads, num, splits, shared, size, value_width), wide)
    output = total.div_(sums.unsqueeze(-1)).permute(1, 3, 0, 2, 4)
    return output.reshape(num * size, key_heads * shared, value_width).to(queries.dtype)


def _in_order(parts: Tensor, dtype: torch.dtype) -> Tensor:
    total = parts.select(2, 0).to(dtype, copy=True)
    for index in range(1, parts.shape[2]):
        total.add_(parts.select(2, index))
    return total


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Runs a module: token ids [1, T], position ids [1, T], logit rows [L] -> logits [L, V]."""


class Steps(Protocol):
    """Runs steps on an engine's pages."""

    def run(self, step: HeldStep) -> Tensor:
        """Returns the wanted logits, valid until the next step. Rows of padding may follow them."""


@dataclass(frozen=True, slots=True)
class GatheredSteps(Steps):
    """Runs steps on any device, in any dtype."""

    forward: Forward
    layers: dict[nn.Module, LayerPages]
    device: torch.device
    dtype: torch.dtype
    fixed_shapes: bool

    def run(self, step: HeldStep) -> Tensor:
        windows = list(dict.fromkeys(layer.window for layer in self.layers.values()))
        plan = plan_step(step, windows, self.device, self.dtype, self.fixed_shapes)

        def attend_layer(query: Tensor, layer: LayerPages) -> Tensor:
            return attend(query, layer, plan.groups[layer.window])

        with running(self.layers, plan.slots, attend_layer):
            return self.forward(plan.token_ids, plan.position_ids, plan.logit_rows)
