"""What a run of the full length must have shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FULL_MINUTES: Final = 10.0
"""Shorter runs have too few requests for a 99th percentile."""
KILLS_AND_STOPS_MIN: Final = 60
ADDED_S_MAX: Final = {"kill draft": 0.3, "kill target": 3.0, "kill coordinator": 4.0}
"""What each adds to the 99th percentile of the waits for tokens, where there is a spare."""


def missed(report: Mapping[str, Any]) -> list[str]:
    """The aims that were missed. One that was not measured is."""
    found = [
        fault for fault, added_s_max in ADDED_S_MAX.items()
        if fault not in report["gaps"] or report["gaps"][fault]["added_p99_s"] > added_s_max
    ]  # fmt: skip
    if report["num_kills_and_stops"] < KILLS_AND_STOPS_MIN:
        found.append("kills and stops")
    return found
