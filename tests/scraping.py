"""What a live deployment of three services shows to Prometheus, after it has served requests."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory_registry import MemoryRegistry
from prometheus_client.parser import text_string_to_metric_families
from stack import Stack, running_stack
from toy_engine import ToyEngine

from outrider.config import CoordinatorConfig
from outrider.registry.registry import ROLES
from outrider.telemetry.request_spans import ObservedRequests
from outrider.telemetry.setup import Exports, start_exports
from outrider.telemetry.step_spans import ObservedSteps

VOCAB = 64


@dataclass
class Page:
    """The samples of one scrape."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str) -> Page:
        return cls({
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        })  # fmt: skip

    @property
    def names(self) -> set[str]:
        """Of all samples; a histogram has three."""
        return {name for name, _ in self.samples}

    def labels(self, name: str) -> set[str]:
        """Names of the labels of a sample's name."""
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
    """Three services, and what each shows."""

    stack: Stack
    registry: MemoryRegistry
    exports: dict[str, Exports]

    async def page(self, role: str) -> Page:
        scrape = self.exports[role].scrape
        assert scrape is not None

        def read() -> str:
            with urllib.request.urlopen(f"http://{scrape.address}/metrics", timeout=5) as page:
                return page.read().decode()

        return Page.parse(await asyncio.to_thread(read))

    async def until(self, name: str, expected: float, **labels: str) -> Page:
        """The coordinator's page, as soon as the metric has this value; fails after 20 s."""
        async with asyncio.timeout(20):
            while True:
                page = await self.page("coordinator")
                if name in page.names and page.value(name, **labels) == expected:
                    return page
                await asyncio.sleep(0.05)


@asynccontextmanager
async def watched_stack(directory: Path, **options: Any) -> AsyncIterator[Watched]:
    """Each service serves its metrics as if it had a process of its own."""
    started = {role: start_exports("prometheus=0", role, "127.0.0.1") for role in ROLES}
    exports = {role: made for role, made in started.items() if made is not None}
    coordinator = exports["coordinator"]
    registry = MemoryRegistry()
    target_engine = options.pop("target_engine", None)
    draft_engine = options.pop("draft_engine", None)
    try:
        async with running_stack(
            target_engine or ToyEngine(VOCAB, salt=1, max_model_len=256),
            draft_engine or ToyEngine(VOCAB, salt=2, max_model_len=256),
            directory,
            observation=ObservedRequests(
                coordinator.tracer,
                coordinator.meter,
                CoordinatorConfig(trace_first_rounds=1, trace_every_rounds=0),
            ),
            target_observer=ObservedSteps(
                exports["target"].tracer, exports["target"].meter, "target"
            ),
            draft_observer=ObservedSteps(exports["draft"].tracer, exports["draft"].meter, "draft"),
            registry=registry,
            **options,
        ) as stack:
            yield Watched(stack, registry, exports)
    finally:
        for made in exports.values():
            await made.close()
