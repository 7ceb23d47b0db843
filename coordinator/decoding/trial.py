"""What sessions do with the drafter that is on trial, and with the others, at one coordinator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace


@dataclass(frozen=True, slots=True)
class DrafterSums:
    """Over the sessions that a drafter had. A session counts once it has ended; its rounds but the
    first, which reads the prompt."""

    num_sessions: int = 0
    num_rounds: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    """Of decoding: from the beginning of each round to its decision."""
    square_tokens: float = 0.0
    square_seconds: float = 0.0
    products: float = 0.0
    """The sums of tokens², seconds² and tokens x seconds of a session."""

    def __add__(self, other: DrafterSums) -> DrafterSums:
        return DrafterSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def as_session(self) -> DrafterSums:
        """The same rounds, counted as those of one session."""
        if not self.num_rounds:
            return self
        return replace(
            self, num_sessions=1, square_tokens=self.num_tokens**2,
            square_seconds=self.seconds**2, products=self.num_tokens * self.seconds,
        )  # fmt: skip

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def accepted_per_round(self) -> float:
        return self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def relative_error(self) -> float:
        """The standard error of `tokens_per_second`, as a share of that. A ratio of two sums over
        sessions, which are independent: by the residuals tokens - rate x seconds of each (Cochran,
        Sampling Techniques, 6.4)."""
        if self.num_sessions < 2 or not self.num_tokens:
            return math.inf
        rate = self.tokens_per_second
        squares = self.square_tokens - 2 * rate * self.products + rate**2 * self.square_seconds
        correction = self.num_sessions / (self.num_sessions - 1)
        return math.sqrt(max(0.0, squares) * correction) / self.num_tokens


@dataclass(frozen=True, slots=True)
class TrialSums:
    """Of the sessions that began since a replica came that is on trial."""

    replica: str = ""
    """Its name; empty where none has come."""
    old: DrafterSums = DrafterSums()
    new: DrafterSums = DrafterSums()


class TrialMeter:
    """Hears of sessions that end. Keeps the sums of the newest trial."""

    def __init__(self) -> None:
        self.sums = TrialSums()

    def begin(self, replica: str) -> SessionTrial:
        """A session begins while this replica is on trial."""
        if replica != self.sums.replica:
            self.sums = TrialSums(replica)
        return SessionTrial(lambda old, new: self._end(replica, old, new))

    def _end(self, replica: str, old: DrafterSums, new: DrafterSums) -> None:
        if replica == self.sums.replica:
            self.sums = TrialSums(replica, self.sums.old + old, self.sums.new + new)


class SessionTrial:
    """One session's rounds. It may move from one drafter to the other, where one is lost."""

    def __init__(self, on_end: Callable[[DrafterSums, DrafterSums], None]) -> None:
        self._on_end = on_end
        self._rounds = {False: DrafterSums(), True: DrafterSums()}

    def note(self, is_new: bool, num_accepted: int, num_tokens: int, seconds: float) -> None:
        """A round has been decided, whose drafter is the new one or another."""
        self._rounds[is_new] += DrafterSums(
            num_rounds=1, num_accepted=num_accepted, num_tokens=num_tokens, seconds=seconds
        )

    def end(self) -> None:
        """The session has ended."""
        self._on_end(self._rounds[False].as_session, self._rounds[True].as_session)
