"""Where traces and metrics go, as one setting says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from outrider.errors import SettingError

PROMETHEUS_PORT_MAX: Final = 65_535
ROLES: Final = ("coordinator", "target", "draft")
"""Each process of a deployment serves Prometheus on a port of its own, in this order."""
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
        if (
            len(values) < len(parts)
            or not values.keys() <= {"otlp", "prometheus"}
            or (endpoint is not None and not _is_endpoint(endpoint))
            or (port is not None and not _is_port(port))
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


def _is_port(value: str) -> bool:
    last = PROMETHEUS_PORT_MAX - len(ROLES) + 1
    return value.isascii() and value.isdecimal() and int(value) <= last
