"""How a coordinator stands, as numbers that are read when somebody collects them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from outrider.telemetry.instruments import PREFIX
from outrider.telemetry.observer import Standing


class _Read(Protocol):
    def __call__(self, standing: Standing) -> Mapping[str, float]: ...


def _when_known(known: bool | None) -> Mapping[str, float]:
    """1 or 0; nothing before it is known."""
    return {} if known is None else {"": float(known)}


_GAUGES: Final[dict[str, tuple[str, str, _Read]]] = {
    "target_available": (
        "Whether a target answers: without one no session makes progress. 1 or 0.",
        "",
        lambda standing: _when_known(standing.target_available),
    ),
    "store_available": (
        "Whether the session store answers: while it does not, sessions pause. 1 or 0.",
        "",
        lambda standing: _when_known(standing.store_available),
    ),
    "replicas_wanted": (
        "Replicas that the deployment is to have; the same at every coordinator.",
        "role",
        lambda standing: standing.replicas_wanted,
    ),
    "replicas_present": (
        "Replicas that announce themselves and do not leave; the same at every coordinator.",
        "role",
        lambda standing: standing.replicas_present,
    ),
}
"""By name: what it says, the attribute that tells its values apart, and where it is read."""
_COUNTERS: Final[dict[str, tuple[str, str, _Read]]] = {
    "wire_bytes_sent": (
        "Bytes of frames to replicas.",
        "side",
        lambda standing: standing.bytes_sent,
    ),
    "wire_bytes_received": (
        "Bytes of frames from replicas.",
        "side",
        lambda standing: standing.bytes_received,
    ),
    "stale_answers": (
        "Proposals and verdicts that came when their round or session was over.",
        "side",
        lambda standing: standing.stale_answers,
    ),
}


def watch_standing(meter: Meter, standing: Standing) -> None:
    """Shows all of it from now on."""
    for name, (about, attribute, read) in _GAUGES.items():
        callback = _callback(standing, attribute, read)
        meter.create_observable_gauge(PREFIX + name, [callback], "", about)
    for name, (about, attribute, read) in _COUNTERS.items():
        callback = _callback(standing, attribute, read)
        meter.create_observable_counter(PREFIX + name, [callback], "", about)


def _callback(
    standing: Standing, attribute: str, read: _Read
) -> Callable[[CallbackOptions], list[Observation]]:
    def observe(options: CallbackOptions) -> list[Observation]:
        return [
            Observation(value, {attribute: key} if attribute else None)
            for key, value in read(standing).items()
        ]

    return observe
