"""The Ray actor of a draft: its drafter, its service and its gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.config import DraftConfig
from outrider.replica.host import ReplicaHost
from outrider.replica.process_setup import build_grammars, build_head, try_drafting_kernels
from outrider.settings import blaming

if TYPE_CHECKING:
    from outrider.engine.step_costs import StepCosts
    from outrider.replica.executors import ThreadExecutor

    from .service import DraftService


class DraftActor(ReplicaHost):
    """A draft in its own process."""

    def build(
        self, config: DraftConfig, executor: ThreadExecutor, engine: Any, costs: StepCosts | None
    ) -> DraftService:
        from .feature_drafter import FeatureDrafter, HeadEngine
        from .parallel_drafter import parallel_token
        from .service import DraftService

        options: dict[str, Any] = {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "grammars": build_grammars(config),
        }
        with blaming("draft_model"):
            head = getattr(engine, "head", None)  # An emulated engine may have one.
            if engine is None:
                head, info, num_bytes = build_head(config)
                engine = HeadEngine(
                    head, info, max_num_seqs=config.max_num_seqs, kv_cache_memory_bytes=num_bytes
                )
            elif head is None:
                return DraftService.with_model(
                    engine, executor, costs=costs, parallel_token=parallel_token(config), **options
                )
        executor.call(lambda: try_drafting_kernels(head))
        drafter = FeatureDrafter(head, engine)
        return DraftService.with_features(drafter, executor, **options)
