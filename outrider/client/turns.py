"""Which of several coordinators a call asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

AVOIDED_S: Final = 5.0
"""For so long calls begin elsewhere than at one that did not answer. One that cannot serve now says
how long."""


class Turns:
    """Each coordinator in turn, so that all have a share of a client's sessions."""

    def __init__(self, number: int, clock: Callable[[], float], first: int = 0) -> None:
        """Of `number` coordinators, the one that is asked `first`; `clock` counts seconds."""
        self._number = number
        self._clock = clock
        self._next = first % number
        self._avoided: dict[int, float] = {}
        """Until when."""

    def begin(self) -> int:
        """For another call: the next that is not avoided, or the next where all are."""
        now = self._clock()
        order = [(self._next + place) % self._number for place in range(self._number)]
        found = next((one for one in order if self._avoided.get(one, now) <= now), order[0])
        self._next = (found + 1) % self._number
        return found

    def after(self, tried: int, avoided_s: float = AVOIDED_S) -> int:
        """For a call that was asked of one in vain: so it goes round all of them. Others do not
        begin there for so many seconds."""
        until = self._clock() + avoided_s
        self._avoided[tried] = max(until, self._avoided.get(tried, until))
        return (tried + 1) % self._number
