"""One step as tables that a kernel reads: which rows there are, and on whose pages they look.

New tokens of one sequence are cut into *blocks*, which are what the kernel works on. All tables are
64-bit words in a row, so that they come to the device in one copy, into a place that does not
change where a captured graph reads them:

    token ids, positions, slots    of each row
    logit rows                     rows whose logits are wanted
    blocks                         `BLOCK_WORDS` each, see `_blocks`; one with 0 rows is empty
    pages                          the page tables of all sequences, one after another
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.batch import HeldSequence, rows_of, tree_of
from outrider.engine.interface import SequenceStep
from outrider.errors import check

BLOCK_WORDS = 6
BLOCK_ROWS_MAX = 64
"""Rows that a block of the kernel has at most: its tokens times the query heads of a key head."""
_SPLITS = (16, 4, 1)
"""Parts that a context is cut into; few choices, since each is a graph of its own."""
_SPLIT_SLOTS_MIN = 256
"""Shorter parts cost more to put together than they save."""
_ROW_TABLES = 3
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableSize:
    """How large the tables of a step are, but for its page tables, and how its kernel runs: all
    that a captured graph depends on."""

    num_rows: int
    num_logits: int
    num_blocks: int
    block_tokens: int
    """A power of two; a block has as many rows or fewer."""
    num_splits: int
    """Parts of a context that are attended to side by side."""

    @property
    def num_words(self) -> int:
        """Of all tables but the pages."""
        return _ROW_TABLES * self.num_rows + self.num_logits + BLOCK_WORDS * self.num_blocks


@dataclass(frozen=True, slots=True)
class TableStep:
    """A step's tables on the device: what a forward pass over R rows reads."""

    size: TableSize
    token_ids: Tensor
    """[1, R]."""
    position_ids: Tensor
    """[1, R]."""
    slots: Tensor
    """[R]: where keys and values go."""
    logit_rows: Tensor
    """[L]."""
    blocks: Tensor
    """[B * BLOCK_WORDS]."""
    pages: Tensor
    page_size: int
    ancestors: Tensor | None
    """Where there are trees [R, W], uint8: whether a row looks at the i-th new token of its tree.
    Rows of chains are 0 and are not read."""

    @classmethod
    def of(
        cls,
        words: Tensor,
        pages: Tensor,
        size: TableSize,
        page_size: int,
        ancestors: Tensor | None = None,
    ) -> TableStep:
        """Views of `words` [`size.num_words`], which may be written anew, beside `pages`."""
        num_rows = size.num_rows
        parts = [num_rows] * _ROW_TABLES + [size.num_logits, BLOCK_WORDS * size.num_blocks]
        ids, positions, slots, logit_rows, blocks = torch.split(words, parts)
        return cls(
            size, ids[None], positions[None], slots, logit_rows, blocks, pages, page_size, ancestors
        )


def exact_size(
    sequences: Sequence[HeldSequence], shared_heads: int, key_heads: int, num_programs: int
) -> TableSize:
    """The size of a step that runs as it is, where `shared_heads` query heads share one of
    `key_heads` key heads. `num_programs` is how many programs the device runs side by side."""
    counts = [len(held.step.token_ids) for held in sequences]
    most = max(1, BLOCK_ROWS_MAX // padded_power(shared_heads))
    block_tokens = min(padded_power(max(counts)), most)
    num_blocks = sum(-(-num // block_tokens) for num in counts)
    longest = max(held.length + num for held, num in zip(sequences, counts, strict=True))
    wanted = min(num_programs // (num_blocks * key_heads), longest // _SPLIT_SLOTS_MIN)
    num_splits = next((num for num in _SPLITS if num <= wanted), 1)
    num_logits = sum(held.step.num_logits for held in sequences)
    return TableSize(sum(counts), num_logits, num_blocks, block_tokens, num_splits)


def sizes_of_one_row(shared_heads: int) -> list[TableSize]:
    """A size of one row for each way that the kernel may run."""
    most = max(1, BLOCK_ROWS_MAX // padded_power(shared_heads))
    return [
        TableSize(1, 1, 1, 1 << power, num_splits)
        for power in range(most.bit_length())
        for num_splits in _SPLITS
    ]


def padded_power(number: int) -> int:
    """The smallest power of two >= `number` >= 1."""
    return 1 << (number - 1).bit_length()


def resting_row(page: int, num_logits: int = 0) -> HeldSequence:
    """A row of padding: it stands at the beginning of a page that no sequence holds."""
    return HeldSequence(SequenceStep("", (0,), num_logits), 0, (page,))


def table_words(
    sequences: Sequence[HeldSequence], tables: Sequence[int], size: TableSize, page_size: int
) -> _Ints:
    """The tables of a step but for its pages; `tables` says where each sequence's page table
    begins. Its rows must be as many as `size` says; its logits and its blocks may be fewer."""
    ids, positions, slots, logit_rows = rows_of(sequences, page_size)
    blocks = []
    row = 0
    for held, table in zip(sequences, tables, strict=True):
        blocks.append(_blocks(held, row, table, size.block_tokens))
        row += len(held.step.token_ids)
    check(row == size.num_rows, f"a step of {row} rows in tables of {size.num_rows}")
    logit_words = _filled(logit_rows, size.num_logits)
    block_words = _filled(np.concatenate(blocks), size.num_blocks * BLOCK_WORDS)
    return np.concatenate([ids, positions, slots, logit_words, block_words])


def page_words(sequences: Sequence[HeldSequence]) -> tuple[_Ints, list[int]]:
    """The page tables of a step, one after another, and where each begins."""
    pages = [np.array(held.pages, dtype=np.int64) for held in sequences]
    return np.concatenate(pages), [0, *np.cumsum([len(table) for table in pages[:-1]]).tolist()]


def ancestors_of(sequences: Sequence[HeldSequence], device: torch.device) -> Tensor | None:
    """See `TableStep.ancestors`."""
    widths = [len(held.step.parents) for held in sequences]
    if not any(widths):
        return None
    firsts = [0, *np.cumsum([len(held.step.token_ids) for held in sequences]).tolist()]
    ancestors = np.zeros((firsts[-1], max(widths)), dtype=np.uint8)
    for held, width, (first, last) in zip(sequences, widths, pairwise(firsts), strict=True):
        if width:
            ancestors[first:last, :width] = tree_of(held.step.parents).ancestors
    return torch.from_numpy(ancestors).to(device)


def _blocks(held: HeldSequence, row: int, table: int, block_tokens: int) -> _Ints:
    """The words of each block of new tokens that begin at `row` of the step:

    0    its first row
    1    how many rows it has
    2    where its page table begins
    3    the slots, from the first on, behind which it sees none
    4    of a tree: the slots before its new tokens; of a chain as word 3
    5    the first row of all new tokens
    """
    num = len(held.step.token_ids)
    starts = np.arange(0, num, block_tokens)
    sizes = np.minimum(block_tokens, num - starts)
    ends = held.length + (np.full_like(starts, num) if held.step.parents else starts + sizes)
    before = np.full_like(starts, held.length) if held.step.parents else ends
    same = np.ones_like(starts)
    words = (row + starts, sizes, table * same, ends, before, row * same)
    return np.stack(words, axis=1).reshape(-1)


def _filled(row: _Ints, size: int) -> _Ints:
    """With zeros up to `size` behind it."""
    check(len(row) <= size, f"{len(row)} words in a table of {size}")
    return np.pad(row, (0, size - len(row)))


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


def multi_step_words(
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
