"""Plans a step as one forward pass. Each new token of the step's sequences is a *row*.

    sequence    a a a b c c c c ...     the sequence of each new token
    position    7 8 9 0 4 5 6 7 ...     the token's position in its sequence
    slot                                where the token's key and value are written

A token attends only to slots of its own sequence. Therefore the new tokens are cut into *segments*,
each of consecutive tokens of one sequence. Segments of equal size and similar context length form a
*group*. The attention of a group is one batch of matrix products. All layers with the same
attention window use the same groups.

With *fixed shapes*, the inputs of matrix products are padded to a few sizes, so that a token's
logits do not depend on the other tokens of its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.interfaces.engine import SequenceStep

SPLIT_SLOTS = 128  # with fixed shapes, the slots of a segment are divided into splits of this size
STEP_ROWS_MIN = 8  # the least number of rows of a step with fixed shapes
FIXED_SEGMENT_TOKENS_MIN = 4
"""With fixed shapes, a segment is padded to at least this many tokens, because matrix products of
fewer rows use other kernels in float32 and float64."""
_ROWS_UNIT = 64


def padded_rows(num_rows: int, smallest: int = STEP_ROWS_MIN) -> int:
    """Rounds 64 or more rows up to a multiple of 64. Rounds fewer rows up to a power of two, and to
    at least `smallest`. 0 stays 0."""
    if num_rows >= _ROWS_UNIT:
        return _in_units(num_rows, _ROWS_UNIT)
    return max(smallest, 1 << (num_rows - 1).bit_length()) if num_rows > 0 else 0


_SEGMENT_TOKENS_MAX = 128
_SEGMENT_TOKENS_MIN = 16
_SCORES_MAX = 2**19
"""A group computes at most this many attention scores (tokens * context) for each head, to limit
the memory of a step. Only a group of one segment may compute more."""
_GATHERED_SLOTS_MAX = 2**16  # a group of several segments gathers at most this many slots
_SLOTS_UNIT = 16
"""Without fixed shapes, the slots of a segment are padded to a multiple of this number. Each lane
of a vector register then always adds the same slots, and masked slots at the end do not change the
sum. So a token has the same bfloat16 logits with and without draft tokens after it, if matrix
products use the same kernel for both numbers of rows. An Intel Xeon with AMX uses the same kernel
for 1 to 32 rows."""
_Ints = npt.NDArray[np.int64]


class HeldSequence(NamedTuple):
    """One sequence of a step."""

    step: SequenceStep
    length: int  # number of slots that the sequence held before the step
    pages: Sequence[int]  # the page table, including pages for the new tokens


def slots_at(pages: Sequence[int], places: _Ints, page_size: int) -> _Ints:
    """Returns the slots of a sequence's tokens at indices `places`. `pages` is the page table."""
    return np.array(pages)[places // page_size] * page_size + places % page_size


class StepRows(NamedTuple):
    """The T new tokens of a step, one sequence after another."""

    token_ids: _Ints
    positions: _Ints
    slots: _Ints
    wanted: _Ints  # [R]: the rows whose logits are wanted


class HeldStep:
    """The sequences (one or more) of one step."""

    def __init__(self, sequences: Sequence[HeldSequence], page_size: int) -> None:
        self.sequences, self.page_size = sequences, page_size

    @cached_property
    def rows(self) -> StepRows:
        size, sequences = self.page_size, [(held.step, held) for held in self.sequences]
        token_ids = np.array([v for step, _ in sequences for v in step.token_ids])
        # Of each sequence, the pages from that of its first new token on.
        pages = [held.pages[held.length // size :] for _, held in sequences]
        nums, lengths, num_wanted, num_pages = np.array(
            [
                (len(step.token_ids), held.length, step.num_logits, len(own))
                for (step, held), own in zip(sequences, pages, strict=True)
            ]
        ).T
        ends, page_ends, wanted_ends = nums.cumsum(), num_pages.cumsum(), num_wanted.cumsum()
        positions = np.arange(len(token_ids)) + (lengths + nums - ends).repeat(nums)
        places = positions // size + (page_ends - num_pages - lengths // size).repeat(nums)
        slots = np.array([*chain.from_iterable(pages)])[places] * size + positions % size
        wanted = np.arange(wanted_ends[-1]) + (ends - wanted_ends).repeat(num_wanted)
        return StepRows(token_ids, positions, slots, wanted)


@dataclass(frozen=True, slots=True)
class Group:
    """N segments. Each segment has T new tokens, which attend to at most L slots."""

    num_segments: int
    num_tokens: int
    rows: slice | Tensor  # [N * T]: each token's row in the step
    targets: Tensor | None
    """[N * T]: the row for each token's output. The output of padding goes to a spare row after the
    step's last row. None if shapes are not fixed."""
    slots: Tensor  # [N * L]: the slots of each segment, padded with its first slot
    bias: Tensor | None
    """[N, 1, T, L]: added to the attention scores; -inf if the token must not see the slot, else 0.
    None if every token sees all L slots."""
    _rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows_by_head(self, num_heads: int, num_slots: int) -> Tensor:
        """[heads * N * L]: for each head and slot, a row of a tensor [heads * num_slots, width]."""
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
    groups: dict[int | None, list[Group]]  # by window; None = the whole context


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment, and the slots that it reads in the layers of one attention window."""

    first_row: int
    num_tokens: int
    size: int  # `num_tokens`, plus padding if shapes are fixed
    position: int
    begin: int  # the index of `slots[0]` in the sequence
    sees_begin: bool  # whether the first token sees the slot `begin`
    slots: _Ints
    width: int  # the number of slots including padding


def plan_step(
    step: HeldStep,
    windows: Sequence[int | None],
    device: torch.device,
    dtype: torch.dtype,
    fixed_shapes: bool = False,
    first_slot: int = 0,
) -> StepPlan:
    """Plans a step for layers with these windows. No token sees the first `first_slot` slots of its
    sequence."""
    arrays = list(step.rows)
    spare_row = None
    if fixed_shapes:
        spare_row = padded_rows(len(arrays[0]))
        arrays = [array if array is step.rows.slots else _padded(array) for array in arrays]
    slots = [
        slots_at(held.pages, np.arange(held.length + len(held.step.token_ids)), step.page_size)
        for held in step.sequences
    ]
    groups: dict[int | None, list[Group]] = {}
    for window in windows:
        segments = _segments(step.sequences, slots, window, first_slot, fixed_shapes)
        alike = _alike(segments)
        groups[window] = [_group(each, window, spare_row, device, dtype) for each in alike]
    token_ids, position_ids, new_slots, rows = shipped(arrays, device)
    return StepPlan(token_ids[None], position_ids[None], new_slots, rows, groups)


def _padded(array: _Ints) -> _Ints:
    return np.pad(array, (0, padded_rows(len(array)) - len(array)))


def _in_units(num: int, unit: int) -> int:
    return -(-num // unit) * unit


def _segments(
    sequences: Sequence[HeldSequence],
    slots: Sequence[_Ints],
    window: int | None,
    first_slot: int,
    fixed_shapes: bool,
) -> list[_Segment]:
    unit = SPLIT_SLOTS if fixed_shapes else _SLOTS_UNIT
    segments: list[_Segment] = []
    row = 0
    for held, own in zip(sequences, slots, strict=True):
        most = min(_SEGMENT_TOKENS_MAX, max(_SEGMENT_TOKENS_MIN, _SCORES_MAX // len(own)))
        for position in range(held.length, len(own), most):
            num = min(most, len(own) - position)
            first_seen = max(first_slot, 0 if window is None else position - window + 1)
            begin = max(first_slot, first_seen // unit * unit)
            size = padded_rows(num, FIXED_SEGMENT_TOKENS_MIN) if fixed_shapes else num
            read = own[begin : position + num]
            width = _in_units(len(read), unit)
            sees_begin = begin == first_seen
            segments.append(_Segment(row, num, size, position, begin, sees_begin, read, width))
            row += num
    return segments


def _alike(segments: Sequence[_Segment]) -> list[list[_Segment]]:
    """Divides segments into groups. The segments of a group have the same size, and at least half
    as many slots as the group's longest segment."""
    groups: list[list[_Segment]] = []
    room = 0
    for segment in sorted(segments, key=lambda member: (member.size, member.width), reverse=True):
        longest = groups[-1][0] if groups else segment
        if (
            segment.size == longest.size
            and 2 * segment.width >= longest.width
            and groups
            and (len(groups[-1]) + 1) * longest.width <= room
        ):
            groups[-1].append(segment)
        else:
            groups.append([segment])
            room = min(_GATHERED_SLOTS_MAX, _SCORES_MAX // segment.size)
    for group in groups:
        group.sort(key=lambda segment: segment.first_row)
    return groups


def _group(
    members: Sequence[_Segment],
    window: int | None,
    spare_row: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Group:
    """`spare_row` is the row for the output of padding (`Group.targets`)."""
    num_tokens, width = members[0].size, max(segment.width for segment in members)
    slots = np.empty((len(members), width), dtype=np.int64)
    sees_all = num_tokens == 1
    for row, segment in zip(slots, members, strict=True):
        num_slots = len(segment.slots)
        row[:num_slots] = segment.slots
        row[num_slots:] = row[0]
        sees_all = sees_all and num_slots == width and segment.sees_begin
    firsts, sizes, positions, begins = np.array(
        [(member.first_row, member.num_tokens, member.position, member.begin) for member in members]
    ).T[..., None]
    tokens = np.arange(num_tokens)
    places = np.minimum(tokens, sizes - 1)  # [N, T]: the index of each token in its segment
    rows = firsts + places
    first = members[0].first_row
    is_run = spare_row is None and rows[-1, -1] == first + rows.size - 1
    arrays = [slots.reshape(-1)]
    if not is_run:
        arrays.append(rows.reshape(-1))
    if spare_row is not None:
        arrays.append(np.where(tokens < sizes, rows, spare_row).reshape(-1))
    sent = shipped(arrays, device)
    bias = None
    if not sees_all:
        queries = (positions + places)[..., None]
        seen = begins[..., None] + np.arange(width)
        is_hidden = seen > queries
        if window is not None:
            is_hidden |= seen <= queries - window
        mask = torch.from_numpy(is_hidden).to(device)
        bias = torch.zeros(mask.shape, dtype=dtype, device=device)
        bias = bias.masked_fill_(mask, -torch.inf)[:, None]
    return Group(
        num_segments=len(members),
        num_tokens=num_tokens,
        rows=slice(first, first + rows.size) if is_run else sent[1],
        targets=None if spare_row is None else sent[2],
        slots=sent[0],
        bias=bias,
    )


def shipped(arrays: Sequence[_Ints], device: torch.device) -> list[Tensor]:
    """Sends the arrays to the device in one copy."""
    if len(arrays) == 1:
        return [torch.from_numpy(arrays[0]).to(device)]
    whole = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(torch.split(whole, [len(array) for array in arrays]))
