"""Log lines in JSON with session and trace ids, and size limits of log files and directories."""

import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from outrider.limits import LOG_BYTES_MAX, LOG_DIRECTORY_BYTES_MAX, LOG_FILES_KEPT

_identity: ContextVar[tuple[str, str]] = ContextVar("outrider_log_identity", default=("", ""))


def identify(session_id: str, trace_id: str = "") -> None:
    """Adds the ids to all later log lines of the current task and of the tasks that it starts. The
    current task must serve only this session."""
    _identity.set((session_id, trace_id))


def about(**fields: object) -> dict[str, Mapping[str, object]]:
    """Returns the `extra` of a log call that adds these fields to the log line."""
    return {"about": fields}


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        ids = zip(("session_id", "trace_id"), _identity.get(), strict=True)
        line |= {key: value for key, value in ids if value}
        line |= getattr(record, "about", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class LogFile(RotatingFileHandler):
    """A log file of at most `LOG_BYTES_MAX`, unless a single line is longer. Keeps `LOG_FILES_KEPT`
    rotated files, whose names end with `.1`, `.2` and so on."""

    def __init__(self, path: Path, descriptors: Sequence[int] = ()) -> None:
        """After `take_over`, the file descriptors write to the log file, also after rotations."""
        super().__init__(path, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, encoding="utf-8")
        self._descriptors = descriptors

    def _open(self) -> TextIOWrapper:
        """Opens the file with mode 0600, because the file may contain prompts. Locks the file, so
        that `make_room` does not remove the file of a running process."""
        while True:
            file = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            stream = open(file, "a", encoding=self.encoding, errors=self.errors)  # noqa: SIM115
            with suppress(OSError):  # Some network file systems have no locks.
                fcntl.flock(stream, fcntl.LOCK_SH)
            if os.path.exists(self.baseFilename):
                return stream
            stream.close()  # `make_room` removed the file before the lock was taken.

    def doRollover(self) -> None:  # noqa: N802 (the library's name)
        super().doRollover()
        self.take_over()

    def take_over(self) -> None:
        if self.stream is not None:
            for descriptor in self._descriptors:
                os.dup2(self.stream.fileno(), descriptor)


def make_room(directory: Path) -> None:
    """Removes log files, so that the directory stays within `LOG_DIRECTORY_BYTES_MAX` even if one
    more replica fills all its log files. Removes rotated files first, then files of ended
    processes. Within each kind, begins with the oldest file. Never removes the current file of a
    running process."""
    files = []
    for path in directory.glob("*.log*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            files.append((path.suffix == ".log", status.st_mtime, status.st_size, path))
    num_bytes = LOG_BYTES_MAX * (1 + LOG_FILES_KEPT) + sum(size for _, _, size, _ in files)
    for is_current, _, size, path in sorted(files):
        if num_bytes <= LOG_DIRECTORY_BYTES_MAX:
            return
        if not (is_current and _is_open(path)):
            path.unlink(missing_ok=True)
            num_bytes -= size


def _is_open(path: Path) -> bool:
    """Whether a `LogFile` writes to the path; True if unknown."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


def rotate(path: Path) -> None:
    """Renames a file of more than `LOG_BYTES_MAX` to `NAME.1`. Works only for programs that open
    their log again for each line, such as Redis."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(f"{path.name}.1"))
