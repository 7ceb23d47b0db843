"""Events that a coordinator reports about its requests, and an observer that ignores them.

With telemetry, `ObservedRequests` handles the events. Without telemetry, each event costs one empty
call, and OpenTelemetry is not imported."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

Side = Literal["draft", "target"]
AuditOutcome = Literal["audited", "busy", "repeated", "failed"]
"""The outcome of an audit. busy: no audit, because too many audits or sessions ran. repeated: no
audit, because the session's tokens depend on those of an earlier session with the same seed."""


def _ignore(self: Any, *_: Any, **__: Any) -> None:
    pass


class RequestObserver:
    """Ignores the events of one request. `ObservedRequest` describes them."""

    __slots__ = ()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty without a trace."""
        return ""

    def context(self, side: Side) -> str:
        """The `traceparent` of a message to a draft or target."""
        return ""

    opened = round_began = asked = answered = decided = shown = _ignore
    count = finished = failed = _ignore


SILENT = RequestObserver()


Readings = Callable[[], Mapping[str, Mapping[str, float]]]
"""Returns a coordinator's load and health: numbers by metric and label value."""


class Observation:
    """Makes an observer for each request, which ignores all events. The subclass `ObservedRequests`
    makes observers that handle the events."""

    def begin(self, *_: Any, **__: Any) -> RequestObserver:
        """Begins to observe a request."""
        return SILENT

    watch = audited = audit_ended = _ignore


UNOBSERVED = Observation()
