"""Files: locks, which end with their process, writes in one step, and reads after changes."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from outrider.errors import ConfigError

_log = logging.getLogger(__name__)

_State = tuple[int, int, int, int] | None
Found = TypeVar("Found")


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Within, no other holder of this file's lock is; the file is made, and stays. Raises
    `BlockingIOError` where there is one and it is not waited for."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """In one step. Without a `mode` a new file is for its owner only, another one keeps its own."""
    if mode is None:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class FileWatch:
    """Looks at files now and then, when it is asked."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float], period_s: float) -> None:
        """At most every `period_s` seconds of `clock`. What they are now is known."""
        self._paths = tuple(paths)
        self._clock = clock
        self._period_s = period_s
        self._looked_at = clock()
        self._states = self._look()
        self._trouble = ""

    def news(self, read: Callable[[], Found]) -> Found | None:
        """What `read` returns, once for each change of the files; else None. Where it raises, which
        the log says once, they are read again at the next look: a file may become readable
        without a change. One that is gone is not read: it is about to be
        written."""
        now = self._clock()
        if now - self._looked_at < self._period_s:
            return None
        self._looked_at = now
        states = self._look()
        if states == self._states or None in states:
            return None
        try:
            found = read()
        except (ConfigError, OSError, ValueError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.error("what %s says stays what it was: %s", self._paths[0], error)
            return None
        self._states, self._trouble = states, ""
        _log.info("%s has changed", self._paths[0])
        return found

    def _look(self) -> tuple[_State, ...]:
        return tuple(_state(path) for path in self._paths)


def _state(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
