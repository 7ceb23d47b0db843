"""Metrics and spans of processes, either in memory or on the pages that Prometheus reads."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Self

import httpx
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from coordinator.routing.discovery import Registered
from outrider.config.deployment import CoordinatorConfig
from outrider.registry.registry import ROLES, Role
from outrider.replica.step_spans import ObservedSteps
from outrider.telemetry.request_spans import ObservedRequests
from outrider.telemetry.setup import Exports, start_exports
from tests.support.memory_registry import MemoryRegistry
from tests.support.session_links import described
from tests.support.stack import Stack, running_stack
from tests.support.toy_engine import ToyEngine

VOCAB = 64


@dataclass
class Page:
    """The samples of one scrape."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    @property
    def names(self) -> set[str]:
        """Names of all samples. A histogram has three names."""
        return {name for name, _ in self.samples}

    def labels(self, name: str) -> set[str]:
        return {key for found, labels in self.samples for key, _ in labels if found == name}

    def value(self, name: str, **labels: str) -> float:
        """The sum over all samples that have these labels."""
        found = [
            value
            for (sample, has), value in self.samples.items()
            if sample == name and labels.items() <= dict(has).items()
        ]
        assert found, (name, labels)
        return sum(found)


@dataclass
class Watched:
    stack: Stack
    registry: MemoryRegistry
    exports: dict[Role, Exports]

    async def page(self, role: Role) -> Page:
        async with httpx.AsyncClient() as http:
            page = await http.get(f"http://{self.exports[role].scrape.address}/metrics")
        return Page.parse(page.text)

    async def until(self, name: str, expected: float, **labels: str) -> Page:
        """The coordinator's page, once the metric has this value. Fails after 20 s."""
        async with asyncio.timeout(20):
            while True:
                page = await self.page("coordinator")
                if name in page.names and page.value(name, **labels) == expected:
                    return page
                await asyncio.sleep(0.05)


class Memory:
    """Metrics and spans of processes of these roles, in memory."""

    def __init__(self, *roles: Role) -> None:
        self.exporter = InMemorySpanExporter()
        self.readers = {role: InMemoryMetricReader() for role in roles}
        self.exports = {
            role: Exports(role, SimpleSpanProcessor(self.exporter), [reader])
            for role, reader in self.readers.items()
        }

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def points(self, role: Role) -> dict[str, list[Any]]:
        (resource,) = self.readers[role].get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: list(metric.data.data_points) for metric in scope.metrics}


def started_exports(telemetry: str) -> dict[Role, Exports]:
    """Exports of each role, as if each role had a process of its own."""
    return {role: start_exports(telemetry, role, "127.0.0.1") for role in ROLES}


def observers(
    exports: Mapping[Role, Exports], config: CoordinatorConfig
) -> dict[str, ObservedRequests | ObservedSteps]:
    """Options for `running_stack` that make each service report to the exports of its role."""
    coordinator, target, draft = (exports[role] for role in ROLES)
    return {
        "observation": ObservedRequests(coordinator.tracer, coordinator.meter, config),
        "target_observer": ObservedSteps(target.tracer, target.meter, "target"),
        "draft_observer": ObservedSteps(draft.tracer, draft.meter, "draft"),
    }


def unreachable(address: str) -> Any:
    return described(away_until=inf)


@asynccontextmanager
async def watched_stack(
    directory: Path, target_s: float = 0.0, **options: Any
) -> AsyncIterator[Watched]:
    """A stack whose services serve their metrics over HTTP. A pass of the target takes
    `target_s`. Replicas in the registry do not answer."""
    exports, registry = started_exports("prometheus=0"), MemoryRegistry()
    config = CoordinatorConfig(trace_every_rounds=0)
    target = ToyEngine(VOCAB, salt=1, max_model_len=256, pass_s=target_s)
    draft = options.pop("draft_engine", None) or ToyEngine(VOCAB, salt=2, max_model_len=256)
    try:
        async with running_stack(
            target,
            draft,
            directory,
            registered=Registered(registry, unreachable, unreachable),
            **observers(exports, config),
            **options,
        ) as stack:
            yield Watched(stack, registry, exports)
    finally:
        for made in exports.values():
            await made.close()
