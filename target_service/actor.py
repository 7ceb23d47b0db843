"""The Ray actor that hosts a target: its engine, its service and its gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.config import TargetConfig
from outrider.hosting import cores_for, log_to, on_passing_thread, step_costs, use_threads
from outrider.messages import VerifyAnswer, VerifyItem
from outrider.rank_host import Leadership, engine_of_a_replica, threads_of_a_rank
from outrider.replica_host import ReplicaHost

if TYPE_CHECKING:
    from outrider.work import StepObserver

    from .service import TargetService


class TargetActor(ReplicaHost[VerifyItem, VerifyAnswer]):
    """A target in a process of its own."""

    async def start(self, config: TargetConfig, log_directory: str) -> str:
        """Loads the model and serves; the address that coordinators call. Raises `ConfigError`."""
        num_threads = threads_of_a_rank(config, cores_for("target"), self.leadership)
        use_threads(num_threads)
        log_to(log_directory, "target")
        observer = self.observe(config, "target")
        service = await on_passing_thread(_build, config, num_threads, observer, self.leadership)
        from .servicer import TargetServicer

        return await self.serve(service, TargetServicer, config.host, config.port)


def _build(
    config: TargetConfig,
    num_threads: int,
    observer: StepObserver | None,
    leadership: Leadership | None,
) -> TargetService:
    from outrider.engine.executor import ThreadExecutor
    from outrider.engine.workers import start_workers

    from .service import TargetService

    engine = engine_of_a_replica(config, "target", num_threads, leadership)
    executor = ThreadExecutor("target-step", engine.take_step_seconds, start_workers)
    return TargetService(
        engine,
        executor,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        costs=executor.call(lambda: step_costs(engine, config, "target")),
        observer=observer,
    )
