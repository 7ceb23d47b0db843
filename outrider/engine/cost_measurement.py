"""Measures how long an engine's steps take, before anybody uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from outrider.engine.costs import StepCosts
from outrider.engine.interface import Engine, SequenceStep

MEASURED_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MEASURED_SESSIONS: Final = 8
MEASURED_CONTEXT: Final = 512
CONTEXT_ROWS: Final = 64
"""Rows that are measured over a context, beside one alone."""
TRIES: Final = 3
"""Of each measurement; the quickest counts, as whatever else runs only makes it slower ..."""
TRIES_SHARE: Final = 0.05
"""... but none is begun when a measurement has taken this share of the time for all."""
MANY_ROWS: Final = 64
_TOKEN_ID: Final = 0


def measure_step_costs(
    engine: Engine,
    max_rows: int,
    max_sessions: int,
    clock: Callable[[], float],
    limit_s: float = 3.0,
) -> StepCosts:
    """Runs steps of up to `max_rows` tokens and `max_sessions` sequences on an engine that nobody
    uses yet, on the thread that its steps will run on, and leaves no sequence behind. `clock` gives
    seconds. What is not measured after `limit_s` is left out, or taken to cost nothing. An engine
    that states its time is believed."""
    bench = _Bench(engine, clock, limit_s)
    bench.time([1])  # The first step of all warms up, and does not count.
    fitting = min(max_rows, engine.info.max_model_len)
    rows = sorted({*(num for num in MEASURED_ROWS if num < fitting), fitting})
    few = [num for num in rows if num <= MANY_ROWS]
    base = bench.rows(few)
    num_sessions = min(MEASURED_SESSIONS, max_sessions)
    session_s = bench.beyond(base, [1] * num_sessions) / max(1, num_sessions - 1)
    context = min(MEASURED_CONTEXT, engine.info.max_model_len - CONTEXT_ROWS)
    slot_s = row_slot_s = 0.0
    if context > 0:
        slot_s = bench.beyond(base, [1], context) / context
        many = bench.beyond(base, [CONTEXT_ROWS], context) / context
        row_slot_s = max(0.0, (many - slot_s) / (CONTEXT_ROWS - 1))
    # What takes longest comes last, where it may be left out.
    whole = bench.rows(rows[len(few) :], base)
    return StepCosts(whole.rows, whole.seconds, session_s, slot_s, row_slot_s)


class _Bench:
    """Steps of sequences that nobody wants."""

    def __init__(self, engine: Engine, clock: Callable[[], float], limit_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._until = clock() + limit_s
        self._try_s = limit_s * TRIES_SHARE
        self._first_is_slow = False
        """On a device a step's first run of its shape compiles and records what the next ones
        use."""

    def rows(self, counts: Sequence[int], known: StepCosts | None = None) -> StepCosts:
        """What is known, and the times of so many rows of one session, ascending, as far as they
        can be measured. A time that is longer than that of more rows is taken for disturbed."""
        rows = list(known.rows) if known else []
        seconds = list(known.seconds) if known else []
        for num in counts:
            took = self.time([num])
            if took is None:
                break
            rows.append(num)
            seconds.append(took)
        least = list(accumulate(reversed(seconds), min))
        return StepCosts(tuple(rows), tuple(reversed(least)))

    def time(self, counts: Sequence[int], context: int = 0) -> float | None:
        """The least time, s, of a step of so many tokens of each sequence after `context` others;
        None where time or pages are up."""
        names = [f"cost-{index}" for index in range(len(counts))]
        steps = [_step(name, num, 1) for name, num in zip(names, counts, strict=True)]
        wholes = [_step(name, context + num, 0) for name, num in zip(names, counts, strict=True)]
        if self._clock() >= self._until or not self._engine.can_hold(wholes):
            return None
        best: float | None = None
        try:
            if context:
                self._seconds([_step(name, context, 0) for name in names])
            if self._first_is_slow:
                self._seconds(steps)
                self._take_back(names, context)
            enough = self._clock() + self._try_s
            for _ in range(TRIES):
                took = self._seconds(steps)
                best = took if best is None else min(best, took)
                self._take_back(names, context)
                if self._clock() >= enough:
                    break
        finally:
            for name in names:
                self._engine.release(name)
        return best

    def beyond(self, base: StepCosts, counts: Sequence[int], context: int = 0) -> float:
        """What such a step takes more than one of a single session without a context; 0 where it
        cannot be measured."""
        took = self.time(counts, context)
        return 0.0 if took is None else max(0.0, took - base.step_seconds(sum(counts)))

    def _take_back(self, names: Sequence[str], length: int) -> None:
        for name in names:
            self._engine.keep(name, length)

    def _seconds(self, steps: Sequence[SequenceStep]) -> float:
        self._engine.take_step_seconds()
        start = self._clock()
        for logits in self._engine.forward(steps):
            logits[-1:].sum().item()  # Waits for a device that computes behind our back.
            self._first_is_slow = logits.device.type != "cpu"
        elapsed = self._clock() - start
        return self._engine.take_step_seconds() or elapsed


def _step(name: str, num_tokens: int, num_logits: int) -> SequenceStep:
    return SequenceStep(name, (_TOKEN_ID,) * num_tokens, num_logits)
