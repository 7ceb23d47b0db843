"""Log lines as JSON objects that carry the ids of the session and the trace they belong to."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

_identity: ContextVar[tuple[str, str]] = ContextVar("outrider_log_identity", default=("", ""))


def identify(session_id: str, trace_id: str = "") -> None:
    """Whatever this task, and tasks that it starts later, logs from now on is about a session.
    To be called in a task of the session's own."""
    _identity.set((session_id, trace_id))


def about(**fields: object) -> dict[str, Mapping[str, object]]:
    """The `extra` of a log call that adds these fields to its line."""
    return {"about": fields}


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, and where there are any
    `session_id`, `trace_id`, the fields of `about` and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        session_id, trace_id = _identity.get()
        if session_id:
            line["session_id"] = session_id
        if trace_id:
            line["trace_id"] = trace_id
        line.update(getattr(record, "about", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
