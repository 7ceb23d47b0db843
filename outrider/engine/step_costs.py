"""How long an engine's step takes, as far as was measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from outrider.errors import check


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step's time over its rows (tokens), its sessions and their context (slots held before).

    seconds = base(rows) + session_s * (sessions - 1) + slot_s(rows / sessions) * context,
    where base is interpolated between the measured rows and goes on beyond them as between the last
    two, and slot_s grows with the rows that read each slot.
    """

    rows: tuple[int, ...]
    """Measured, ascending; at least one."""
    seconds: tuple[float, ...]
    """Of a step of one session and so many rows, without a context."""
    session_s: float = 0.0
    """Of each further session."""
    slot_s: float = 0.0
    """Of each slot that one row of its session reads ..."""
    row_slot_s: float = 0.0
    """... and of each further row that reads it."""

    def __post_init__(self) -> None:
        check(len(self.rows) == len(self.seconds) > 0, "each number of rows has one time")
        check(all(a < b for a, b in pairwise((0, *self.rows))), "numbers of rows must ascend")
        times = (*self.seconds, self.session_s, self.slot_s, self.row_slot_s)
        check(all(0 <= time < math.inf for time in times), "times must be finite, and 0 or more")

    def step_seconds(self, rows: int, sessions: int = 1, context: int = 0) -> float:
        """The time of a step of `rows` >= 1 tokens of so many sessions, whose contexts have
        `context` slots together."""
        attention_s = self.attention_seconds(max(1.0, rows / sessions), context)
        return self.mixed_seconds(rows, sessions, attention_s)

    def mixed_seconds(self, rows: int, sessions: int, attention_s: float) -> float:
        """The same for sessions of unlike rows and contexts; `attention_s` is the sum of theirs."""
        return self._base(rows) + self.session_s * (sessions - 1) + attention_s

    def attention_seconds(self, rows: float, context: int) -> float:
        """What a session of `rows` >= 1 tokens adds to a step for its context of so many slots."""
        return context * (self.slot_s + self.row_slot_s * (rows - 1))

    def _base(self, rows: int) -> float:
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        after = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        (r0, r1), (s0, s1) = self.rows[after - 1 : after + 1], self.seconds[after - 1 : after + 1]
        return max(0.0, s0 + (s1 - s0) * (rows - r0) / (r1 - r0))
