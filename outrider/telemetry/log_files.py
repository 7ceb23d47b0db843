"""Log files of bounded size, in directories of bounded size: they share disks with what matters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from outrider.limits import LOG_BYTES_MAX, LOG_DIRECTORY_BYTES_MAX, LOG_FILES_KEPT


class LogFile(RotatingFileHandler):
    """A file of at most `LOG_BYTES_MAX` (a line that is longer goes over it), and `LOG_FILES_KEPT`
    older ones beside it, by `.1` and so on."""

    def __init__(self, path: Path, descriptors: Sequence[int] = ()) -> None:
        """Goes on with a file that is there. What this process writes to `descriptors` goes there
        as well, and follows it."""
        super().__init__(path, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, encoding="utf-8")
        self._descriptors = descriptors

    def doRollover(self) -> None:  # noqa: N802 (the library's name)
        """See `RotatingFileHandler.doRollover`."""
        super().doRollover()
        if self.stream is not None:
            for descriptor in self._descriptors:
                os.dup2(self.stream.fileno(), descriptor)


def make_room(directory: Path, bytes_max: int = LOG_DIRECTORY_BYTES_MAX) -> None:
    """Removes the log files of a directory that were written to least recently, until the rest have
    at most so many bytes together with a new one: each replica that comes has files of its own."""
    found = []
    for path in directory.glob("*.log*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    num_bytes = LOG_BYTES_MAX * (1 + LOG_FILES_KEPT) + sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if num_bytes <= bytes_max:
            return
        path.unlink(missing_ok=True)
        num_bytes -= size


def rotate(path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Moves a file aside that has grown beyond this, over the one that was moved before; for a
    program that opens its log anew for each line, as Redis does."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > bytes_max:
            path.replace(path.with_name(f"{path.name}.1"))
