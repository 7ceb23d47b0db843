"""The Ray actor that hosts a target: its engine, its service and its gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.config import TargetConfig
from outrider.engine.tensor_parallel.rank_process import engine_of_a_replica, threads_of_a_rank
from outrider.messages import VerifyAnswer, VerifyItem
from outrider.replica.host import ReplicaHost
from outrider.replica.process_setup import (
    build_grammars,
    cores_for,
    log_at,
    log_to,
    on_passing_thread,
    step_costs,
    use_threads,
)

if TYPE_CHECKING:
    from outrider.engine.interface import Engine
    from outrider.replica.step_request import StepObserver

    from .self_drafting import SelfDrafter
    from .service import TargetService


class TargetActor(ReplicaHost[VerifyItem, VerifyAnswer]):
    """A target in a process of its own."""

    async def start(self, config: TargetConfig, log_directory: str) -> str:
        """Loads the model and serves; the address that coordinators call. Raises `ConfigError`."""
        num_threads = threads_of_a_rank(config, cores_for("target"), self.leadership)
        use_threads(num_threads)
        log_to(log_directory, config.log_name("target"))
        log_at(config.log_level)
        observer = self.observe(config, "target")
        engine = await on_passing_thread(
            engine_of_a_replica, config, "target", num_threads, self.leadership
        )
        # On another thread: the helpers of that one would slow down the steps that are measured.
        service = await on_passing_thread(_build, engine, config, observer)
        from outrider.transport.codec import VERIFY

        return await self.serve(service, VERIFY, config)


def _build(engine: Engine, config: TargetConfig, observer: StepObserver | None) -> TargetService:
    from outrider.engine.threads import start_workers
    from outrider.replica.scheduler import ThreadExecutor

    from .service import TargetService

    executor = ThreadExecutor("target-step", engine.take_step_seconds, start_workers)
    return TargetService(
        engine,
        executor,
        max_num_seqs=config.step_sessions,
        max_num_batched_tokens=config.max_num_batched_tokens,
        costs=executor.call(lambda: step_costs(engine, config, "target")),
        observer=observer,
        gathers=config.gather_sessions,
        self_drafter=self_drafter_of(engine, config.heads_support_entries),
        grammars=build_grammars(config, engine.info.eos_token_ids),
    )


def self_drafter_of(engine: Engine, entries_max: int) -> SelfDrafter | None:
    from outrider.engine.paged_engine import PagedEngine
    from target_service.self_drafting import ExitDrafter

    from .self_drafting import HeadDrafter

    if not isinstance(engine, PagedEngine):
        return None
    if engine.exit_head is not None:
        return ExitDrafter(engine.exit_head, engine, entries_max)
    return None if engine.draft_heads is None else HeadDrafter(engine.draft_heads, entries_max)
