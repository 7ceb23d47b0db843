"""The Ray actor that hosts a draft: its drafter, its service and its gRPC server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outrider.config import DraftConfig
from outrider.hosting import available_cores, build_engine, log_to, step_costs, use_threads
from outrider.messages import DraftAnswer, DraftItem
from outrider.replica_host import ReplicaHost

if TYPE_CHECKING:
    from outrider.work import StepObserver

    from .service import DraftService


class DraftActor(ReplicaHost[DraftItem, DraftAnswer]):
    """A draft in a process of its own."""

    async def start(self, config: DraftConfig, log_directory: str) -> str:
        """Loads the model, if there is one, and serves; the address that coordinators call.
        Raises `ConfigError`."""
        num_threads = config.num_threads or _default_threads(config)
        use_threads(num_threads)
        log_to(log_directory, "draft")
        observer = self.observe(config, "draft")
        service = await asyncio.to_thread(_build, config, num_threads, observer)
        from .servicer import DraftServicer

        return await self.serve(service, DraftServicer, config.host, config.port)


def _default_threads(config: DraftConfig) -> int:
    """Half of the cores for a model: the target has all of them, and waits while the draft runs."""
    return 1 if config.is_ngram else max(1, available_cores() // 2)


def _build(config: DraftConfig, num_threads: int, observer: StepObserver | None) -> DraftService:
    from outrider.engine.executor import ThreadExecutor
    from outrider.engine.workers import start_workers

    from .service import DraftService

    if config.is_ngram:
        from outrider.drafting.ngram import NgramConfig, NgramDrafter

        drafter = NgramDrafter(NgramConfig(config.ngram_min, config.ngram_max))
        lookup = ThreadExecutor("draft-step", lambda: 0.0)
        return DraftService.without_model(
            config.model, drafter, lookup, max_num_seqs=config.max_num_seqs, observer=observer
        )
    engine = build_engine(config, "draft", num_threads)
    executor = ThreadExecutor("draft-step", engine.take_step_seconds, start_workers)
    return DraftService.with_model(
        engine,
        executor,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        entries_max=config.support_entries,
        costs=executor.call(lambda: step_costs(engine, config, "draft")),
        observer=observer,
    )
