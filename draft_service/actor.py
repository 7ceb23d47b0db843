"""The Ray actor that hosts a draft: its drafter, its service and its gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.config import DraftConfig
from outrider.engine.tensor_parallel.rank_process import engine_of_a_replica, threads_of_a_rank
from outrider.errors import InvariantError
from outrider.limits import EAGLE_WINDOWS
from outrider.messages import DraftAnswer, DraftItem
from outrider.replica.host import ReplicaHost
from outrider.replica.process_setup import (
    build_eagle,
    build_grammars,
    build_lookup,
    cores_for,
    log_at,
    log_to,
    on_passing_thread,
    step_costs,
    use_threads,
)

if TYPE_CHECKING:
    from outrider.drafters.lookup import LookupDrafter
    from outrider.engine.interface import Engine
    from outrider.replica.step_request import StepObserver

    from .service import DraftService


class DraftActor(ReplicaHost[DraftItem, DraftAnswer]):
    """A draft in a process of its own."""

    async def start(self, config: DraftConfig, log_directory: str) -> str:
        """Loads the model or the head, and serves; the address that coordinators call.
        Raises `ConfigError`."""
        num_threads = threads_of_a_rank(config, cores_for("draft"), self.leadership)
        use_threads(num_threads)
        log_to(log_directory, config.log_name("draft"))
        log_at(config.log_level)
        observer = self.observe(config, "draft")
        engine = None
        model = config.drafter.model
        if model is not None and not model.reads_features:
            engine = await on_passing_thread(
                engine_of_a_replica, config, "draft", num_threads, self.leadership
            )
        # On another thread: the helpers of that one would slow down the steps that are measured.
        service = await on_passing_thread(_build, engine, config, observer)
        from outrider.transport.codec import DRAFT

        return await self.serve(service, DRAFT, config)


def _build(
    engine: Engine | None, config: DraftConfig, observer: StepObserver | None
) -> DraftService:
    from outrider.engine.threads import start_workers
    from outrider.replica.scheduler import ThreadExecutor

    from .service import DraftService

    if config.drafter.reads_target:
        return _build_eagle(config, build_lookup(config), observer)
    if engine is None:
        raise InvariantError("a draft replica has no model")
    executor = ThreadExecutor("draft-step", engine.take_step_seconds, start_workers)
    return DraftService.with_model(
        engine,
        executor,
        max_num_seqs=config.step_sessions,
        max_num_batched_tokens=config.max_num_batched_tokens,
        entries_max=config.support_entries,
        costs=executor.call(lambda: step_costs(engine, config, "draft")),
        observer=observer,
        grammars=build_grammars(config),
    )


def _build_eagle(
    config: DraftConfig, lookup: LookupDrafter | None, observer: StepObserver | None
) -> DraftService:
    from outrider.drafters.lookup import NgramConfig, NgramDrafter
    from outrider.engine.threads import start_workers
    from outrider.replica.scheduler import ThreadExecutor

    from .eagle_drafter import EagleDrafter
    from .service import DraftService

    eagle, info = build_eagle(config)
    fills_in = lookup or NgramDrafter(NgramConfig(config.ngram_min, config.ngram_max))
    drafter = EagleDrafter(
        eagle,
        fills_in,
        min_score=None if lookup is None else config.hybrid_min_score,
        sessions_max=EAGLE_WINDOWS * config.step_sessions,
        entries_max=config.support_entries,
    )
    executor = ThreadExecutor("draft-step", lambda: 0.0, start_workers)
    return DraftService.with_eagle(
        drafter,
        info,
        executor,
        max_num_seqs=config.step_sessions,
        observer=observer,
        grammars=build_grammars(config),
    )
