"""The Ray actor that hosts a draft: its drafter, its service and its gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.config import DraftConfig
from outrider.limits import EAGLE_WINDOWS
from outrider.replica.host import ReplicaHost
from outrider.replica.process_setup import build_eagle, build_grammars, build_lookup
from outrider.settings import blaming

if TYPE_CHECKING:
    from outrider.engine.step_costs import StepCosts
    from outrider.replica.executors import ThreadExecutor

    from .service import DraftService


class DraftActor(ReplicaHost):
    """A draft in a process of its own."""

    def build(
        self, config: DraftConfig, executor: ThreadExecutor, engine: Any, costs: StepCosts | None
    ) -> DraftService:
        import torch

        from outrider.drafters.lookup import NgramDrafter
        from outrider.speculation.verification import try_kernels

        from .eagle_drafter import EagleDrafter
        from .parallel_drafter import parallel_token
        from .service import DraftService

        grammars, max_num_seqs = build_grammars(config), config.step_sessions
        if engine is not None:
            with blaming("draft_model"):
                return DraftService.with_model(
                    engine, executor, max_num_seqs=max_num_seqs, grammars=grammars, costs=costs,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    entries_max=config.support_entries, parallel_token=parallel_token(config),
                )  # fmt: skip
        lookup = build_lookup(config)
        eagle, info = build_eagle(config)
        weight = next(eagle.module.parameters())
        logits = torch.randn(2, len(eagle.token_ids), device=weight.device)
        executor.call(lambda: try_kernels(logits, eagle.token_ids))
        drafter = EagleDrafter(
            eagle,
            lookup or NgramDrafter(config.ngram_min, config.ngram_max),
            min_score=None if lookup is None else config.hybrid_min_score,
            sessions_max=EAGLE_WINDOWS * max_num_seqs,
            entries_max=config.support_entries,
        )
        return DraftService.with_eagle(
            drafter, info, executor, max_num_seqs=max_num_seqs, grammars=grammars
        )
