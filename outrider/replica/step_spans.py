"""Spans and metrics of a draft's or a target's steps."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

from opentelemetry.metrics import Meter
from opentelemetry.trace import SpanKind, Tracer

from outrider.interfaces.messages import Item, ProposalReply, Refused, Resync, RoundAnswer
from outrider.replica.step_request import StepFigures, StepRequest, Unfinished
from outrider.telemetry.metrics import PREFIX, ObservedCounter, times, watch
from outrider.telemetry.setup import read_sampled

ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_KINDS = ("answered", "resync", "refused", "continues", "waits")
SPAN_OF = {"draft": "outrider.draft", "target": "outrider.verify"}
_FIGURES = {
    "num_preemptions": ("num_preemptions", "Sequences that lost their pages to older sequences."),
    "num_prefill_chunks": ("num_prefill_chunks", "How often a prefix did not fit into a step."),
    "kv_cache_usage_perc": ("pages.usage", "Share of pages that running requests hold, 0..1."),
    "kv_cache_pages": ("pages.num_pages", "Pages of keys and values."),
    "kv_cache_pages_free": ("pages.num_free", "Pages that hold nothing."),
    "kv_cache_pages_evictable": ("pages.num_evictable", "Cached pages that no request uses."),
    "prefix_cache_queries": ("pages.prefix_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("pages.prefix_hits", "Tokens that the prefix cache held."),
}
"""Metric -> attribute of `StepFigures`, description. The metrics `kv_cache_...` are gauges, the
other metrics counters."""


class ObservedSteps:
    """Observes a replica's steps. Must be used on the event loop's thread."""

    def __init__(self, tracer: Tracer, meter: Meter, role: str) -> None:
        self._tracer, self._meter, self._name = tracer, meter, SPAN_OF[role]
        self._steps = ObservedCounter(meter, "steps", "Steps run.")
        self._crashes = ObservedCounter(meter, "step_crashes", "Steps that crashed.")
        self._stale = ObservedCounter(meter, "stale_items", "Items whose round was already over.")
        self._answers = ObservedCounter(
            meter, "step_answers", "Answers of steps, by kind.", "kind", _KINDS
        )
        self._queue = times(
            meter, PREFIX + "step_queue_time_seconds", "From an item's arrival to its step."
        )
        self._compute = times(meter, PREFIX + "step_time_seconds", "A step's time.")
        self._batch = meter.create_histogram(
            PREFIX + "step_items", "", "Items of a step.", explicit_bucket_boundaries_advisory=ITEMS
        )

    def watch(self, queued: Callable[[], int], figures: Callable[[], StepFigures]) -> None:
        """Exports the number of items that wait for a step, and the metrics of `_FIGURES`."""
        about = "Items that wait for a step."
        watch(self._meter, "num_items_waiting", lambda: {"": queued()}, about)
        for name, (attribute, about) in _FIGURES.items():
            read = partial(lambda value: {"": float(value(figures()))}, attrgetter(attribute))
            watch(self._meter, name, read, about, grows=not name.startswith("kv_cache"))

    def stale(self) -> None:
        """An item came for a round that is over."""
        self._stale.add(1)

    def crashed(self) -> None:
        """A step crashed."""
        self._crashes.add(1)

    def stepped(
        self,
        works: Sequence[StepRequest[Item]],
        answers: Sequence[RoundAnswer | Unfinished],
        start: float,
        end: float,
    ) -> None:
        """A step ran from `start` to `end` on the event loop's clock, and its answers were sent."""
        self._steps.add(1)
        self._compute.record(end - start)
        self._batch.record(len(works))
        for work, answer in zip(works, answers, strict=True):
            self._answers.add(1, _kind(answer))
            is_ahead = isinstance(answer, ProposalReply) and answer.assumed
            if isinstance(answer, Unfinished) or is_ahead:  # This is not the answer to a request.
                continue
            began = start if work.started_at is None else work.started_at
            self._queue.record(max(0.0, began - work.arrived_at))
            if work.item.head.traceparent:
                self._trace(work, answer, len(works), began, end)

    def _trace(
        self, work: StepRequest[Item], answer: RoundAnswer, num_items: int, start: float, end: float
    ) -> None:
        head = work.item.head
        context = read_sampled(head.traceparent)
        if context is None:
            return
        # The event loop's clock has no date. So each moment's date is computed from its age.
        now, now_ns = asyncio.get_running_loop().time(), time.time_ns()
        arrived_ns, start_ns, end_ns = (
            now_ns - int((now - moment) * 1e9) for moment in (work.arrived_at, start, end)
        )
        attributes: dict[str, str | int] = {
            "session.id": head.session_id,
            "outrider.round.index": head.round,
        }
        self._tracer.start_span(
            "outrider.queue", context=context, attributes=attributes, start_time=arrived_ns
        ).end(start_ns)
        attributes |= {"outrider.step_items": num_items, "outrider.answer": _kind(answer)}
        self._tracer.start_span(
            self._name,
            context=context,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=start_ns,
        ).end(end_ns)


def _kind(answer: RoundAnswer | Unfinished) -> str:
    if isinstance(answer, Unfinished):
        return answer.value
    return {Resync: "resync", Refused: "refused"}.get(type(answer), "answered")
