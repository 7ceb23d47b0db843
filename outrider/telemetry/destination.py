"""Where traces and metrics go, as one setting says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from outrider.errors import SettingError

ROLES: Final = ("coordinator", "target", "draft")
"""Each process of a deployment serves Prometheus on a port of its own, in this order."""
_LAST: Final = 65_535 - len(ROLES) + 1
_ALLOWED: Final = "otlp=http://HOST:PORT, prometheus=PORT, or both with a comma between them"


@dataclass(frozen=True, slots=True)
class Destination:
    """What a `--telemetry` setting asks for."""

    otlp_endpoint: str = ""
    """`http://HOST:PORT`, or https, of a collector that takes OTLP over gRPC; empty = none."""
    prometheus_port: int | None = None
    """Where the coordinator serves its metrics; 0 = any port. The target takes the next port, the
    draft the one after it. None = nowhere."""

    @classmethod
    def parse(cls, text: str) -> Destination:
        """From `otlp=URL,prometheus=PORT`; "" is nowhere. Raises `SettingError`."""
        parts = [part.strip() for part in text.split(",") if part.strip()]
        values = {key: value for key, _, value in (part.partition("=") for part in parts)}
        endpoint, port = values.get("otlp"), values.get("prometheus")
        is_port = port is None or (port.isascii() and port.isdecimal() and int(port) <= _LAST)
        if (
            len(values) < len(parts)
            or not values.keys() <= {"otlp", "prometheus"}
            or not (endpoint is None or _is_endpoint(endpoint))
            or not is_port
        ):
            raise SettingError("telemetry", f"{text!r} is wrong; it must be {_ALLOWED}")
        return cls(endpoint or "", None if port is None else int(port))

    @property
    def nowhere(self) -> bool:
        """Whether telemetry is off."""
        return not self.otlp_endpoint and self.prometheus_port is None

    def port(self, role: str, slot: int = 0) -> int | None:
        """The port on which the process of a role serves its metrics. `slot` is its place among
        those of its role on one machine: each next one's ports begin behind those of the one
        before."""
        if not self.prometheus_port:
            return self.prometheus_port
        return self.prometheus_port + ROLES.index(role) + len(ROLES) * slot


def _is_endpoint(value: str) -> bool:
    try:
        url = urlsplit(value)
        return bool(url.scheme in ("http", "https") and url.hostname and url.port)
    except ValueError:
        return False
