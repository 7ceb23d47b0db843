"""Compares a drafter on trial with the other drafters, over the sessions of one coordinator."""

import math
from dataclasses import astuple, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class DrafterSums:
    """Sums over the rounds of one or several drafters. The first round of each session is not
    counted, because it contains the prefill. Nor are sessions with a repeated seed under token or
    block (`RoundLength.is_timed`): they have no time limit, are not independent of each other, and
    must not influence what later sessions with this seed draft."""

    num_sessions: int = 0
    num_rounds: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    """Sum of the times from the start of a round to its outcome."""
    # The next three fields are sums over sessions of tokens², seconds² and tokens × seconds.
    square_tokens: float = 0.0
    square_seconds: float = 0.0
    products: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def accepted_per_round(self) -> float:
        return self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def relative_error(self) -> float:
        """Relative standard error of `tokens_per_second`, a ratio of two sums over independent
        sessions. Source: Cochran, Sampling Techniques, 6.4. The residual of a session is
        tokens - rate × seconds."""
        if self.num_sessions < 2 or not self.num_tokens:
            return math.inf
        rate = self.tokens_per_second
        squares = self.square_tokens - 2 * rate * self.products + rate**2 * self.square_seconds
        correction = self.num_sessions / (self.num_sessions - 1)
        return math.sqrt(max(0.0, squares) * correction) / self.num_tokens


@dataclass(frozen=True, slots=True)
class TrialSums:
    """Sums over the sessions that began during the newest trial and have ended. `new` is for the
    drafter on trial, `old` for all other drafters."""

    replica: str = ""
    """Name of the replica on trial; empty before the first trial."""
    old: DrafterSums = DrafterSums()
    new: DrafterSums = DrafterSums()


class TrialMeter:
    """Keeps the sums of the newest trial."""

    def __init__(self) -> None:
        self._replica = ""
        self._sums = [DrafterSums(), DrafterSums()]
        """[old, new]. Each trial has its own list, to which ending sessions add their sums."""

    @property
    def sums(self) -> TrialSums:
        return TrialSums(self._replica, *self._sums)

    def begin(self, replica: str, is_new: bool) -> "SessionTrial":
        """Returns the meter of a session that begins while the named replica is on trial. `is_new`
        is true if this replica drafts for the session."""
        if replica != self._replica:
            self._replica, self._sums = replica, [DrafterSums(), DrafterSums()]
        return SessionTrial(self._sums, is_new)


class SessionTrial:
    """Sums the rounds of one session. All rounds count for the drafter with which the session
    began. A session changes its drafter only if the replica is lost, which is rare."""

    def __init__(self, sums: list[DrafterSums], is_new: bool) -> None:
        self._sums, self._is_new = sums, is_new
        self._num_rounds = self._num_accepted = self._num_tokens = 0
        self._seconds = 0.0

    def note(self, num_accepted: int, num_tokens: int, seconds: float) -> None:
        """Counts a round that took `seconds`."""
        self._num_rounds += 1
        self._num_accepted += num_accepted
        self._num_tokens += num_tokens
        self._seconds += seconds

    def end(self) -> None:
        """Adds the session to the sums of the trial in which it began."""
        tokens, seconds = self._num_tokens, self._seconds
        if self._num_rounds:
            self._sums[self._is_new] += DrafterSums(
                num_sessions=1,
                num_rounds=self._num_rounds,
                num_accepted=self._num_accepted,
                num_tokens=tokens,
                seconds=seconds,
                square_tokens=tokens**2,
                square_seconds=seconds**2,
                products=tokens * seconds,
            )
