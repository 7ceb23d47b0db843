"""What a step of an engine costs."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from outrider.errors import check


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The time of a step as a function of its rows (tokens), its sessions, and their context (the
    slots that the sessions held before the step).

        seconds = base(rows) + session_s * (sessions - 1)
                + (slot_s + row_slot_s * (rows / sessions - 1)) * context

    `base` is interpolated linearly between measured numbers of rows. Above the greatest measured
    number, `base` is extrapolated from the last two numbers."""

    rows: tuple[int, ...]  # the measured numbers of rows, ascending; not empty
    seconds: tuple[float, ...]
    """For each of `rows`, the time of a step of one session without a context."""
    session_s: float = 0.0
    slot_s: float = 0.0
    row_slot_s: float = 0.0

    def __post_init__(self) -> None:
        check(len(self.rows) == len(self.seconds) > 0, "each number of rows needs one time")
        check(all(a < b for a, b in pairwise((0, *self.rows))), "numbers of rows must ascend")
        times = (*self.seconds, self.session_s, self.slot_s, self.row_slot_s)
        check(all(0 <= time < math.inf for time in times), "times must be finite, and 0 or more")

    def step_seconds(self, rows: float, sessions: float = 1, context: float = 0) -> float:
        """Returns the time of a step of `rows` >= 1. Arguments may be means over several steps."""
        attention_s = self.attention_seconds(max(1.0, rows / sessions), context)
        return self.mixed_seconds(rows, sessions, attention_s)

    def mixed_seconds(self, rows: float, sessions: float, attention_s: float) -> float:
        """Returns the time of a step in which the sessions' `attention_seconds` sum up to
        `attention_s`."""
        return self._base(rows) + self.session_s * (sessions - 1) + attention_s

    def attention_seconds(self, rows: float, context: float) -> float:
        """Returns the time that the context of a session with `rows` >= 1 tokens adds to a step."""
        return context * (self.slot_s + self.row_slot_s * (rows - 1))

    def _base(self, rows: float) -> float:
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        after = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        (r0, r1), (s0, s1) = self.rows[after - 1 : after + 1], self.seconds[after - 1 : after + 1]
        return max(0.0, s0 + (s1 - s0) * (rows - r0) / (r1 - r0))
