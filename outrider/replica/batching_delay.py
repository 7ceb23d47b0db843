"""Decides whether a step waits for sessions that will soon need a step, too.

Without a delay, sessions that arrive out of phase never share a step. An item that arrives during a
step waits for the step's end. Then the item's own step delays the other sessions. If one step for
all sessions takes less time than two steps, sharing a step is faster for all sessions. A cycle, in
which each session has one round, takes:

    together    wait + step(all)
    in turns    step(waiting) + step(others)

The gap of a session is the time from an answer to the session's next item. If a session's last gaps
have mean m and mean deviation d, its next item is expected within m + SPREAD * d + SPREAD_S."""

from collections.abc import Callable, Sequence

from outrider.foundation.bounded_dict import BoundedDict
from outrider.limits import SEQUENCES_PER_REPLICA_MAX

GAIN = 0.9  # a step waits only if `together` is shorter than GAIN times `in turns`
MEMORY = 0.25  # weight of the newest value in the averages of gaps and of trust
SPREAD = 2.5  # a session is late if its gap exceeds mean + SPREAD * mean deviation + SPREAD_S
SPREAD_S = 0.0005  # time that allows for jitter of event loops and networks, s
FORGIVEN = 0.03  # each step without a delay adds this to `_trust`


class _Rhythm:
    answered_at: float | None = None  # None while an item of the session waits or runs

    def __init__(self, rows: int, gap_s: float = 0.0, deviation_s: float = 0.0) -> None:
        self.rows, self.gap_s, self.deviation_s = rows, gap_s, deviation_s

    def note(self, gap_s: float) -> None:
        self.deviation_s += MEMORY * (abs(gap_s - self.gap_s) - self.deviation_s)
        self.gap_s += MEMORY * (gap_s - self.gap_s)


class BatchingDelay:
    """Tracks the gaps of a replica's sessions. All times are in seconds, on one clock."""

    def __init__(self, seconds: Callable[[int, int], float], max_batch: int) -> None:
        """`seconds(rows, sessions)` is the expected time of a step with `rows` tokens of `sessions`
        sessions. If this time is 0, no step waits. A step has at most `max_batch` sessions."""
        self._seconds = seconds
        self._max_batch = max_batch
        self._rhythms: BoundedDict[str, _Rhythm] = BoundedDict(SEQUENCES_PER_REPLICA_MAX)
        """By session, in the order of the sessions' last answers."""
        self._typical = _Rhythm(1)  # averages over all sessions, with which a new session starts
        self._num_gaps = 0
        self._trust = 1.0  # share of the awaited sessions that came in time, averaged over delays
        self.awaited: set[str] = set()  # sessions of the newest delay, less those that came in time
        self._num_awaited = 0
        self._until = 0.0

    def arrived(self, session_id: str, now: float) -> None:
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
        rhythm = self._rhythms.get(session_id)
        if rhythm is None:
            rhythm = _Rhythm(rows, self._typical.gap_s, self._typical.deviation_s)
        rhythm.rows, rhythm.answered_at = rows, now
        self._rhythms[session_id] = rhythm

    def forget(self, session_id: str) -> None:
        self._rhythms.pop(session_id, None)
        self.awaited.discard(session_id)

    def hold(self, now: float, waiting: Sequence[int]) -> float:
        """Sets `awaited` to the sessions for which the next step should wait. Returns the time at
        which the wait ends; `now` = the step should not wait. `waiting` has the number of tokens
        of each waiting item."""
        if self._num_awaited:
            came = 1 - len(self.awaited) / self._num_awaited
            self._trust += MEMORY * (came - self._trust)
        else:
            self._trust = min(1.0, self._trust + FORGIVEN)
        self.awaited, self._num_awaited, self._until = set(), 0, now
        num, rows = len(waiting), sum(waiting)
        room = self._max_batch - num
        if not waiting or room <= 0 or self._num_gaps == 0:
            return now
        alone_s = self._seconds(rows, num)
        expected = self._expected(now, now + alone_s) if alone_s > 0 else []
        if not expected:
            return now
        num_left, rows_left = len(expected), sum(rows for _, _, rows in expected)
        best, best_s = 0, GAIN * (alone_s + self._seconds(rows_left, num_left))
        for num_come, (back_at, _, more) in enumerate(expected[:room], start=1):
            rows, rows_left = rows + more, rows_left - more
            cycle_s = back_at - now + self._seconds(rows, num + num_come)
            if num_left > num_come:
                cycle_s += self._seconds(rows_left, num_left - num_come)
            # Sessions that do not come in time will need a second step.
            cycle_s += (1 - self._trust) * self._seconds(rows - sum(waiting), num_come)
            if cycle_s < best_s:
                best, best_s, self._until = num_come, cycle_s, back_at
        self.awaited, self._num_awaited = {name for _, name, _ in expected[:best]}, best
        return self._until

    def _expected(self, now: float, before: float) -> list[tuple[float, str, int]]:
        """Returns the sessions that are expected to return between `now` and `before`, the earliest
        first, as tuples (latest expected time, session id, number of tokens)."""
        expected = []
        for name, rhythm in self._rhythms.items():
            if rhythm.answered_at is not None:
                late_s = SPREAD * rhythm.deviation_s + SPREAD_S
                back_at = rhythm.answered_at + rhythm.gap_s + late_s
                if now < back_at < before:
                    expected.append((back_at, name, rhythm.rows))
        return sorted(expected)
