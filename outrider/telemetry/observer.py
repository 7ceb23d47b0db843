"""Events that a coordinator reports about its requests, and an observer that ignores them.

With telemetry, `ObservedRequests` handles the events. Without telemetry, each event costs one empty
call, and OpenTelemetry is not imported."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

Side = Literal["draft", "target"]
AuditOutcome = Literal["audited", "busy", "repeated", "failed"]
"""What became of a session chosen for an audit. Busy: too many audits or sessions ran. Repeated: an
earlier session had the same seed, so the tokens of the two are not independent."""


def _ignore(self: Any, *_: Any, **__: Any) -> None:
    pass


class RequestObserver:
    """Observes one request. See `ObservedRequest` for the calls."""

    __slots__ = ()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty without a trace."""
        return ""

    def context(self, side: Side) -> str:
        """The `traceparent` of a message to a side."""
        return ""

    opened = round_began = asked = answered = decided = shown = _ignore
    count = finished = failed = _ignore


SILENT = RequestObserver()


Readings = Callable[[], Mapping[str, Mapping[str, float]]]
"""A coordinator's load and health: numbers by metric and label value."""


class Observation:
    """Makes an observer for each request. This one observes nothing. See `ObservedRequests`."""

    listens: ClassVar[bool] = False

    def begin(self, *_: Any, **__: Any) -> RequestObserver:
        """Begins to observe a request."""
        return SILENT

    watch = audited = audit_ended = _ignore


UNOBSERVED = Observation()
