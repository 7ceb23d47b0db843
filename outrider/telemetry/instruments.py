"""Counters and histograms of a process, under the names that operators know (docs: README).

Counters that change every round are plain numbers which the SDK reads when it collects: adding to
one costs what adding to a number costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

PREFIX: Final = "outrider."
SECONDS: Final = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 15, 30,
    60, 120, 300,
)  # fmt: skip
"""Upper bounds of the buckets of a time, s."""
ITEMS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Counts:
    """Numbers that only grow, one for each value of one attribute."""

    def __init__(
        self,
        meter: Meter,
        name: str,
        unit: str,
        about: str,
        attribute: str = "",
        known: Iterable[str] = (),
    ) -> None:
        """Without an `attribute` there is one number, under the value "". `known` values are shown
        from the start, as 0: from what appears with its first event nobody sees that it grew."""
        self._attribute = attribute
        self._values: dict[str, float] = dict.fromkeys(known if attribute else ("",), 0.0)
        meter.create_observable_counter(PREFIX + name, [self._observe], unit, about)

    def add(self, amount: float, value: str = "") -> None:
        """For one thread."""
        self._values[value] = self._values.get(value, 0) + amount

    def _observe(self, options: CallbackOptions) -> Iterable[Observation]:
        attribute = self._attribute
        # A copy: the SDK collects on a thread of its own.
        for value, amount in list(self._values.items()):
            yield Observation(amount, {attribute: value} if attribute else None)


def times(meter: Meter, name: str, about: str) -> Histogram:
    """A histogram of seconds. `name` is whole, with its prefix."""
    return meter.create_histogram(name, "s", about, explicit_bucket_boundaries_advisory=SECONDS)


def watch(
    meter: Meter, name: str, about: str, read: Callable[[], float], grows: bool = False
) -> None:
    """A number that `read` gives, from any thread: a counter if it only grows, else a gauge."""

    def observe(options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(read())

    create = meter.create_observable_counter if grows else meter.create_observable_gauge
    create(PREFIX + name, [observe], "", about)
