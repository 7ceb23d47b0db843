"""The destinations of traces and metrics, as the setting `telemetry` names them."""

import re
from dataclasses import dataclass
from typing import Self

from outrider.errors import SettingError
from outrider.registry.registry import ROLES, Role

_LAST = 65_535 - len(ROLES) + 1
_PART = re.compile(
    r"otlp=https?://(?:[^\s@]*@)?(?:\[[\da-fA-F:]+\]|[\w.-]+):\d+(?:/\S*)?|prometheus=[0-9]{1,5}"
)
_ALLOWED = "otlp=http://HOST:PORT, prometheus=PORT, or both with a comma between them"


@dataclass(frozen=True, slots=True)
class Destination:
    """The parsed setting `telemetry`."""

    otlp_endpoint: str = ""
    """URL (http or https) of a collector that takes OTLP over gRPC; empty = no collector."""
    prometheus_port: int | None = None
    """Port of the coordinator's metrics. The other roles use the next ports, in the order of
    `ROLES`. 0 = any free port, None = no metrics for Prometheus."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `otlp=URL,prometheus=PORT`, one of them, or nothing. Raises `SettingError`."""
        found: dict[str, str] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            key, _, value = part.partition("=")
            if (
                _PART.fullmatch(part) is None
                or key in found
                or (key == "prometheus" and int(value) > _LAST)
            ):
                raise SettingError("telemetry", f"{text!r} is wrong; it must be {_ALLOWED}")
            found[key] = value
        port = found.get("prometheus")
        return cls(found.get("otlp", ""), None if port is None else int(port))

    def port(self, role: Role, slot: int = 0) -> int | None:
        """Returns the port for the metrics of a process. `slot` numbers the processes of one role
        on a machine. Each slot has `len(ROLES)` ports."""
        if not self.prometheus_port:
            return self.prometheus_port
        return self.prometheus_port + ROLES.index(role) + len(ROLES) * slot
