"""File locks, atomic writes, and files that are read again when they change."""

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import IO, Generic, TypeVar

from outrider.errors import ConfigError
from outrider.limits import FILE_BYTES_MAX, KEY_FILE_CHECK_MS

_log = logging.getLogger(__name__)

_State = tuple[int, int, int, int] | None
Contents = TypeVar("Contents")


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[IO[str]]:
    """Locks a file, which is created if missing. The lock lasts until this process and its children
    have closed the yielded file. Without `wait`, raises `BlockingIOError` if the lock is taken."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def read_file(path: Path) -> bytes:
    """Raises `ConfigError` if the file cannot be read, or is larger than `FILE_BYTES_MAX`."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes")
    return data


def without_links(path: Path) -> Path:
    """Follows symbolic links. Unlike `Path.resolve`, accepts links that form a loop."""
    return Path(os.path.realpath(path))


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Writes a file atomically. If `path` is a symbolic link, writes the link's target. If `mode`
    is None, an existing file keeps its mode, and a new file gets mode 0600."""
    path = without_links(path)
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


class FileWatch(Generic[Contents]):
    """Parsed contents of files, which are read again after a file has changed."""

    def __init__(self, paths: Sequence[Path | None], read: Callable[[], Contents]) -> None:
        """`read` returns the parsed contents of `paths`. The constructor raises the errors of
        `read`. Later, files are checked for changes at most every `KEY_FILE_CHECK_MS`."""
        self._paths = [path for path in paths if path is not None]
        self._read = read
        self._checked_at = monotonic()
        self._states = self._read_states()
        self._contents = read()
        self._error = ""

    def current(self) -> Contents:
        """Returns the contents. Reads them again if a file has changed and no file is missing. If
        `read` fails, logs the error once, keeps the old contents, and retries at the next check."""
        now = monotonic()
        if now - self._checked_at < KEY_FILE_CHECK_MS / 1e3:
            return self._contents
        self._checked_at = now
        states = self._read_states()
        if states != self._states and None not in states:
            try:
                self._contents = self._read()
                self._states, self._error = states, ""
                _log.info("%s has changed", self._paths[0])
            except (ConfigError, OSError, ValueError) as error:
                if str(error) != self._error:
                    self._error = str(error)
                    _log.error("keeping the former contents of %s: %s", self._paths[0], error)
        return self._contents

    def _read_states(self) -> tuple[_State, ...]:
        return tuple(_state(path) for path in self._paths)


def _state(path: Path) -> _State:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
