"""The spans and numbers of a draft's or a target's steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.metrics import Meter
from opentelemetry.trace import SpanKind, Tracer

from outrider.messages import Refused, Resync
from outrider.stepping import Work
from outrider.telemetry.context import read_sampled
from outrider.telemetry.instruments import ITEMS, PREFIX, Counts, times, watch

SPAN_OF = {"draft": "outrider.draft", "target": "outrider.verify"}


class ObservedSteps:
    """See `outrider.stepping.StepObserver`."""

    def __init__(self, tracer: Tracer, meter: Meter, role: str) -> None:
        """`role` is `draft` or `target`."""
        self._tracer = tracer
        self._meter = meter
        self._name = SPAN_OF[role]
        self._steps = Counts(meter, "steps", "", "Steps run.")
        self._crashes = Counts(meter, "step_crashes", "", "Steps that crashed.")
        self._stale = Counts(meter, "stale_items", "", "Items of a round that was over.")
        self._answers = Counts(meter, "step_answers", "", "Answers of steps, by kind.", "kind")
        self._queue = times(
            meter, PREFIX + "step_queue_time_seconds", "From an item's arrival to its step."
        )
        self._compute = times(meter, PREFIX + "step_time_seconds", "A step's time.")
        self._batch = meter.create_histogram(
            PREFIX + "step_items", "", "Items of a step.", explicit_bucket_boundaries_advisory=ITEMS
        )

    def watch_queue(self, queued: Callable[[], int]) -> None:
        """Shows how many items wait for a step."""
        watch(self._meter, "num_items_waiting", "Items that wait for a step.", queued)

    def stale(self) -> None:
        """An item came for a round that is over."""
        self._stale.add(1)

    def crashed(self) -> None:
        """A step crashed."""
        self._crashes.add(1)

    def stepped(
        self, works: Sequence[Work[Any, Any]], answers: Sequence[Any], start: float, end: float
    ) -> None:
        """A step has run, from `start` to `end` (loop time); its answers are sent."""
        self._steps.add(1)
        self._compute.record(end - start)
        self._batch.record(len(works))
        for work, answer in zip(works, answers, strict=True):
            self._answers.add(1, _kind(answer))
            self._queue.record(max(0.0, start - work.arrived_at))
            if work.item.head.traceparent:
                self._trace(work, answer, len(works), start, end)

    def _trace(
        self, work: Work[Any, Any], answer: Any, num_items: int, start: float, end: float
    ) -> None:
        head = work.item.head
        context = read_sampled(head.traceparent)
        if context is None:
            return
        # Loop time has no date; what has passed since is the same on every clock.
        now, now_ns = asyncio.get_running_loop().time(), time.time_ns()
        arrived_ns, start_ns, end_ns = (
            now_ns - int((now - moment) * 1e9) for moment in (work.arrived_at, start, end)
        )
        attributes = {"session.id": head.session_id, "outrider.round.index": head.round}
        self._tracer.start_span(
            "outrider.queue", context=context, attributes=attributes, start_time=arrived_ns
        ).end(start_ns)
        self._tracer.start_span(
            self._name,
            context=context,
            kind=SpanKind.SERVER,
            attributes={
                **attributes,
                "outrider.step_items": num_items,
                "outrider.answer": _kind(answer),
            },
            start_time=start_ns,
        ).end(end_ns)


def _kind(answer: Any) -> str:
    if isinstance(answer, Resync):
        return "resync"
    return "refused" if isinstance(answer, Refused) else "answered"
