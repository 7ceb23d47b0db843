"""The shapes that a deterministic step computes in, so that a row's numbers are its own.

A matrix product may add up a row in another order when it has another number of rows: small ones
have kernels of their own. So rows are padded to a few sizes, all of them multiples of what kernels
take at a time. And the sums of attention go over a context, which grows: it is cut into splits that
begin at fixed positions of the sequence, each is summed by itself, and then they are added in
order. What is padded counts as an exact zero.
"""

from __future__ import annotations

from typing import Final

SPLIT_SLOTS: Final = 128
"""Of a sequence: a split begins at each multiple of it."""
STEP_ROWS_MIN: Final = 8
"""Of a step: a multiple of it has no elements left over where vectors end, for any usual width."""
SEGMENT_TOKENS_MIN: Final = 4
"""Of a segment, which has a row for each query head of a key head: products of fewer rows in
float32 and float64 have kernels of their own."""
_ROWS_STEP: Final = 64
"""Up to it sizes double, from it on they are its multiples."""


def padded_rows(num_rows: int, smallest: int = STEP_ROWS_MIN) -> int:
    """The size that so many rows are padded to; 0 for none."""
    if num_rows >= _ROWS_STEP:
        return -(-num_rows // _ROWS_STEP) * _ROWS_STEP
    return max(smallest, 1 << (num_rows - 1).bit_length()) if num_rows > 0 else 0
