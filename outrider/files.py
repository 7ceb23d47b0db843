"""Files: locks, which end with their process, writes in one step, and reads after changes."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Generic, TypeVar

from outrider.errors import ConfigError
from outrider.limits import FILE_BYTES_MAX, KEY_FILE_LOOK_MS

_log = logging.getLogger(__name__)

_State = tuple[int, int, int, int] | None
Found = TypeVar("Found")


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[IO[str]]:
    """Within, no other holder of this file's lock is; the file is made, and stays. Gives the open
    file, which holds the lock for as long as a process has it. Raises `BlockingIOError` where there
    is another holder and it is not waited for."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def read_file(path: Path) -> bytes:
    """The bytes of a small file. Raises `ConfigError`, also for one that is far too large."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes")
    return data


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


class FileWatch(Generic[Found]):
    """What is read from files, which are looked at again now and then, when it is asked for."""

    def __init__(
        self,
        paths: Sequence[Path | None],
        read: Callable[[], Found],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """They are looked at every `KEY_FILE_LOOK_MS` of `clock`, which counts seconds, at most.
        Raises what `read` does."""
        self._paths = [path for path in paths if path is not None]
        self._read = read
        self._clock = clock
        self._looked_at = clock()
        self._states = self._look()
        self._found = read()
        self._trouble = ""

    def current(self) -> Found:
        """What `read` returned last. Where it raises, which the log says once, that is what it was,
        and they are read again at the next look: a file may become readable without a change. One
        that is gone is not read: it is about to be written."""
        now = self._clock()
        if now - self._looked_at < KEY_FILE_LOOK_MS / 1e3:
            return self._found
        self._looked_at = now
        states = self._look()
        if states != self._states and None not in states:
            try:
                self._found = self._read()
                self._states, self._trouble = states, ""
                _log.info("%s has changed", self._paths[0])
            except (ConfigError, OSError, ValueError) as error:
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    _log.error("what %s says stays what it was: %s", self._paths[0], error)
        return self._found

    def _look(self) -> tuple[_State, ...]:
        return tuple(_state(path) for path in self._paths)


def _state(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
