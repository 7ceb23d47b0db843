"""Whether a row of a step is bit-equal whatever else is in the step, tried on a decoder's kernels.

Products, norms and rotations either are or are not, and are tried with many row counts. Attention
goes over the context in tiles, whose size depends on how many tokens of a sequence are run
together; as long as the context is one tile, or tiles are the same ones, a token's result is what
it is alone. So the most tokens of a span are found for contexts up to the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from outrider.engine.cpu.decoder import FusedDecoder, FusedLayer
from outrider.engine.cpu.fused_steps import SpanLimits
from outrider.engine.cpu.kernels import Spans
from outrider.engine.threads import on_threads
from outrider.kv_cache.storage import BlockedKeysAndValues, LayerShape

_ROW_COUNTS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96)
_NUM_ROWS: Final = 96
_SPAN_SIZES: Final = (64, 32, 16, 8, 4, 2)
_FIRST_LENGTH: Final = 128
_NUM_PAGES: Final = 257
"""Of the cache that is tried; longer contexts repeat them."""


@torch.inference_mode()
def find_span_limits(
    decoder: FusedDecoder, page_size: int, max_model_len: int, thread_counts: Sequence[int]
) -> SpanLimits | None:
    """The spans with which rows are bit-equal on any of these numbers of threads; None where they
    are not even with spans of one token."""
    kinds = {(layer.heads, layer.width, layer.window): layer for layer in decoder.layers}
    found = []
    for layer in kinds.values():
        if not _has_equal_rows(decoder, layer, thread_counts):
            return None
        limits = _attention_limits(decoder, layer, page_size, max_model_len, thread_counts)
        if limits is None:
            return None
        found.append(limits)
    ends = max((limits.ends for limits in found), key=len)
    sizes = [
        min(limits.sizes[place] if place < len(limits.sizes) else 1 for limits in found)
        for place in range(len(ends))
    ]
    return SpanLimits(ends, tuple(sizes))


def _has_equal_rows(decoder: FusedDecoder, layer: FusedLayer, thread_counts: Sequence[int]) -> bool:
    """Whether the operators that see single rows give each the same, however many there are."""
    generator = torch.Generator().manual_seed(1)

    def drawn(width: int) -> torch.Tensor:
        rows = torch.randn(1, _NUM_ROWS, width, generator=generator)
        return rows.to(decoder.kernels.dtype)

    num_heads, num_keys, _ = layer.heads
    hidden = drawn(decoder.width)
    others = drawn(decoder.width)
    heads = drawn((num_heads + num_keys) * layer.width).view(1, _NUM_ROWS, -1, layer.width)
    cos, sin = (table[:_NUM_ROWS] for table in decoder.rotations[layer.rotation])
    places = torch.arange(_NUM_ROWS) % len(cos)
    cos, sin = cos[places][None], sin[places][None]

    def results(rows: slice) -> Iterator[torch.Tensor]:
        part, other = hidden[:, rows], others[:, rows]
        yield layer.first_norm(part)
        yield from layer.second_norm.add(part, other)
        yield layer.qkv(part)
        yield layer.mlp(part)
        yield decoder.logits_of(part, other)
        query, key = heads[:, rows].split_with_sizes((num_heads, num_keys), 2)
        for norm, states in ((layer.query_norm, query), (layer.key_norm, key)):
            if norm is not None:
                yield norm(states)
        yield from decoder.kernels.rotate(query, key, cos[:, rows], sin[:, rows])
        yield layer.output(query.flatten(2).contiguous())

    whole = list(results(slice(0, _NUM_ROWS)))
    for num_threads in thread_counts:
        with on_threads(num_threads):
            for place, num in enumerate(_ROW_COUNTS):
                first = (7 * place) % (_NUM_ROWS - num + 1)
                rows = slice(first, first + num)
                for expected, part in zip(whole, results(rows), strict=True):
                    if not torch.equal(expected[:, rows], part):
                        return False
    return True


def _attention_limits(
    decoder: FusedDecoder,
    layer: FusedLayer,
    page_size: int,
    max_model_len: int,
    thread_counts: Sequence[int],
) -> SpanLimits | None:
    """The spans of a layer's attention; None where even single tokens depend on others."""
    generator = torch.Generator().manual_seed(2)
    dtype = decoder.kernels.dtype
    num_heads, num_keys, _ = layer.heads
    shape = LayerShape(num_keys, layer.width, layer.width, dtype, torch.device("cpu"))
    cache = BlockedKeysAndValues(shape, _NUM_PAGES, page_size)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    queries = torch.randn(_SPAN_SIZES[0], num_heads, layer.width, generator=generator).to(dtype)

    def attended(length: int, sizes: Sequence[int]) -> torch.Tensor:
        """Of the last tokens of a sequence of this length, in spans of these sizes."""
        num = sum(sizes)
        first = length - num
        starts = torch.tensor([0, *sizes]).cumsum(0)
        pages = torch.arange(-(-length // page_size), dtype=torch.int32) % _NUM_PAGES
        table = pages.expand(len(sizes), -1).contiguous()
        spans = Spans(starts.int(), (first + starts[1:]).int(), table)
        kernels = decoder.kernels
        schedule = kernels.schedule(spans, num_heads, num_keys, layer.width, layer.window)
        return kernels.attend(
            queries[-num:].contiguous(), cache, spans, schedule, layer.scaling, layer.window,
            layer.softcap,
        )  # fmt: skip

    def alone(length: int, num: int) -> torch.Tensor:
        rows = []
        for behind in reversed(range(num)):
            kept = queries[len(queries) - 1 - behind].clone()
            saved, queries[-1] = queries[-1].clone(), kept
            rows.append(attended(length - behind, [1]))
            queries[-1] = saved
        return torch.cat(rows)

    ends: list[int] = []
    sizes: list[int] = []
    length, size = min(_FIRST_LENGTH, max_model_len), _SPAN_SIZES[0]
    while True:
        num = min(_SPAN_SIZES[0], length)
        expected = alone(length, num)
        for num_threads in thread_counts:
            with on_threads(num_threads):
                if not torch.equal(attended(length, [1] * num), expected):
                    return None
                while size > 1 and not all(
                    torch.equal(attended(length, _parts(num, part)), expected)
                    for part in (size, size - 1, size // 2)
                    if part > 0
                ):
                    size //= 2
        if size == 1:
            break
        ends.append(length)
        sizes.append(size)
        if length == max_model_len:
            break
        length = min(2 * length, max_model_len)
    return SpanLimits(tuple(ends), tuple(sizes))


def _parts(num: int, size: int) -> list[int]:
    rest = num % size
    return [size] * (num // size) + ([rest] if rest else [])
