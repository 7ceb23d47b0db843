"""How long requests by HTTP take, as OpenTelemetry's conventions name it."""

from __future__ import annotations

from typing import Final

from opentelemetry.metrics import Meter

from outrider.telemetry.metrics import times

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_OTHER: Final = "_OTHER"
"""A method that nobody knows: its name is the caller's choice, and a label must not be."""


class HttpTimes:
    """Of one server, by route and status."""

    def __init__(self, meter: Meter) -> None:
        self._times = times(
            meter, "http.server.request.duration", "From a request's arrival to its last byte."
        )

    def add(self, seconds: float, method: str, scheme: str, route: str, status: int | None) -> None:
        """A request is over. `route` is its pattern, empty where none fits; there is no status
        where the caller was gone before it."""
        found: dict[str, str | int] = {
            "http.request.method": method if method in _METHODS else _OTHER,
            "url.scheme": scheme,
        }
        if route:
            found["http.route"] = route
        if status is not None:
            found["http.response.status_code"] = status
            if status >= 500:
                found["error.type"] = str(status)
        self._times.record(seconds, found)
