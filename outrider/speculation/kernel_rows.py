"""What the kernels of `triton_kernels.py` read and write about each row, in words of 8 bytes."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ROW: Final = np.dtype(
    [
        ("temperature", np.float64),
        ("min_p", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("drafted", np.int64),  # the draft token that the row judges, or -1
        ("num_changed", np.int64),  # number of tokens with a bias or a penalty
        ("changed_at", np.int64),  # byte offset of the table of these tokens
        ("mask_at", np.int64),  # byte offset of the row's mask, or -1
        ("num_before", np.int64),  # number of draft tokens before the row
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
    ]
)
"""The parameters of a row, and the token that it judges."""
JUDGED: Final = np.dtype(
    [
        ("keys", np.uint64, 5),  # the row's `RowKeys`
        ("num_before", np.int64),  # number of draft tokens before the row; -1 = it judges none
        ("is_block", np.int64),  # whether the rule is block
        ("q_at", np.int64),  # byte offset of the draft token's `DraftDistribution.packed`
        ("q_size", np.int64),  # number of tokens in q; 0 = the draft was certain of its token
    ]
)
"""What `settle_rows` needs in addition."""
CHANGED_WORDS: Final = 3
"""Number of words for each token that `logits_processing.changed_tokens` lists."""
RESULTS: Final = (
    "maximum",  # the largest logit; NaN if any logit is NaN
    "total",  # the sum of the weights
    "drafted",  # p of the draft token
    # In row n: min(1, p / q) of the draft token, or pi_{n+1} under block; NaN if q is 0.
    "accepted",
    "left",  # in row n: Z_n. `verification.py` defines n, pi and Z
    "drawn",  # the drawn token
)
"""The results [6, R], as float64."""


def num_words(kind: np.dtype[np.void]) -> int:
    return kind.itemsize // 8


def word(kind: np.dtype[np.void], field: str) -> int:
    """Index of a field's first word."""
    fields: Mapping[str, tuple[Any, ...]] = kind.fields or {}
    return int(fields[field][1]) // 8


def as_words(rows: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """The words [R, W] of rows [R]."""
    return rows.view(np.int64).reshape(len(rows), num_words(rows.dtype))
