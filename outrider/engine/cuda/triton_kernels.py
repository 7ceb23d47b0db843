"""Two Triton kernels that compute the attention of a step from its tables (see `table_steps.py`).

`attend_blocks` has one program for each combination of a block of new tokens, a key head and a
split of the context. The program loads `BLOCK_SLOTS` slots at a time. For each new token and query
head, it keeps the largest score, the sum of the weights exp(score - largest score), and the
weighted sum of the values (Milakov and Gimelshein, 2018; Dao et al., 2022). With several splits,
each program writes these three results, and `merge_splits` combines them (Dao et al., 2023)."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


# If Triton specialised on these values, it would compile the kernel again while a request waits.
@triton.jit(
    do_not_specialize=["num_rows_of_step"],
    do_not_specialize_on_alignment=["positions", "blocks", "pages"],
)
def attend_blocks(
    output,  # [R, query heads, value width]
    parts,  # [splits, R, query heads, value width], float32; unused with one split
    maxima,  # [splits, R, query heads], float32; unused with one split
    sums,  # like `maxima`
    queries,  # [query heads, R, key width], with the next two parameters as strides
    query_head_stride,
    query_row_stride,
    keys,  # [key heads, slots, key width]
    values,  # [key heads, slots, value width]
    num_slots,
    positions,  # [R]
    blocks,  # [B, 4], see `_blocks` in `table_steps.py`
    pages,  # the page tables of all sequences, one after another
    num_rows_of_step,  # R
    scaling,
    softcap,
    window,
    PAGE_SIZE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The grid is [B, key heads, splits]."""
    block = blocks + tl.program_id(0) * 4
    num_rows = tl.load(block + 1).to(tl.int32)
    first_row = tl.load(block).to(tl.int32)
    page_table = pages + tl.load(block + 2)
    end = tl.load(block + 3).to(tl.int32)
    key_head = tl.program_id(1)
    split = tl.program_id(2)

    lane = tl.arange(0, BLOCK_ROWS)
    token = lane // SHARED_PADDED
    head = lane % SHARED_PADDED
    is_row = (token < num_rows) & (head < SHARED)
    row = first_row + tl.minimum(token, num_rows - 1)
    query_head = key_head * SHARED + tl.minimum(head, SHARED - 1)
    position = tl.load(positions + row).to(tl.int32)

    key_lane = tl.arange(0, KEY_PADDED)
    value_lane = tl.arange(0, VALUE_PADDED)
    query = tl.load(
        queries
        + query_head.to(tl.int64)[:, None] * query_head_stride
        + row.to(tl.int64)[:, None] * query_row_stride
        + key_lane[None, :],
        mask=is_row[:, None] & (key_lane < KEY_WIDTH)[None, :],
        other=0.0,
    )

    begin = 0
    if HAS_WINDOW:
        reach = tl.maximum(tl.min(position, axis=0) - window + 1, 0)
        begin = reach // BLOCK_SLOTS * BLOCK_SLOTS
    chunks = (end - begin + NUM_SPLITS * BLOCK_SLOTS - 1) // (NUM_SPLITS * BLOCK_SLOTS)
    first = begin + split * chunks * BLOCK_SLOTS
    last = tl.minimum(first + chunks * BLOCK_SLOTS, end)

    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, VALUE_PADDED], tl.float32)
    for start in range(first, last, BLOCK_SLOTS):
        place = start + tl.arange(0, BLOCK_SLOTS)
        is_held = place < end
        page = tl.load(page_table + place // PAGE_SIZE, mask=is_held, other=0)
        slot = key_head.to(tl.int64) * num_slots + page * PAGE_SIZE + place % PAGE_SIZE
        key = tl.load(
            keys + slot[:, None] * KEY_WIDTH + key_lane[None, :],
            mask=is_held[:, None] & (key_lane < KEY_WIDTH)[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        is_seen = (place[None, :] <= position[:, None]) & is_held[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (place[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - base[:, None])
        scale = tl.exp(largest - base)
        value = tl.load(
            values + slot[:, None] * VALUE_WIDTH + value_lane[None, :],
            mask=is_held[:, None] & (value_lane < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        added = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        mixed = mixed * scale[:, None] + added
        total = total * scale + tl.sum(weights, axis=1)
        largest = larger

    at = row.to(tl.int64) * (KEY_HEADS * SHARED) + query_head
    is_value = is_row[:, None] & (value_lane < VALUE_WIDTH)[None, :]
    if NUM_SPLITS == 1:
        result = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
        target = output + at[:, None] * VALUE_WIDTH + value_lane[None, :]
        tl.store(target, result.to(output.dtype.element_ty), mask=is_value)
    else:
        at += split.to(tl.int64) * num_rows_of_step * (KEY_HEADS * SHARED)
        tl.store(parts + at[:, None] * VALUE_WIDTH + value_lane[None, :], mixed, mask=is_value)
        tl.store(maxima + at, largest, mask=is_row)
        tl.store(sums + at, total, mask=is_row)


@triton.jit(do_not_specialize=["num_outputs"])
def merge_splits(
    output,  # output, parts, maxima and sums are those of `attend_blocks`
    parts,
    maxima,
    sums,
    num_outputs,  # R * query heads
    VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """The grid is [R * query heads]."""
    at = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, NUM_SPLITS)
    value_lane = tl.arange(0, VALUE_PADDED)
    is_value = value_lane < VALUE_WIDTH
    largest = tl.load(maxima + split * num_outputs + at)
    top = tl.max(largest, axis=0)
    scale = tl.exp(largest - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(tl.load(sums + split * num_outputs + at) * scale, axis=0)
    mixed = tl.load(
        parts + (split * num_outputs + at)[:, None] * VALUE_WIDTH + value_lane[None, :],
        mask=is_value[None, :],
        other=0.0,
    )
    result = tl.sum(mixed * scale[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = output + at * VALUE_WIDTH + value_lane
    tl.store(target, result.to(output.dtype.element_ty), mask=is_value)
