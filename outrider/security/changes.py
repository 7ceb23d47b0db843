"""Whether files are others than they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

_State = tuple[int, int, int, int] | None


class FileWatch:
    """Looks at files now and then, when it is asked."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float], period_s: float) -> None:
        """At most every `period_s` seconds of `clock`. What they are now is known."""
        self._paths = tuple(paths)
        self._clock = clock
        self._period_s = period_s
        self._looked_at = clock()
        self._states = self._look()

    def changed(self) -> bool:
        """Whether they have changed since this was last said. A file that is gone has not: it is
        about to be written."""
        now = self._clock()
        if now - self._looked_at < self._period_s:
            return False
        self._looked_at = now
        states = self._look()
        if states == self._states or None in states:
            return False
        self._states = states
        return True

    def _look(self) -> tuple[_State, ...]:
        return tuple(_state(path) for path in self._paths)


def _state(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
