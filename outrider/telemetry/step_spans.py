"""The spans and numbers of a draft's or a target's steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.metrics import Meter
from opentelemetry.trace import SpanKind, Tracer

from outrider.errors import InvariantError
from outrider.messages import ProposalReply, Refused, Resync
from outrider.replica.step_request import StepFigures, StepRequest, Unfinished
from outrider.telemetry.context import read_sampled
from outrider.telemetry.instruments import ITEMS, PREFIX, Counts, times, watch

if TYPE_CHECKING:
    from outrider.engine.interface import PageCounts

_KINDS: Final = ("answered", "resync", "refused", "continues", "waits")
SPAN_OF = {"draft": "outrider.draft", "target": "outrider.verify"}


_FIGURES: Final[dict[str, tuple[str, Callable[[StepFigures], float]]]] = {
    "num_preemptions": (
        "Sequences whose pages were taken for an older one.",
        lambda figures: figures.num_preemptions,
    ),
    "num_prefill_chunks": (
        "Parts of prefixes that were run on their own.",
        lambda figures: figures.num_prefill_chunks,
    ),
}
_PAGES: Final[dict[str, tuple[str, Callable[[PageCounts], float]]]] = {
    "kv_cache_usage_perc": (
        "Share of the pages that somebody waits for the contents of, 0..1.",
        lambda pages: pages.usage,
    ),
    "kv_cache_pages": ("Pages of keys and values.", lambda pages: pages.num_pages),
    "kv_cache_pages_free": ("Pages that hold nothing.", lambda pages: pages.num_free),
    "kv_cache_pages_evictable": (
        "Pages that hold what nobody waits for.",
        lambda pages: pages.num_evictable,
    ),
    "prefix_cache_queries": (
        "Tokens looked up in the prefix cache.",
        lambda pages: pages.prefix_queries,
    ),
    "prefix_cache_hits": ("Tokens of them found.", lambda pages: pages.prefix_hits),
}


class ObservedSteps:
    """See `outrider.replica.step_request.StepObserver`."""

    def __init__(self, tracer: Tracer, meter: Meter, role: str) -> None:
        """`role` is `draft` or `target`."""
        self._tracer = tracer
        self._meter = meter
        self._name = SPAN_OF[role]
        self._steps = Counts(meter, "steps", "", "Steps run.")
        self._crashes = Counts(meter, "step_crashes", "", "Steps that crashed.")
        self._stale = Counts(meter, "stale_items", "", "Items of a round that was over.")
        self._answers = Counts(
            meter, "step_answers", "", "Answers of steps, by kind.", "kind", _KINDS
        )
        self._queue = times(
            meter, PREFIX + "step_queue_time_seconds", "From an item's arrival to its step."
        )
        self._compute = times(meter, PREFIX + "step_time_seconds", "A step's time.")
        self._batch = meter.create_histogram(
            PREFIX + "step_items", "", "Items of a step.", explicit_bucket_boundaries_advisory=ITEMS
        )

    def watch(self, queued: Callable[[], int], figures: Callable[[], StepFigures]) -> None:
        """Shows how many items wait for a step, and what the steps have come to."""
        watch(self._meter, "num_items_waiting", "Items that wait for a step.", queued)
        for name, (about, read) in _FIGURES.items():
            watch(self._meter, name, about, partial(_read, read, figures), grows=True)
        if figures().pages is None:
            return
        for name, (about, read_pages) in _PAGES.items():
            grows = name.startswith("prefix_cache")
            watch(self._meter, name, about, partial(_read_pages, read_pages, figures), grows)

    def stale(self) -> None:
        """An item came for a round that is over."""
        self._stale.add(1)

    def crashed(self) -> None:
        """A step crashed."""
        self._crashes.add(1)

    def stepped(
        self,
        works: Sequence[StepRequest[Any, Any]],
        answers: Sequence[Any],
        start: float,
        end: float,
    ) -> None:
        """A step has run, from `start` to `end` (loop time); its answers are sent."""
        self._steps.add(1)
        self._compute.record(end - start)
        self._batch.record(len(works))
        for work, answer in zip(works, answers, strict=True):
            self._answers.add(1, _kind(answer))
            if isinstance(answer, Unfinished) or _is_pushed(answer):
                continue
            began = start if work.started_at is None else work.started_at
            self._queue.record(max(0.0, began - work.arrived_at))
            if work.item.head.traceparent:
                self._trace(work, answer, len(works), began, end)

    def _trace(
        self, work: StepRequest[Any, Any], answer: Any, num_items: int, start: float, end: float
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


def _is_pushed(answer: Any) -> bool:
    """Whether nobody has asked for it yet."""
    return isinstance(answer, ProposalReply) and bool(answer.assumed)


def _kind(answer: Any) -> str:
    if isinstance(answer, Resync):
        return "resync"
    if isinstance(answer, Unfinished):
        return answer.value
    return "refused" if isinstance(answer, Refused) else "answered"


def _read(read: Callable[[StepFigures], float], figures: Callable[[], StepFigures]) -> float:
    return read(figures())


def _read_pages(read: Callable[[PageCounts], float], figures: Callable[[], StepFigures]) -> float:
    pages = figures().pages
    if pages is None:
        raise InvariantError("an engine has lost its pages")
    return read(pages)
