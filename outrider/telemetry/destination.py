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
        values: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = part.partition("=")
            if key not in ("otlp", "prometheus") or key in values:
                raise _wrong(text)
            values[key] = value
        return cls(
            _endpoint(values["otlp"], text) if "otlp" in values else "",
            _port(values["prometheus"], text) if "prometheus" in values else None,
        )

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


def _wrong(text: str) -> SettingError:
    return SettingError("telemetry", f"{text!r} is wrong; it must be {_ALLOWED}")


def _endpoint(value: str, text: str) -> str:
    try:
        url = urlsplit(value)
        known = url.scheme in ("http", "https") and url.hostname and url.port
    except ValueError:
        raise _wrong(text) from None
    if not known:
        raise _wrong(text)
    return value


def _port(value: str, text: str) -> int:
    last = PROMETHEUS_PORT_MAX - len(ROLES) + 1
    if not (value.isascii() and value.isdecimal() and int(value) <= last):
        raise _wrong(text)
    return int(value)
