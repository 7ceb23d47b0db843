"""The tables of all steps in which chains are drawn: known before any of their tokens is.

    depth 0    each chain's new tokens, one row of logits each; then rows that rest
    depth d    one row for each chain: the token drawn at depth d - 1; it rests where the chain ends
               before that. Chain i has row i, and what rests behind them makes up the count.

All of them share one run of page tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.engine.batch import HeldSequence
from outrider.engine.cuda.page_tables import TableSize, page_words, resting_row, table_words
from outrider.engine.interface import SequenceStep

_Ints = npt.NDArray[np.int64]


def at_depth(
    sequences: Sequence[HeldSequence], counts: Sequence[int], depth: int, spare_page: int
) -> list[HeldSequence]:
    """The step at a depth >= 1 of chains that draw `counts` tokens; its token ids are not known."""
    resting = resting_row(spare_page, num_logits=1)
    return [
        HeldSequence(
            SequenceStep(held.step.sequence_id, (0,), 1),
            held.length + len(held.step.token_ids) + depth - 1,
            held.pages,
        )
        if depth < count
        else resting
        for held, count in zip(sequences, counts, strict=True)
    ]


def chain_words(
    sequences: Sequence[HeldSequence],
    counts: Sequence[int],
    sizes: Sequence[TableSize],
    page_size: int,
    spare_page: int,
) -> tuple[list[_Ints], _Ints]:
    """The tables of each depth, of these sizes, and the pages."""
    pages, tables = page_words([*sequences, resting_row(spare_page)])
    *own, spare = tables
    resting = resting_row(spare_page)

    def padded(step: Sequence[HeldSequence], where: Sequence[int], size: TableSize) -> _Ints:
        missing = size.num_rows - sum(len(held.step.token_ids) for held in step)
        rows = [*step, *[resting] * missing]
        return table_words(rows, [*where, *[spare] * missing], size, page_size)

    words = [padded(sequences, own, sizes[0])]
    for depth, size in enumerate(sizes[1:], start=1):
        step = at_depth(sequences, counts, depth, spare_page)
        where = [
            spare if depth >= count else table for table, count in zip(own, counts, strict=True)
        ]
        words.append(padded(step, where, size))
    return words, pages
