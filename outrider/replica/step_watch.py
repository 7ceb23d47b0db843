"""Notices steps that take too long. Let t be the expected time of a step.

- After `LATE_STEP_S`, or `LATE_STEP_FACTOR` * t if that is longer, a step is *late*. The replica
  then refuses all items until the step ends.
- After `HUNG_STEP_S`, or `HUNG_STEP_FACTOR` * t if that is longer, a step is *hung*. The replica
  then ends, and is replaced.

Both limits grow if late steps end after all (`_tolerance`).

t follows from measured costs (`TokenBudget`), or else is the longest time of recent steps. On a
device that may have to compile kernels, both limits are at least `FIRST_STEP_S` for the first step
of each size. Two steps have the same size if their numbers of tokens, rounded up to a power of two,
are equal, and likewise their numbers of sessions.

Other work on the machine makes steps slower, hence the large factors. Time in which the event loop
does not run, for example because the process is stopped, does not count."""

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple

from outrider.limits import (
    FIRST_STEP_S,
    HUNG_STEP_FACTOR,
    HUNG_STEP_S,
    LATE_STEP_FACTOR,
    LATE_STEP_S,
)

CHECK_PERIOD_S = 0.5
"""Pause between two checks of the running step."""
COUNTED_S_MAX = 1.5 * CHECK_PERIOD_S
"""Largest time that counts between two checks. If more passed, the event loop did not run."""
LONGEST_DECAY = 0.99
"""The longest time of recent steps falls by this factor with each step, and so does the
`_tolerance`."""
LATE_TOLERANCE, TOLERANCE_MAX = 2.0, 16.0
"""Each late step that ends multiplies the `_tolerance` by the first value, up to the second."""


class ExpectedStep(NamedTuple):
    """What is known of a step when it begins."""

    rows: int
    """Number of tokens in the first pass."""
    sessions: int
    seconds: float
    """Expected time; 0 = unknown."""


class StepWatch:
    """Watches one step after another. All methods must be called on the event loop's thread."""

    def __init__(
        self,
        expected: Callable[[], ExpectedStep],
        running_since: Callable[[], float | None],
        may_compile: bool,
        on_late: Callable[[float], None],
        on_hung: Callable[[float], None],
    ) -> None:
        """`expected` returns what is expected of the running step, and `running_since` when the
        step began, on the event loop's clock (None = no step runs). `on_late` and `on_hung` get the
        time that the step has taken so far, in seconds. Each is called once for a step."""
        self._expected, self._running_since = expected, running_since
        self._may_compile = may_compile
        self._on_late, self._on_hung = on_late, on_hung
        self._timer: asyncio.TimerHandle | None = None
        self._since = -math.inf  # when the step began whose time is counted
        self._is_late = self._has_gap = False
        self._checked_at = self._counted_s = 0.0
        self._longest_s = 0.0
        self._tolerance = 1.0
        """Factor of both limits. If a machine has become far slower than its costs foretell, it
        grows until steps end in time. Otherwise the same step would be late again and again."""
        self._sizes: set[tuple[int, int]] = set()
        """Sizes of steps that have ended."""

    def begin(self) -> None:
        """Must be called when steps may run. Watches until `end`."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_PERIOD_S, self._check)

    def end(self) -> None:
        """Must be called when no step can run until `begin` is called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def note(self, since: float, until: float, expected: ExpectedStep) -> None:
        """Must be called after each step. If the event loop did not run all the time, the step is
        no measure for later steps."""
        if since >= self._since:
            self._turn_to(since)
            self._count(until)
            counted_s, has_gap, is_late = self._counted_s, self._has_gap, self._is_late
        else:  # `_check` has already seen a later step.
            counted_s, is_late = until - since, False
            has_gap = counted_s > COUNTED_S_MAX
        factor = LATE_TOLERANCE if is_late else LONGEST_DECAY
        self._tolerance = min(max(1.0, factor * self._tolerance), TOLERANCE_MAX)
        self._longest_s *= LONGEST_DECAY
        if not has_gap:
            self._longest_s = max(self._longest_s, counted_s)
        if self._may_compile:
            self._sizes.add(_size(expected))

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CHECK_PERIOD_S, self._check)
        since = self._running_since()
        if since is None:
            return
        self._turn_to(since)
        self._count(loop.time())
        late_s, hung_s = self._limits()
        if self._counted_s >= late_s and not self._is_late:
            self._is_late = True
            self._on_late(self._counted_s)
        if self._counted_s >= hung_s:
            self.end()
            self._on_hung(self._counted_s)

    def _turn_to(self, since: float) -> None:
        """Begins to count the time of the step that began at `since`, unless it is counted."""
        if since != self._since:
            self._since = self._checked_at = since
            self._is_late, self._has_gap, self._counted_s = False, False, 0.0

    def _count(self, now: float) -> None:
        passed_s, self._checked_at = now - self._checked_at, now
        self._has_gap |= passed_s > COUNTED_S_MAX
        self._counted_s += min(passed_s, COUNTED_S_MAX)

    def _limits(self) -> tuple[float, float]:
        step = self._expected()
        seconds = step.seconds or self._longest_s
        late_s = self._tolerance * max(LATE_STEP_S, LATE_STEP_FACTOR * seconds)
        hung_s = self._tolerance * max(HUNG_STEP_S, HUNG_STEP_FACTOR * seconds)
        if self._may_compile and _size(step) not in self._sizes:
            return max(FIRST_STEP_S, late_s), max(FIRST_STEP_S, hung_s)
        return late_s, hung_s


def _size(step: ExpectedStep) -> tuple[int, int]:
    return max(0, step.rows - 1).bit_length(), max(0, step.sessions - 1).bit_length()
