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

    otlp_endpoint: str = ""  # URL of a collector that takes OTLP over gRPC; empty = no collector
    prometheus_port: int | None = None
    """Port of the coordinator's metrics. The other roles use the next ports, in the order of
    `ROLES`. 0 = any free port, None = no metrics for Prometheus."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `otlp=URL`, `prometheus=PORT`, both with a comma, or "". Raises `SettingError`."""
        parts = [part.strip() for part in text.split(",") if part.strip()]
        destinations = dict(part.split("=", 1) for part in parts if _PART.fullmatch(part))
        port = int(destinations["prometheus"]) if "prometheus" in destinations else None
        if len(destinations) < len(parts) or (port or 0) > _LAST:
            raise SettingError("telemetry", f"{text!r} is wrong; it must be {_ALLOWED}")
        return cls(destinations.get("otlp", ""), port)

    def port(self, role: Role, index: int = 0) -> int | None:
        """Returns the port for a process's metrics. `index` is the process's index among the
        processes of this role on the machine."""
        if not self.prometheus_port:
            return self.prometheus_port
        return self.prometheus_port + ROLES.index(role) + len(ROLES) * index
