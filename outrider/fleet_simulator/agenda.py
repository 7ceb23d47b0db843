"""What happens next, of many things at times of their own."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """Events in order of time. Of one time what arrives comes first, and steps begin with all that
    has arrived; else in the order in which they were noted."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds."""
        self._events: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def note(self, time: float, action: Callable[[Any], None], value: Any) -> None:
        """`action(value)` is called at that time, in seconds, which is not before now."""
        self._count += 1
        heappush(self._events, (time, 0, self._count, action, value))

    def note_step(self, action: Callable[[Any], None]) -> None:
        """A step begins now, behind all that arrives now."""
        self._count += 1
        heappush(self._events, (self.now, 1, self._count, action, None))

    def run(self, until: float) -> None:
        """All that happens before that time, in seconds; then it is that time."""
        events = self._events
        while events and events[0][0] < until:
            self.now, _, _, action, value = heappop(events)
            action(value)
        self.now = until
