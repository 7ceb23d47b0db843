"""Which of several coordinators a call asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from outrider.errors import StreamBroken

T = TypeVar("T")

AVOIDED_S: Final = 5.0
"""For so long calls begin elsewhere than at one that did not answer. One that cannot serve now says
how long."""


class Turns(Generic[T]):
    """Each coordinator in turn, so that all have a share of a client's sessions."""

    def __init__(self, each: Sequence[T], clock: Callable[[], float], first: int = 0) -> None:
        """Of these the one at `first` is asked first; `clock` counts seconds."""
        self._each = list(each)
        self._clock = clock
        self._next = first
        self._avoided: dict[T, float] = {}
        """Until when."""

    @property
    def each(self) -> list[T]:
        """All of them."""
        return self._each

    def renew(self, each: Sequence[T]) -> None:
        """From now on they are these."""
        self._each = list(each)
        self._avoided = {one: until for one, until in self._avoided.items() if one in self._each}

    def begin(self) -> T:
        """For another call: the next that is not avoided, or the next where all are. Raises
        `StreamBroken` where there are none."""
        now, number = self._clock(), len(self._each)
        if not number:
            raise StreamBroken("no coordinator is named yet")
        order = [(self._next + place) % number for place in range(number)]
        found = next(
            (at for at in order if self._avoided.get(self._each[at], now) <= now), order[0]
        )
        self._next = (found + 1) % number
        return self._each[found]

    def after(self, tried: T | None, avoided_s: float = AVOIDED_S) -> T | None:
        """For a call that was asked of one in vain: so it goes round all of them. Others do not
        begin there for so many seconds. None where there are none."""
        if tried is None or tried not in self._each:  # There are others now.
            return self.begin() if self._each else None
        until = self._clock() + avoided_s
        self._avoided[tried] = max(until, self._avoided.get(tried, until))
        return self._each[(self._each.index(tried) + 1) % len(self._each)]
