"""Plans a step of many sequences as one forward pass over a single row of all their new tokens.

    sequence    a a a b c c c c ...     the sequence of each new token
    position    7 8 9 0 4 5 6 7 ...     the token's position in its sequence
    slot                                where the token's key and value are written

A token attends only to slots of its own sequence. Therefore the new tokens are cut into *segments*,
each of consecutive tokens of one sequence. Segments of equal size and similar context length form a
*group*. The attention of a group is one batch of matrix products. Layers with the same window share
the groups.

With *fixed shapes*, the inputs of matrix products are padded to a few sizes, so that a token's
logits do not depend on the other tokens of its step."""

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
"""With fixed shapes, attention divides the slots of a sequence into splits of this size."""
STEP_ROWS_MIN = 8
"""With fixed shapes, a step has at least this many rows. Multiples of 8 fill the vector registers
of any usual CPU."""
FIXED_SEGMENT_TOKENS_MIN = 4
"""With fixed shapes, a segment has at least this many tokens, because matrix products of fewer rows
use other kernels in float32 and float64."""
_ROWS_UNIT = 64


def padded_rows(num_rows: int, smallest: int = STEP_ROWS_MIN) -> int:
    """Returns the number of rows to which `num_rows` rows are padded. Numbers above 64 become
    multiples of 64. Smaller numbers become powers of two, at least `smallest`. 0 rows are not
    padded."""
    if num_rows >= _ROWS_UNIT:
        return _in_units(num_rows, _ROWS_UNIT)
    return max(smallest, 1 << (num_rows - 1).bit_length()) if num_rows > 0 else 0


_SEGMENT_TOKENS_MAX = 128
_SEGMENT_TOKENS_MIN = 16
_SCORES_MAX = 2**19
"""A group computes at most this many attention scores (tokens * context) for each head. This limits
the memory of a step. Only a single segment of the smallest size may exceed the limit."""
_GATHERED_SLOTS_MAX = 2**16
"""A group of several segments gathers at most this many slots."""
_SLOTS_UNIT = 16
"""Without fixed shapes, the slots of a segment are padded to a multiple of this number. Each lane
of a vector register then always adds the same slots, so a sum does not depend on how many masked
slots follow. Therefore drafted tokens do not change the bits of the logits before them in bfloat16,
as long as matrix products use the same kernel with and without the drafted rows. An Intel Xeon with
matrix tiles uses one kernel for up to 32 rows."""
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """The step of one sequence, and the sequence's pages."""

    step: SequenceStep
    length: int  # number of slots that the sequence held before the step
    pages: Sequence[int]  # the page table, including pages for the new tokens


def slots_at(pages: Sequence[int], places: _Ints, page_size: int) -> _Ints:
    """Returns the slots at these places of a sequence with these pages."""
    return np.array(pages)[places // page_size] * page_size + places % page_size


class StepRows(NamedTuple):
    """The T new tokens of a step, one sequence after another."""

    token_ids: _Ints
    positions: _Ints
    slots: _Ints
    wanted: _Ints  # [R]: the rows whose logits are wanted


class HeldStep:
    """The sequences of one step, at least one."""

    def __init__(self, sequences: Sequence[HeldSequence], page_size: int) -> None:
        self.sequences, self.page_size = sequences, page_size

    @cached_property
    def rows(self) -> StepRows:
        parts = []
        row = 0
        for held in self.sequences:
            step, num = held.step, len(held.step.token_ids)
            positions = np.arange(held.length, held.length + num)
            row += num
            wanted = np.arange(row - step.num_logits, row)
            slots = slots_at(held.pages, positions, self.page_size)
            parts.append((np.array(step.token_ids), positions, slots, wanted))
        return StepRows(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Group:
    """N segments. Each segment has T new tokens, which attend to at most L slots."""

    num_segments: int
    num_tokens: int
    rows: slice | Tensor  # [N * T]: each token's row in the step
    targets: Tensor | None
    """[N * T]: the row to which each token's output is written. The output of a token that only
    pads a segment goes to a spare row after the step's last row. None without fixed shapes."""
    slots: Tensor
    """[N * L]: the slots of each segment. If a segment has fewer than L slots, its first slot is
    repeated."""
    bias: Tensor | None
    """[N, 1, T, L]: a mask that is added to the attention scores. A value is -inf if the token must
    not see the slot, else 0. None if every token sees all L slots."""
    _rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows_by_head(self, num_heads: int, num_slots: int) -> Tensor:
        """Returns [heads * N * L]: the rows of `slots` for every head, in a cache that is flattened
        to [heads * num_slots, width]."""
        known = self._rows.get((num_heads, num_slots))
        if known is None:
            firsts = torch.arange(0, num_heads * num_slots, num_slots, device=self.slots.device)
            known = self._rows[num_heads, num_slots] = (firsts[:, None] + self.slots).view(-1)
        return known


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The inputs of a forward pass over T new tokens. With fixed shapes, padding follows the values
    in `token_ids`, `position_ids` and `logit_rows`."""

    token_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    slots: Tensor  # [T]
    logit_rows: Tensor  # [R]
    groups: dict[int | None, list[Group]]
    """The groups for each window size. The key None means the whole context."""


@dataclass(frozen=True, slots=True)
class _Segment:
    first_row: int
    num_tokens: int
    position: int
    end: int
    """The number of slots of the sequence up to and including the segment's last token."""
    slots: _Ints


@dataclass(frozen=True, slots=True)
class _View:
    """For layers with the same window, chooses the slots that segments read, and their padding."""

    window: int | None
    first_slot: int  # tokens do not see earlier slots of their sequence
    spare_row: int | None  # see `Group.targets`; None without fixed shapes
    device: torch.device
    dtype: torch.dtype

    def first_seen(self, segment: _Segment) -> int:
        """The first slot that any token of the segment may see."""
        reach = 0 if self.window is None else segment.position - self.window + 1
        return max(self.first_slot, reach)

    def begin(self, segment: _Segment) -> int:
        """The first slot that is gathered. Slots are gathered in units of `_unit` slots."""
        return max(self.first_slot, self.first_seen(segment) // self._unit * self._unit)

    def num_slots(self, segment: _Segment) -> int:
        """The number of slots that are gathered for the segment, including padding."""
        return _in_units(segment.end - self.begin(segment), self._unit)

    @property
    def _unit(self) -> int:
        return _SLOTS_UNIT if self.spare_row is None else SPLIT_SLOTS

    def num_tokens(self, segment: _Segment) -> int:
        num = segment.num_tokens
        return num if self.spare_row is None else padded_rows(num, FIXED_SEGMENT_TOKENS_MIN)


def plan_step(
    step: HeldStep,
    windows: Sequence[int | None],
    device: torch.device,
    dtype: torch.dtype,
    fixed_shapes: bool = False,
    first_slot: int = 0,
) -> StepPlan:
    """Plans a step for layers with these windows. Tokens do not see slots of their sequence before
    the index `first_slot`."""
    arrays = list(step.rows)
    segments: list[_Segment] = []
    row = 0
    for held in step.sequences:
        all_places = np.arange(held.length + len(held.step.token_ids))
        segments += _segments(held, slots_at(held.pages, all_places, step.page_size), row)
        row += len(held.step.token_ids)
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
    return np.pad(array, (0, padded_rows(len(array)) - len(array)))


def _in_units(num: int, unit: int) -> int:
    return -(-num // unit) * unit


def _segments(held: HeldSequence, slots: _Ints, first_row: int) -> list[_Segment]:
    length, num = held.length, len(held.step.token_ids)
    size = min(_SEGMENT_TOKENS_MAX, max(_SEGMENT_TOKENS_MIN, _SCORES_MAX // (length + num)))
    return [
        _Segment(
            first_row + start,
            min(size, num - start),
            length + start,
            length + min(start + size, num),
            slots,
        )
        for start in range(0, num, size)
    ]


def _alike(segments: Sequence[_Segment], view: _View) -> list[list[_Segment]]:
    """Divides segments into groups. The segments of a group have the same number of tokens, and at
    least half as many slots as the group's longest segment."""

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
    """`Group.bias`, [N, 1, T, L]. `places` [N, T] are the indices of tokens in their segments. The
    first column of segment n is slot `begins[n]` of its sequence."""
    window = view.window
    firsts = np.array([segment.position for segment in members])[:, None]
    queries = (firsts + places)[..., None]
    slots = np.array(begins)[:, None, None] + np.arange(width)
    allowed = slots <= queries
    if window is not None:
        allowed &= slots > queries - window
    mask = torch.from_numpy(~allowed).to(view.device)
    bias = torch.zeros(mask.shape, dtype=view.dtype, device=view.device)
    return bias.masked_fill_(mask, -torch.inf)[:, None]


def shipped(arrays: Sequence[_Ints], device: torch.device) -> list[Tensor]:
    """Sends the arrays to the device in one copy."""
    if len(arrays) == 1:
        return [torch.from_numpy(arrays[0]).to(device)]
    whole = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(torch.split(whole, [len(array) for array in arrays]))
