"""How much a replica's steps have lately had to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.decayed_average import DecayedSums
from outrider.registry.load import WINDOW_S, Figures
from outrider.replica.step_request import StepFigures, StepRequest


class StepLoad:
    """Hears of every step of a replica."""

    def __init__(self, max_batch: int, now: float) -> None:
        """`max_batch` items share a step at most; `now` and later times are the loop's."""
        self._max_batch = max_batch
        self._sums = DecayedSums(WINDOW_S, now)

    def stepped(self, works: Sequence[StepRequest[Any, Any]], start: float, end: float) -> None:
        """A step has run from `start` to `end`, with these items."""
        began = [work.started_at - work.arrived_at for work in works if work.started_at == start]
        self._sums.add(
            end,
            {
                "steps": 1.0,
                "seconds": end - start,
                "places": min(1.0, len(works) / self._max_batch),
                "began": len(began),
                "waited": sum(began),
            },
        )

    def figures(self, now: float, step_figures: StepFigures) -> Figures:
        """What that comes to; `step_figures` are the worker's."""
        sums, pages = self._sums, step_figures.pages
        step_s = sums.mean(now, "seconds", "steps")
        waited_s = sums.mean(now, "waited", "began")
        return Figures(
            busy=min(1.0, sums.rate(now, "seconds")),
            fill=sums.mean(now, "places", "steps"),
            step_ms=None if step_s is None else step_s * 1e3,
            queue_steps=waited_s / step_s if waited_s is not None and step_s else None,
            kv_usage=None if pages is None else pages.usage,
        )
