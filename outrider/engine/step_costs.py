"""How long an engine's steps take, and its measurement before the engine is used."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from outrider.engine.interface import Engine, SequenceStep
from outrider.errors import check


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step's time over its rows (tokens), its sessions and their context (slots held before).

    seconds = base(rows) + session_s * (sessions - 1) + slot_s(rows / sessions) * context,
    where base is interpolated between the measured rows, and extrapolated from the last two beyond
    them; slot_s grows with the rows that read each slot.
    """

    rows: tuple[int, ...]
    """Measured, ascending; at least one."""
    seconds: tuple[float, ...]
    """Time of a step of one session with that many rows, without a context."""
    session_s: float = 0.0
    """Time for each further session."""
    slot_s: float = 0.0
    """Time for each slot that a row of its session reads ..."""
    row_slot_s: float = 0.0
    """... and for each further row that reads it."""

    def __post_init__(self) -> None:
        check(len(self.rows) == len(self.seconds) > 0, "each number of rows has one time")
        check(all(a < b for a, b in pairwise((0, *self.rows))), "numbers of rows must ascend")
        times = (*self.seconds, self.session_s, self.slot_s, self.row_slot_s)
        check(all(0 <= time < math.inf for time in times), "times must be finite, and 0 or more")

    def step_seconds(self, rows: float, sessions: float = 1, context: float = 0) -> float:
        """The time of a step of `rows` >= 1 tokens of several sessions, whose contexts have
        `context` slots in total; fractions are means over steps."""
        attention_s = self.attention_seconds(max(1.0, rows / sessions), context)
        return self.mixed_seconds(rows, sessions, attention_s)

    def mixed_seconds(self, rows: float, sessions: float, attention_s: float) -> float:
        """The same for sessions with different rows and contexts; `attention_s` is the sum of their
        `attention_seconds`."""
        return self._base(rows) + self.session_s * (sessions - 1) + attention_s

    def attention_seconds(self, rows: float, context: float) -> float:
        """What a session of `rows` >= 1 tokens adds to a step for its `context` slots."""
        return context * (self.slot_s + self.row_slot_s * (rows - 1))

    def _base(self, rows: float) -> float:
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        after = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        (r0, r1), (s0, s1) = self.rows[after - 1 : after + 1], self.seconds[after - 1 : after + 1]
        return max(0.0, s0 + (s1 - s0) * (rows - r0) / (r1 - r0))


MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MEASURED_SESSIONS = 8
MEASURED_CONTEXT = 256
"""Slots of each of those sessions."""
SHORT_CONTEXT = 16
"""A context that costs almost nothing, for comparison. Several sessions are measured to make the
difference stand out: on two cores a slot of the demo target costs 2 us, and a step 16 ms."""
CONTEXT_ROWS = 64
"""Rows that are measured over a context, besides a single one."""
CONTEXTS_SHARE = 0.3
"""Share of the time limit after which no more sessions get a context."""
TRIES = 3
"""Tries of each measurement; the fastest counts, as other processes only slow it down ..."""
TRIES_SHARE = 0.05
"""... but no further try starts after this share of the time limit."""
MANY_ROWS = 64
_TOKEN_ID = 0


def measure_step_costs(
    engine: Engine,
    max_rows: int,
    max_sessions: int,
    clock: Callable[[], float],
    limit_s: float = 3.0,
) -> StepCosts:
    """Measures steps of up to `max_rows` tokens and `max_sessions` sequences on an engine that is
    not in use yet, on the thread that its steps will run on; leaves no sequence behind. `clock`
    counts seconds. What is not measured within `limit_s` (which excludes warming up a device) is
    left out, or taken to cost nothing. For an emulated engine, its stated times count."""
    bench = _Bench(engine, clock, limit_s * TRIES_SHARE)
    bench.least([_step(0, 1)])  # The first step only warms up.
    until = bench.clock() + limit_s
    fitting = min(max_rows, engine.info.max_model_len)
    rows = sorted({*(num for num in MEASURED_ROWS if num < fitting), fitting})
    few = [num for num in rows if num <= MANY_ROWS]
    seconds = bench.rows(few, until)
    costs = _costs(rows, seconds)
    context = min(MEASURED_CONTEXT, engine.info.max_model_len - CONTEXT_ROWS)
    if context > SHORT_CONTEXT and bench.clock() < until:
        num = min(MEASURED_SESSIONS, max_sessions)
        costs = bench.contexts(costs, num, context, bench.clock() + limit_s * CONTEXTS_SHARE)
    # The slowest measurements come last, as they may be left out.
    if len(seconds) == len(few):
        seconds += bench.rows(rows[len(few) :], until)
    known = _costs(rows, seconds)
    return replace(costs, rows=known.rows, seconds=known.seconds)


def _costs(rows: Sequence[int], seconds: Sequence[float]) -> StepCosts:
    """Costs of the first of `rows`, as many as there are times. If more rows took less time, the
    longer time was disturbed, and the shorter one replaces it."""
    least = tuple(reversed(list(accumulate(reversed(seconds), min))))
    return StepCosts(tuple(rows[: len(least)]), least)


class _Bench:
    """Measures steps. Its sequences are numbered, and hold nothing before their first step."""

    def __init__(self, engine: Engine, clock: Callable[[], float], try_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._try_s = try_s
        self._first_is_slow = False
        """On a device the first step of each shape compiles kernels, and is not counted."""
        self._excused_s = 0.0
        """Total time of these first steps."""

    def clock(self) -> float:
        """The time, without first steps of a shape."""
        return self._clock() - self._excused_s

    def rows(self, counts: Sequence[int], until: float) -> list[float]:
        """Least time, s, of a step of one session without a context, for each of these numbers of
        tokens. Ends early if time or pages run out."""
        found: list[float] = []
        for num in counts:
            step = [_step(0, num)]
            if self.clock() >= until or not self._engine.can_hold(step):
                break
            found.append(self.least(step))
        return found

    def contexts(self, known: StepCosts, num: int, context: int, until: float) -> StepCosts:
        """Adds the costs of a session and of a slot of its context to `known`. Measures `num`
        sessions, or fewer if pages or time run out."""
        begun = 0
        while num and not self._engine.can_hold(
            [_step(index, context + CONTEXT_ROWS, 0) for index in range(num)]
        ):
            num -= 1
        if num:
            self._warm_up([_step(0, context, 0)], 0)
        while begun < num and (not begun or self.clock() < until):
            self._seconds([_step(begun, context, 0)])
            begun += 1
        if not begun:
            return known
        steps = [_step(index, 1) for index in range(begun)]
        long = self.least(steps, context)
        many = self.least([_step(0, CONTEXT_ROWS)], context)
        self._cut(steps, SHORT_CONTEXT)
        short = self.least(steps, SHORT_CONTEXT)
        self._cut(steps, 0)
        slot_s = max(0.0, long - short) / (begun * (context - SHORT_CONTEXT))
        beyond = long - begun * context * slot_s - known.step_seconds(begun)
        rows_slot_s = (many - known.step_seconds(CONTEXT_ROWS)) / context
        return replace(
            known,
            session_s=max(0.0, beyond) / (begun - 1) if begun > 1 else 0.0,
            slot_s=slot_s,
            row_slot_s=max(0.0, rows_slot_s - slot_s) / (CONTEXT_ROWS - 1),
        )

    def least(self, steps: Sequence[SequenceStep], length: int = 0) -> float:
        """The least time, s, to run `steps` at once on sequences that hold `length` slots each
        before and after it."""
        self._warm_up(steps, length)
        times: list[float] = []
        enough = self._clock() + self._try_s
        while not times or (len(times) < TRIES and self._clock() < enough):
            times.append(self._seconds(steps))
            self._cut(steps, length)
        return min(times)

    def _warm_up(self, steps: Sequence[SequenceStep], length: int) -> None:
        if self._first_is_slow:
            start = self._clock()
            self._seconds(steps)
            self._cut(steps, length)
            self._excused_s += self._clock() - start

    def _cut(self, steps: Sequence[SequenceStep], length: int) -> None:
        for step in steps:
            if length:
                self._engine.keep(step.sequence_id, length)
            else:
                self._engine.release(step.sequence_id)

    def _seconds(self, steps: Sequence[SequenceStep]) -> float:
        self._engine.take_step_seconds()
        start = self._clock()
        for logits in self._engine.forward(steps):
            logits[-1:].sum().item()  # Waits for a device that computes asynchronously.
            self._first_is_slow = logits.device.type != "cpu"
        elapsed = self._clock() - start
        return self._engine.take_step_seconds() or elapsed


def _step(index: int, num_tokens: int, num_logits: int = 1) -> SequenceStep:
    return SequenceStep(f"cost-{index}", (_TOKEN_ID,) * num_tokens, num_logits)
