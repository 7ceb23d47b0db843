"""What a replica's steps tell of pages, prefixes, and parts of prompts."""

from __future__ import annotations

from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rounds import Listener, ask, make_head, session_name
from stack import draft_without_model
from toy_engine import ToyEngine

from outrider.drafters.lookup import NgramDrafter
from outrider.messages import VerifyItem
from outrider.replica.scheduler import InlineExecutor
from outrider.telemetry.setup import Exports
from outrider.telemetry.step_spans import ObservedSteps
from outrider.transport.link import MemoryLink
from target_service.service import TargetService


class Meters:
    """An observer, and what it would export."""

    def __init__(self, role: str) -> None:
        self._reader = InMemoryMetricReader()
        exports = Exports(role, SimpleSpanProcessor(InMemorySpanExporter()), [self._reader])
        self.observer = ObservedSteps(exports.tracer, exports.meter, role)

    def values(self) -> dict[str, float]:
        """Sums by name without the prefix; of `step_answers` by kind."""
        data = self._reader.get_metrics_data()
        assert data is not None
        found: dict[str, float] = {}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                kind = (point.attributes or {}).get("kind", "")
                name = metric.name.removeprefix("outrider.") + (f"/{kind}" if kind else "")
                found[name] = found.get(name, 0) + getattr(point, "value", 0)
        return found


async def test_pages_prefixes_parts_and_preemptions_are_told() -> None:
    """Of 40 pages: session 1 takes 38 in parts; session 2 shares 2 of its 3 and takes one more.
    Then session 1 needs 3 more than are free, and session 2 gives way."""
    meters = Meters("target")
    engine = ToyEngine(max_model_len=160, num_pages=40)
    service = TargetService(
        engine,
        InlineExecutor(lambda: 0.0),
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    service.observe(meters.observer)
    link: MemoryLink[VerifyItem, object] = MemoryLink(service)
    listener = Listener(link)
    prompt = [(3 * i) % 8 for i in range(152)]
    first = await ask(link, listener, VerifyItem(make_head(prompt)))
    second = await ask(link, listener, VerifyItem(make_head(prompt[:9], session=2)))
    assert first.cached_length == 152
    assert second.cached_length == 9
    told = meters.values()
    assert told["num_prefill_chunks"] == told["step_answers/continues"] == 2
    assert told["prefix_cache_queries"] == 161
    assert told["prefix_cache_hits"] == 8
    assert told["kv_cache_pages"] == 40
    assert told["kv_cache_pages_free"] == 1
    assert told["kv_cache_usage_perc"] == 39 / 40
    longer = make_head([*prompt, *[1] * 8], 152, round_index=1)
    await ask(link, listener, VerifyItem(longer))
    told = meters.values()
    assert told["num_preemptions"] == 1
    assert told["kv_cache_pages_free"] + told["kv_cache_pages_evictable"] == 0
    link.release(session_name(1), 1)
    await ask(link, listener, VerifyItem(make_head([5], session=3)))
    told = meters.values()
    assert told["kv_cache_pages_evictable"] > 30
    await service.close()


async def test_a_drafter_without_pages_tells_of_none() -> None:
    meters = Meters("draft")
    service = draft_without_model(NgramDrafter(), InlineExecutor(lambda: 0.0), max_num_seqs=8)
    service.observe(meters.observer)
    assert not any(name.startswith(("kv_cache", "prefix_cache")) for name in meters.values())
    await service.close()
