"""Decides whether a step waits for sessions that will soon need one too. Pure.

Without a batching delay, sessions that arrive out of phase never share a step: an item that arrives
during a step waits for its end, and its own step then delays the others. If one step for all takes
less time than two steps, sharing it is quicker for all:

    together    wait + step(all)              a cycle in which each session has one round
    in turns    step(waiting) + step(others)

A session is expected back after the mean of its last gaps between answer and next item."""

from collections.abc import Callable, Sequence

from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.newest import Newest

GAIN = 0.9
"""A step waits if waiting shortens the cycle to less than this share of its time."""
MEMORY = 0.25
"""Weight of the newest value in the averages of gaps and of step times."""
SPREAD = 2.5
"""A session counts as late this many mean deviations, and `SPREAD_S`, after its mean gap."""
SPREAD_S = 0.0005
"""Allows for jitter of event loops and networks, s."""
FORGIVEN = 0.03
"""What each step without a delay adds to `_trust`, which delays in vain reduce."""


class _Rhythm:
    """Statistics of when a session comes back."""

    answered_at: float | None = None
    """When it was answered; None while it has an item here."""

    def __init__(self, rows: int, gap_s: float = 0.0, deviation_s: float = 0.0) -> None:
        self.rows, self.gap_s, self.deviation_s = rows, gap_s, deviation_s

    def note(self, gap_s: float) -> None:
        self.deviation_s += MEMORY * (abs(gap_s - self.gap_s) - self.deviation_s)
        self.gap_s += MEMORY * (gap_s - self.gap_s)


class BatchingDelay:
    """Tracks the sessions of a replica and the times of its steps. Times are in s, of one clock."""

    def __init__(self, step_seconds: Callable[[int, int], float], max_batch: int) -> None:
        """`step_seconds(rows, sessions)` is the time of a step; at most `max_batch` sessions share
        one."""
        self._step_seconds = step_seconds
        self._max_batch = max_batch
        self._rhythms: Newest[str, _Rhythm] = Newest(SEQUENCES_PER_REPLICA_MAX)
        """Sorted by the time of their last answer."""
        self._typical = _Rhythm(1)
        """Assumed for sessions that have not come back yet."""
        self._num_gaps = 0
        self._scale = 1.0
        """Ratio of measured step times to those of `step_seconds`."""
        self._trust = 1.0
        """Share of the awaited sessions that came in time, averaged over the last delays."""
        self.awaited: set[str] = set()
        """The sessions of the last delay that have not come, or did not come in time."""
        self._num_awaited = 0
        """All sessions of the last delay."""
        self._until = 0.0
        """When the last delay ends."""

    def arrived(self, session_id: str, now: float) -> None:
        """An item of the session has come."""
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
        """Notes that the session's item, of `rows` rows, was answered."""
        rhythm = self._rhythms.get(session_id)
        if rhythm is None:
            rhythm = _Rhythm(rows, self._typical.gap_s, self._typical.deviation_s)
        rhythm.rows, rhythm.answered_at = rows, now
        self._rhythms[session_id] = rhythm

    def forget(self, session_id: str) -> None:
        """Forgets a session that has ended."""
        self._rhythms.pop(session_id, None)
        self.awaited.discard(session_id)

    def took(self, seconds: float, rows: int, sessions: int) -> None:
        """Notes a step's time."""
        told = self._step_seconds(rows, sessions)
        if told > 0:
            self._scale += MEMORY * (seconds / told - self._scale)

    def hold(self, now: float, waiting: Sequence[int]) -> float | None:
        """Until when the next step should wait, if the items of `waiting` have these numbers of
        rows; None = it should begin now. Sets the sessions that are `awaited`."""
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
            # Sessions that do not come in time need a step of their own after all.
            cycle_s += (1 - self._trust) * self._seconds(rows - sum(waiting), num_come)
            if cycle_s < best_s:
                best, best_s = num_come, cycle_s
        if best == 0:
            return None
        self.awaited, self._num_awaited = {name for _, name, _ in expected[:best]}, best
        self._until = expected[best - 1][0]
        return self._until

    def _expected(self, now: float, before: float) -> list[tuple[float, str, int]]:
        """Sessions that are expected back before a time, the earliest first: when, name, rows."""
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
