"""The Ray actor that hosts a draft: its drafter, its service and its gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.config import DraftConfig
from outrider.limits import EAGLE_WINDOWS
from outrider.replica.host import ReplicaHost
from outrider.replica.process_setup import build_eagle, build_grammars, build_lookup, step_costs

if TYPE_CHECKING:
    from outrider.engine.interface import Engine

    from .service import DraftService


class DraftActor(ReplicaHost):
    """A draft in a process of its own."""

    def build(self, engine: Engine | None, config: DraftConfig) -> DraftService:
        from outrider.drafters.lookup import NgramConfig, NgramDrafter
        from outrider.engine.threads import start_workers
        from outrider.replica.scheduler import ThreadExecutor

        from .eagle_drafter import EagleDrafter
        from .service import DraftService

        grammars = build_grammars(config)
        if engine is not None:
            executor = ThreadExecutor("draft-step", engine.take_step_seconds, start_workers)
            return DraftService.with_model(
                engine,
                executor,
                max_num_seqs=config.step_sessions,
                max_num_batched_tokens=config.max_num_batched_tokens,
                entries_max=config.support_entries,
                costs=executor.call(lambda: step_costs(engine, config, "draft")),
                grammars=grammars,
            )
        lookup = build_lookup(config)
        eagle, info = build_eagle(config)
        drafter = EagleDrafter(
            eagle,
            lookup or NgramDrafter(NgramConfig(config.ngram_min, config.ngram_max)),
            min_score=None if lookup is None else config.hybrid_min_score,
            sessions_max=EAGLE_WINDOWS * config.step_sessions,
            entries_max=config.support_entries,
        )
        return DraftService.with_eagle(
            drafter,
            info,
            ThreadExecutor("draft-step", lambda: 0.0, start_workers),
            max_num_seqs=config.step_sessions,
            grammars=grammars,
        )
