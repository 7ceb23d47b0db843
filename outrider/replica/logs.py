"""The log of a replica's process."""

from __future__ import annotations

import logging
from pathlib import Path

from outrider.foundation.logs import JsonLines, LogFile, make_room

STANDARD_ERROR = "-"  # as a log directory: log to standard error


PACKAGES = ("coordinator", "draft_service", "outrider", "target_service")


def log_to(directory: str, role: str, level: str = "info") -> None:
    """Logs JSON lines to `<directory>/<role>.log`, whose size is bounded. Logs to standard error if
    `directory` is `STANDARD_ERROR`. Logs nothing if `directory` is empty."""
    handler: logging.Handler = logging.NullHandler()
    if directory == STANDARD_ERROR:
        handler = logging.StreamHandler()
    elif directory:
        make_room(Path(directory))
        handler = LogFile(Path(directory) / f"{role}.log")
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    log_at(level)


def log_at(level: str) -> None:
    """Logs messages of Outrider's packages from this level on, and of libraries from INFO on."""
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
