"""Attention over a paged cache by a kernel of its own: reads pages where they are, gathers nothing.

Scores, weights and their sums are in float32 whatever the model's dtype.
"""

from __future__ import annotations

import importlib.util
from typing import Final

import torch

from outrider.engine.cuda.page_tables import TableStep, padded_power
from outrider.kv_cache.storage import KeysAndValues

KERNEL_DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})
_BLOCK_ROWS_MIN: Final = 16
"""Of a product on the device's matrix units."""
_WIDTH_MIN: Final = 16
_BLOCK_SLOTS: Final = 64
_WIDE: Final = 128
"""Above this width of a head a block of slots is half as long: it must fit beside the others."""
_WARPS: Final = 4
_STAGES: Final = 2
"""Blocks of slots that are on their way at a time; with three, wide heads in float32 do not fit."""


def has_kernel() -> bool:
    """Whether the kernel's compiler is here; it comes with torch for CUDA."""
    return importlib.util.find_spec("triton") is not None


def attend_tables(
    query: torch.Tensor,
    cache: KeysAndValues,
    step: TableStep,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention output [1, R, query heads, value width] of queries [1, query heads, R, key width],
    whose keys and values are in the cache. Query head h reads key head h * Hkv // Hq. Rows that are
    in no block are undefined."""
    from outrider.engine.cuda.triton_kernels import attend_blocks, merge_splits

    queries = query[0] if query.stride(-1) == 1 else query[0].contiguous()
    num_heads, num_rows, key_width = queries.shape
    key_heads, num_slots, _ = cache.keys.shape
    value_width = cache.values.shape[2]
    shared = num_heads // key_heads
    shared_padded = padded_power(shared)
    num_splits = step.size.num_splits
    outputs = (num_rows, num_heads)
    output = queries.new_empty((*outputs, value_width))
    parts = maxima = sums = output
    if num_splits > 1:
        parts = queries.new_empty((num_splits, *outputs, value_width), dtype=torch.float32)
        maxima, sums = queries.new_empty((2, num_splits, *outputs), dtype=torch.float32).unbind()
    ancestors = step.ancestors
    padded = {
        "VALUE_WIDTH": value_width,
        "VALUE_PADDED": max(_WIDTH_MIN, padded_power(value_width)),
        "NUM_SPLITS": num_splits,
    }
    attend_blocks[(step.size.num_blocks, key_heads, num_splits)](
        output, parts, maxima, sums, queries, queries.stride(0), queries.stride(1),
        cache.keys, cache.values, num_slots, step.position_ids, step.blocks, step.pages,
        step.blocks if ancestors is None else ancestors,
        0 if ancestors is None else ancestors.shape[1],
        num_rows, scaling, softcap or 1.0, window or 0,
        PAGE_SIZE=step.page_size,
        KEY_HEADS=key_heads,
        SHARED=shared,
        SHARED_PADDED=shared_padded,
        BLOCK_ROWS=max(_BLOCK_ROWS_MIN, step.size.block_tokens * shared_padded),
        BLOCK_SLOTS=_BLOCK_SLOTS if max(key_width, value_width) <= _WIDE else _BLOCK_SLOTS // 2,
        KEY_WIDTH=key_width,
        KEY_PADDED=max(_WIDTH_MIN, padded_power(key_width)),
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        HAS_TREES=ancestors is not None,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=_WARPS,
        num_stages=_STAGES,
        **padded,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits[(num_rows * num_heads,)](
            output, parts, maxima, sums, num_rows * num_heads, num_warps=1, **padded
        )
    return output[None]
