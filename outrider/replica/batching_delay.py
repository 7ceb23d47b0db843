"""Whether a step should wait for sessions that will soon want one too. Pure.

Without a batching delay, sessions that arrive out of phase never share a step: an item that comes
while a step runs waits for its end, and then the others wait for the next one. Where one step of
all takes less time than two steps of some, it is quicker for all of them to share one:

    together    wait + step(all)              a cycle in which each session has one round
    in turns    step(waiting) + step(others)

A session is expected as long after its last answer as it has lately taken to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.newest import Newest

GAIN = 0.9
"""A step waits where that makes the cycle shorter than so much of it."""
MEMORY = 0.25
"""Weight of the newest gap in a session's mean, and of the newest step in what steps take."""
SPREAD = 2.5
"""Mean deviations of its gaps that a session may be late by."""
SPREAD_S = 0.0005
"""And that much more: loops and networks are no exact clocks."""
FORGIVEN = 0.03
"""By so much a step without a delay restores the trust that delays in vain have cost."""


class _Rhythm:
    """When a session comes back."""

    answered_at: float | None = None
    """None while it has an item here."""

    def __init__(self, rows: int, gap_s: float = 0.0, deviation_s: float = 0.0) -> None:
        self.rows, self.gap_s, self.deviation_s = rows, gap_s, deviation_s

    def note(self, gap_s: float) -> None:
        self.deviation_s += MEMORY * (abs(gap_s - self.gap_s) - self.deviation_s)
        self.gap_s += MEMORY * (gap_s - self.gap_s)


class BatchingDelay:
    """Knows the sessions of a replica, and what its steps take. Times are of one clock, in s."""

    def __init__(self, step_seconds: Callable[[int, int], float], max_batch: int) -> None:
        """`step_seconds(rows, sessions)` is what a step takes; `max_batch` sessions share one at
        most."""
        self._step_seconds = step_seconds
        self._max_batch = max_batch
        self._rhythms: Newest[str, _Rhythm] = Newest(SEQUENCES_PER_REPLICA_MAX)
        """The one that was answered last is the last one."""
        self._typical = _Rhythm(1)
        """Of a session that has not come back yet."""
        self._num_gaps = 0
        self._scale = 1.0
        """Of what steps take to what `step_seconds` says."""
        self._trust = 1.0
        """Share of the sessions waited for that came in time, in the mean of the last delays."""
        self.awaited: set[str] = set()
        """The sessions for which a step waits, or waited, and which had not come when it began."""
        self._num_awaited = 0
        """How many these were at first ..."""
        self._until = 0.0
        """... and until when it waits for them."""

    def arrived(self, session_id: str, now: float) -> None:
        """An item has come."""
        if now <= self._until:
            self.awaited.discard(session_id)
        rhythm = self._rhythms.get(session_id)
        if rhythm is None or rhythm.answered_at is None:
            return
        gap_s = now - rhythm.answered_at
        rhythm.note(gap_s)
        self._typical.note(gap_s)
        self._num_gaps += 1
        rhythm.answered_at = None

    def answered(self, session_id: str, rows: int, now: float) -> None:
        """What it waited for has been sent, an answer to an item of so many rows."""
        rhythm = self._rhythms.get(session_id)
        if rhythm is None:
            rhythm = _Rhythm(rows, self._typical.gap_s, self._typical.deviation_s)
        rhythm.rows, rhythm.answered_at = rows, now
        self._rhythms[session_id] = rhythm

    def forget(self, session_id: str) -> None:
        """It has ended."""
        self._rhythms.pop(session_id, None)
        self.awaited.discard(session_id)

    def took(self, seconds: float, rows: int, sessions: int) -> None:
        """A step has run."""
        told = self._step_seconds(rows, sessions)
        if told > 0:
            self._scale += MEMORY * (seconds / told - self._scale)

    def hold(self, now: float, waiting: Sequence[int]) -> float | None:
        """Until when the step should wait whose items have so many rows, for the sessions that are
        then `awaited`; None = not at all."""
        if self._num_awaited:
            came = 1 - len(self.awaited) / self._num_awaited
            self._trust += MEMORY * (came - self._trust)
        else:
            self._trust = min(1.0, self._trust + FORGIVEN)
        self.awaited, self._num_awaited = set(), 0
        room = self._max_batch - len(waiting)
        if not waiting or room <= 0 or self._num_gaps == 0:
            return None
        num, rows = len(waiting), sum(waiting)
        alone_s = self._seconds(rows, num)
        expected = self._expected(now, now + alone_s)
        if not expected:
            return None
        num_left, rows_left = len(expected), sum(rows for _, _, rows in expected)
        best, best_s = 0, GAIN * (alone_s + self._seconds(rows_left, num_left))
        for num_come, (back_at, _, more) in enumerate(expected[:room], start=1):
            rows, rows_left = rows + more, rows_left - more
            cycle_s = back_at - now + self._seconds(rows, num + num_come)
            if num_left > num_come:
                cycle_s += self._seconds(rows_left, num_left - num_come)
            # As often as they do not come they need a step of their own after all.
            cycle_s += (1 - self._trust) * self._seconds(rows - sum(waiting), num_come)
            if cycle_s < best_s:
                best, best_s = num_come, cycle_s
        if best == 0:
            return None
        self.awaited, self._num_awaited = {name for _, name, _ in expected[:best]}, best
        self._until = expected[best - 1][0]
        return self._until

    def _expected(self, now: float, before: float) -> list[tuple[float, str, int]]:
        """When sessions that are away should have come, the next one first, and with how many rows;
        those that will have by then."""
        found = []
        for name, rhythm in self._rhythms.items():
            if rhythm.answered_at is not None:
                late_s = SPREAD * rhythm.deviation_s + SPREAD_S
                back_at = rhythm.answered_at + rhythm.gap_s + late_s
                if now < back_at < before:
                    found.append((back_at, name, rhythm.rows))
        return sorted(found)

    def _seconds(self, rows: int, sessions: int) -> float:
        return self._scale * self._step_seconds(rows, sessions)
