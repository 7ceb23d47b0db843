"""One step of many sequences as one forward pass over the row of all their new tokens.

    sequence    a a a b c c c c ...     new tokens, one after another
    position    7 8 9 0 4 5 5 6 ...     in the token's own sequence; in a tree, by depth
    slot                                where its key and value go

A token attends to slots of its own sequence alone. So new tokens are cut into *segments*:
consecutive tokens of one sequence. Segments of equal size and similar context form a *group*, whose
attention is one batch of matrix products. All this is index arithmetic on arrays, done once a step;
layers with the same window share the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.interface import SequenceStep

SPLIT_SLOTS = 128
"""In *fixed shapes* products are padded to a few sizes, so that logits do not depend on the rest of
a step. Attention then sums over splits of this many slots of a sequence."""
STEP_ROWS_MIN = 8
"""Least number of rows of a step in fixed shapes. Its multiples fill whole vectors of any usual
width."""
FIXED_SEGMENT_TOKENS_MIN = 4
"""Least number of tokens of a segment in fixed shapes: for fewer rows, matrix products in float32
and float64 use other kernels."""


_ROWS_UNIT = 64


def padded_rows(num_rows: int, smallest: int = STEP_ROWS_MIN) -> int:
    """The number of rows that `num_rows` are padded to: a power of two, or from 64 on a multiple of
    64; 0 for none."""
    if num_rows >= _ROWS_UNIT:
        return _in_units(num_rows, _ROWS_UNIT)
    return max(smallest, 1 << (num_rows - 1).bit_length()) if num_rows > 0 else 0


_SEGMENT_TOKENS_MAX = 128
_SEGMENT_TOKENS_MIN = 16
_SCORES_MAX = 2**19
"""Most attention scores of one head (tokens * context) to compute at once, if segments of the
smallest size allow it. This bounds the memory of a step."""
_GATHERED_SLOTS_MAX = 2**16
"""Most slots of several sequences to gather at once."""
_SLOTS_UNIT = 16
"""Slots are gathered in multiples of this. Then each vector lane always adds the same slots, and
none are left over, so a sum does not depend on the masked slots after them. So in bfloat16 a
token's logits are bit-equal with and without drafted tokens after it, while matrix products use one
kernel for few and many rows (on an Intel Xeon's matrix tiles: up to 32 rows)."""
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """The step of one sequence, and where the cache holds that sequence."""

    step: SequenceStep
    length: int
    """Slots held before the step."""
    pages: Sequence[int]
    """The page table, with the pages for the new tokens."""


class StepRows(NamedTuple):
    """The T new tokens of a step, one sequence after another."""

    token_ids: _Ints
    positions: _Ints
    slots: _Ints
    """Where their keys and values go."""
    wanted: _Ints
    """[R]: the rows whose logits are wanted."""


class HeldStep:
    """The sequences of one step, at least one, on pages of this size."""

    def __init__(self, sequences: Sequence[HeldSequence], page_size: int) -> None:
        self.sequences, self.page_size = sequences, page_size

    @cached_property
    def rows(self) -> StepRows:
        """Computed once, for the model and for a draft layer on it."""
        parts = []
        row = 0
        for held in self.sequences:
            step, num = held.step, len(held.step.token_ids)
            places = np.arange(held.length, held.length + num)
            positions = held.length + tree_of(step.parents).depths if step.parents else places
            row += num
            wanted = np.arange(row - step.num_logits, row)
            pages = np.array(held.pages)
            slots = pages[places // self.page_size] * self.page_size + places % self.page_size
            parts.append((np.array(step.token_ids), positions, slots, wanted))
        return StepRows(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Group:
    """N segments of T new tokens each; a segment attends to at most L slots."""

    num_segments: int
    num_tokens: int
    rows: slice | Tensor
    """The rows of the N * T tokens in the step."""
    targets: Tensor | None
    """In fixed shapes [N * T]: where the output goes. As `rows`, except that tokens which pad a
    segment write after the step's last row."""
    slots: Tensor
    """[N * L]; a segment with fewer slots repeats its first one."""
    bias: Tensor | None
    """[N, 1, T, L]: -inf for slots that a token must not see, else 0. None if every token sees all
    of them; in fixed shapes never None."""
    _rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows_by_head(self, num_heads: int, num_slots: int) -> Tensor:
        """[heads * N * L]: `slots` of every head in a cache [heads * num_slots, ..]. Computed once
        for all layers."""
        known = self._rows.get((num_heads, num_slots))
        if known is None:
            firsts = torch.arange(0, num_heads * num_slots, num_slots, device=self.slots.device)
            known = self._rows[num_heads, num_slots] = (firsts[:, None] + self.slots).view(-1)
        return known


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a forward pass over the T new tokens reads."""

    token_ids: Tensor
    """[1, T]; in fixed shapes with padding at the end."""
    position_ids: Tensor
    """Like `token_ids`."""
    slots: Tensor
    """[T]: where keys and values go."""
    logit_rows: Tensor
    """[R]: rows whose logits are wanted; in fixed shapes with padding at the end."""
    groups: dict[int | None, list[Group]]
    """Groups by a layer's window; None = the whole context."""


@dataclass(frozen=True, slots=True)
class _Segment:
    first_row: int
    num_tokens: int
    position: int
    """Position of the first token."""
    end: int
    """Slots up to the last token."""
    slots: _Ints
    """All slots of the sequence, [length]. A tree's tokens have masked gaps between them."""
    tree: Tree | None


@dataclass(frozen=True, slots=True)
class _View:
    """What layers with one window see of a segment, and in which shape."""

    window: int | None
    first_slot: int
    """Tokens see no slot of their sequence before this one."""
    spare_row: int | None
    """In fixed shapes the row of the step that padding is written to; None = shapes vary."""
    device: torch.device
    dtype: torch.dtype

    def first_seen(self, segment: _Segment) -> int:
        """The first slot that any token of the segment may see."""
        reach = 0 if self.window is None else segment.position - self.window + 1
        return max(self.first_slot, reach)

    def begin(self, segment: _Segment) -> int:
        """The first slot that is gathered."""
        return max(self.first_slot, self.first_seen(segment) // self._unit * self._unit)

    def num_slots(self, segment: _Segment) -> int:
        """Slots that are gathered, padding included."""
        return _in_units(segment.end - self.begin(segment), self._unit)

    @property
    def _unit(self) -> int:
        return _SLOTS_UNIT if self.spare_row is None else SPLIT_SLOTS

    def num_tokens(self, segment: _Segment) -> int:
        """Tokens, padding included."""
        num = segment.num_tokens
        return num if self.spare_row is None else padded_rows(num, FIXED_SEGMENT_TOKENS_MIN)


@dataclass(frozen=True, slots=True)
class Tree:
    """T new tokens, of which several may follow the same token."""

    depths: _Ints
    """[T]; 0 for a token that follows the last slot held."""
    ancestors: _Bools
    """[T, T]: whether the column's token is the row's or an ancestor of it."""
    places: _Ints
    """[T]: places after the slots held, for attention. The first token of each depth has the place
    that it would have in a chain. The others follow at a stride, a multiple of `_SLOTS_UNIT`, so
    that attention sums a path in the order of a chain."""


def plan_step(
    step: HeldStep,
    windows: Sequence[int | None],
    device: torch.device,
    dtype: torch.dtype,
    fixed_shapes: bool = False,
    first_slot: int = 0,
) -> StepPlan:
    """The plan of a step for layers with these windows, which see nothing of a sequence before its
    `first_slot`."""
    arrays = list(step.rows)
    segments: list[_Segment] = []
    row = 0
    for held in step.sequences:
        num = len(held.step.token_ids)
        tree = tree_of(held.step.parents) if held.step.parents else None
        segments += _segments(held.length, num, _slots_of(held, step.page_size), row, tree)
        row += num
    if fixed_shapes:
        row = padded_rows(row)
        arrays = [array if array is arrays[2] else _padded(array) for array in arrays]
    groups: dict[int | None, list[Group]] = {}
    for window in windows:
        view = _View(window, first_slot, row if fixed_shapes else None, device, dtype)
        groups[window] = [_group(members, view) for members in _alike(segments, view)]
    token_ids, position_ids, slots_, rows = shipped(arrays, device)
    return StepPlan(token_ids[None], position_ids[None], slots_, rows, groups)


def _padded(array: _Ints) -> _Ints:
    """The array, with zeros at the end for padding."""
    return np.pad(array, (0, padded_rows(len(array)) - len(array)))


def _slots_of(held: HeldSequence, page_size: int) -> _Ints:
    """The slots of a sequence with its new tokens, in order."""
    firsts = np.array(held.pages, dtype=np.int64) * page_size
    slots = (firsts[:, None] + np.arange(page_size)).reshape(-1)
    return slots[: held.length + len(held.step.token_ids)]


def tree_of(parents: Sequence[int]) -> Tree:
    """The tree of `SequenceStep.parents`."""
    num = len(parents)
    depths = np.zeros(num, dtype=np.int64)
    ranks = np.zeros(num, dtype=np.int64)
    ancestors = np.eye(num, dtype=np.bool_)
    for index, parent in enumerate(parents):
        if parent >= 0:
            depths[index] = depths[parent] + 1
            ancestors[index] |= ancestors[parent]
        ranks[index] = np.count_nonzero(depths[:index] == depths[index])
    stride = _in_units(int(depths.max()) + 1, _SLOTS_UNIT)
    return Tree(depths, ancestors, depths + stride * ranks)


def _in_units(num: int, unit: int) -> int:
    """`num` rounded up to a multiple of `unit`."""
    return -(-num // unit) * unit


def _segments(
    length: int, num: int, slots: _Ints, first_row: int, tree: Tree | None
) -> list[_Segment]:
    """Cuts the new tokens of a chain into segments; a tree is one segment."""
    if tree is not None:
        end = length + int(tree.places.max()) + 1
        seen = np.full(end, slots[0])
        seen[:length] = slots[:length]
        seen[length + tree.places] = slots[length:]
        return [_Segment(first_row, num, length, end, seen, tree)]
    size = min(_SEGMENT_TOKENS_MAX, max(_SEGMENT_TOKENS_MIN, _SCORES_MAX // (length + num)))
    return [
        _Segment(
            first_row + start,
            min(size, num - start),
            length + start,
            length + min(start + size, num),
            slots,
            None,
        )
        for start in range(0, num, size)
    ]


def _alike(segments: Sequence[_Segment], view: _View) -> list[list[_Segment]]:
    """Groups of segments with the same number of tokens, and at least half the slots of the
    longest."""

    def size(segment: _Segment) -> tuple[int, int]:
        return view.num_tokens(segment), view.num_slots(segment)

    groups: list[list[_Segment]] = []
    most_tokens = longest = room = 0
    for segment in sorted(segments, key=size, reverse=True):
        num_tokens, num_slots = size(segment)
        if (
            groups
            and most_tokens == num_tokens
            and 2 * num_slots >= longest
            and (len(groups[-1]) + 1) * longest <= room
        ):
            groups[-1].append(segment)
        else:
            groups.append([segment])
            most_tokens, longest = num_tokens, num_slots
            room = min(_GATHERED_SLOTS_MAX, _SCORES_MAX // num_tokens)
    for group in groups:
        group.sort(key=lambda segment: segment.first_row)
    return groups


def _group(members: Sequence[_Segment], view: _View) -> Group:
    num, num_tokens = len(members), view.num_tokens(members[0])
    begins = [view.begin(segment) for segment in members]
    width = max(view.num_slots(segment) for segment in members)
    slots = np.empty((num, width), dtype=np.int64)
    sees_all = num_tokens == 1
    for row, segment, begin in zip(slots, members, begins, strict=True):
        size = segment.end - begin
        row[:size] = segment.slots[begin : segment.end]
        row[size:] = row[0]
        sees_all = sees_all and size == width and begin == view.first_seen(segment)
    firsts = np.array([segment.first_row for segment in members])[:, None]
    lasts = np.array([segment.num_tokens - 1 for segment in members])[:, None]
    tokens = np.arange(num_tokens)
    rows = firsts + np.minimum(tokens, lasts)
    first = members[0].first_row
    is_run = view.spare_row is None and rows[-1, -1] == first + rows.size - 1
    arrays = [slots.reshape(-1)]
    if not is_run:
        arrays.append(rows.reshape(-1))
    if view.spare_row is not None:
        arrays.append(np.where(tokens > lasts, view.spare_row, rows).reshape(-1))
    sent = shipped(arrays, view.device)
    return Group(
        num_segments=num,
        num_tokens=num_tokens,
        rows=slice(first, first + rows.size) if is_run else sent[1],
        targets=None if view.spare_row is None else sent[2],
        slots=sent[0],
        bias=None if sees_all else _bias(members, begins, rows - firsts, width, view),
    )


def _bias(
    members: Sequence[_Segment], begins: Sequence[int], places: _Ints, width: int, view: _View
) -> Tensor:
    """`Group.bias` [N, 1, T, L] for the tokens at these places [N, T] of their segments; column i
    of a segment is slot `begin` + i of its sequence."""
    window = view.window
    firsts = np.array([segment.position for segment in members])[:, None]
    queries = (firsts + places)[..., None]
    slots = np.array(begins)[:, None, None] + np.arange(width)
    allowed = slots <= queries
    if window is not None:
        allowed &= slots > queries - window
    for row, segment, begin, place in zip(allowed, members, begins, places, strict=True):
        if segment.tree is not None:
            row[:] = _tree_mask(segment, segment.tree, begin, width, window)[place]
    mask = torch.from_numpy(~allowed).to(view.device)
    bias = torch.zeros(mask.shape, dtype=view.dtype, device=view.device)
    return bias.masked_fill_(mask, -torch.inf)[:, None]


def _tree_mask(segment: _Segment, tree: Tree, begin: int, width: int, window: int | None) -> _Bools:
    """[T, L]: the slots held before the step and a token's ancestors, as far as the window
    reaches."""
    positions = np.arange(begin, begin + width)
    new = segment.position - begin + tree.places
    positions[new] = segment.position + tree.depths
    allowed = np.zeros((segment.num_tokens, width), dtype=np.bool_)
    allowed[:, : segment.position - begin] = True
    allowed[:, new] = tree.ancestors
    if window is not None:
        allowed &= positions > positions[new, None] - window
    return allowed


def shipped(arrays: Sequence[_Ints], device: torch.device) -> list[Tensor]:
    """The arrays on the device, sent in one copy."""
    if len(arrays) == 1:
        return [torch.from_numpy(arrays[0]).to(device)]
    whole = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(torch.split(whole, [len(array) for array in arrays]))
