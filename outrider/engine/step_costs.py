"""Measures how long an engine's steps take, before the engine is used."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from outrider.interfaces.engine import Engine, SequenceStep, take_stated_seconds
from outrider.interfaces.step_costs import StepCosts

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MEASURED_SESSIONS = 8
MEASURED_CONTEXT = 256
SHORT_CONTEXT = 16
"""The cost of a slot is computed from the times of two steps: one with contexts of this length, one
with contexts of `MEASURED_CONTEXT`. Both steps have several sessions, because the context of one
session adds too little to measure. On two cores, a slot of the demo target adds 2 us to 16 ms."""
CONTEXT_ROWS = 64
"""`row_slot_s` is computed from a step of one session with a long context and this many rows."""
CONTEXTS_SHARE = 0.3
"""Share of the time limit in which contexts are prefilled, one session after another."""
TRIES = 3
"""Each measurement runs up to this many times. The shortest time counts, because other processes
can only make steps slower."""
TRIES_SHARE = 0.05  # a measurement is repeated for at most this share of the time limit
MANY_ROWS = 64  # steps of more rows are measured last
_TOKEN_ID = 0


def measure_step_costs(
    engine: Engine, max_rows: int, max_sessions: int, clock: Callable[[], float], limit_s: float = 3
) -> StepCosts:
    """Measures steps of up to `max_rows` tokens and `max_sessions` sessions. The engine must not
    be in use yet. Call this on the thread on which the engine's steps will run. `clock` returns
    seconds. The steps of an emulated engine take the time that the engine states.

    The measurement ends after about `limit_s`, not counting the time to warm up a device. Numbers
    of rows that are not measured by then are left out. If contexts are not measured by then, their
    cost is 0."""
    bench = _Bench(engine, clock, limit_s * TRIES_SHARE)
    bench.least([_step(0, 1)])  # Only to warm up the engine.
    until = bench.clock() + limit_s
    fitting = min(max_rows, engine.info.max_model_len)
    rows = sorted({*(num for num in MEASURED_ROWS if num < fitting), fitting})
    few = [num for num in rows if num <= MANY_ROWS]
    seconds = bench.rows(few, until)
    context, costs = min(MEASURED_CONTEXT, engine.info.max_model_len - CONTEXT_ROWS), None
    if context > SHORT_CONTEXT and bench.clock() < until:
        contexts_until = bench.clock() + limit_s * CONTEXTS_SHARE
        num = min(MEASURED_SESSIONS, max_sessions)
        costs = bench.contexts(_costs(rows, seconds), num, context, contexts_until)
    # The slowest measurements come last, because there may be no time for them.
    if len(seconds) == len(few):
        seconds += bench.rows(rows[len(few) :], until)
    known = _costs(rows, seconds)
    return known if costs is None else replace(costs, rows=known.rows, seconds=known.seconds)


def _costs(rows: Sequence[int], seconds: Sequence[float]) -> StepCosts:
    """Returns the costs of the first `len(seconds)` of `rows`. If a step took longer than a
    step of more rows, other processes delayed it. The shorter time then counts for both."""
    least = tuple(reversed(list(accumulate(reversed(seconds), min))))
    return StepCosts(tuple(rows[: len(least)]), least)


class _Bench:
    def __init__(self, engine: Engine, clock: Callable[[], float], try_s: float) -> None:
        self._engine, self._clock, self._try_s = engine, clock, try_s
        self._first_is_slow = False
        """Whether the first step of each shape compiles kernels, as on all devices but a CPU. Such
        a step counts neither as a measurement nor towards the time limit."""
        self._excused_s = 0.0  # the total time that does not count towards the time limit

    def clock(self) -> float:
        return self._clock() - self._excused_s

    def rows(self, counts: Sequence[int], until: float) -> list[float]:
        """Returns the time of a step of one session without a context, for each number of tokens in
        `counts`. If time or pages run out, the result is shorter than `counts`."""
        times: list[float] = []
        for num in counts:
            step = [_step(0, num)]
            if self.clock() >= until or not self._engine.can_hold(step):
                break
            times.append(self.least(step))
        return times

    def contexts(self, known: StepCosts, num: int, context: int, until: float) -> StepCosts:
        """Returns `known` with the costs of a session and of a slot of context. Measures `num`
        sessions with `context` slots each, or as many sessions as pages and time allow."""
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
        """Returns the shortest time of several calls of `forward` with these steps. Each sequence
        must hold `length` slots, and holds as many afterwards."""
        self._warm_up(steps, length)
        times: list[float] = []
        enough = self._clock() + self._try_s
        while not times or (len(times) < TRIES and self._clock() < enough):
            times.append(self._seconds(steps))
            self._cut(steps, length)
        return min(times)

    def _warm_up(self, steps: Sequence[SequenceStep], length: int) -> None:
        if self._first_is_slow:
            self._excused_s += self._seconds(steps)
            self._cut(steps, length)

    def _cut(self, steps: Sequence[SequenceStep], length: int) -> None:
        for step in steps:
            if length:
                self._engine.keep(step.sequence_id, length)
            else:
                self._engine.release(step.sequence_id)

    def _seconds(self, steps: Sequence[SequenceStep]) -> float:
        take_stated_seconds(self._engine)
        start = self._clock()
        for logits in self._engine.forward(steps):
            logits[-1:].sum().item()  # Waits for the device, which computes asynchronously.
            self._first_is_slow = logits.device.type != "cpu"
        elapsed = self._clock() - start
        return take_stated_seconds(self._engine) or elapsed


def _step(index: int, num_tokens: int, num_logits: int = 1) -> SequenceStep:
    return SequenceStep(f"cost-{index}", (_TOKEN_ID,) * num_tokens, num_logits)
