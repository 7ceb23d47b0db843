"""What a coordinator tells of its requests, and the observer that ignores it.

The calls are made in every case; `ObservedRequests` overrides them where telemetry is on. Where it
is off, each costs a call, and OpenTelemetry is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

Side = Literal["draft", "target"]
AuditOutcome = Literal["audited", "busy", "repeated", "failed"]
"""What comes of a session that is chosen for an audit. Busy: too many audits run, or all seats are
taken. Repeated: the session's seed is an earlier session's, so its tokens are not independent."""


def _ignore(self: Any, *_: Any, **__: Any) -> None:
    pass


class RequestObserver:
    """Follows one request, from its arrival to its end. See `ObservedRequest` for the calls."""

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
"""What a coordinator knows of its load and its surroundings: numbers by metric and the value of
its label."""


class Observation:
    """Gives every request its observer. This one observes nothing. See `ObservedRequests`."""

    listens: ClassVar[bool] = False
    """Whether anything is observed."""

    def begin(self, *_: Any, **__: Any) -> RequestObserver:
        """A request has come, for a model, perhaps as part of its caller's trace."""
        return SILENT

    watch = audited = audit_ended = _ignore


UNOBSERVED = Observation()
