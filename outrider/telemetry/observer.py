"""Events that a coordinator reports about its requests, and an observer that ignores them.

With telemetry, `ObservedRequests` handles the events. Without telemetry, OpenTelemetry is not
imported, and each event costs one empty call."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

Side = Literal["draft", "target"]
AuditOutcome = Literal["audited", "busy", "repeated", "failed"]
"""busy: not audited, because too many audits or sessions ran. repeated: not audited, because an
audited session had the same seed, and so the same random numbers."""


def _ignore(self: Any, *_: Any, **__: Any) -> None: ...


class RequestObserver:
    """Ignores the events of one request. The subclass `ObservedRequest` describes the events."""

    trace_id = ""  # 32 hexadecimal digits; empty without a trace

    def context(self, side: Side) -> str:
        """Returns the `traceparent` for a message to a draft or target."""
        return ""

    opened = round_began = asked = answered = decided = shown = _ignore
    count = finished = failed = _ignore


SILENT = RequestObserver()
Readings = Callable[[], Mapping[str, Mapping[str, float]]]
"""Returns a coordinator's load and health, as metric -> label value -> number."""


class Observation:
    """Returns observers that ignore all events."""

    def begin(self, *_: Any, **__: Any) -> RequestObserver:
        """Returns the observer of a new request."""
        return SILENT

    watch = audited = audit_ended = _ignore


UNOBSERVED = Observation()
