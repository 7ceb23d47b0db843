"""The Ray actor of a draft: its drafter, its service and its gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.config.deployment import DraftConfig
from outrider.foundation.settings import blaming
from outrider.replica.engines import batched_tokens, build_head, try_device_kernels
from outrider.replica.grammars import build_grammars
from outrider.replica.host import ReplicaHost

if TYPE_CHECKING:
    from outrider.interfaces.engine import Engine
    from outrider.interfaces.step_costs import StepCosts
    from outrider.replica.drivers import ThreadDriver
    from outrider.replica.host import ServicerOfDraft

    from .service import DraftService


class DraftActor(ReplicaHost[DraftConfig, "DraftService"]):
    """The process of a draft replica."""

    def build(
        self,
        config: DraftConfig,
        driver: ThreadDriver,
        engine: Engine | None,
        costs: StepCosts | None,
    ) -> DraftService:
        from .feature_drafter import FeatureDrafter, HeadEngine
        from .model_drafter import ModelDrafter, ParallelDrafter, parallel_token
        from .service import DraftService

        drafter: ModelDrafter
        with blaming("draft_model"):
            if engine is None:
                head, info, num_bytes = build_head(config)
                head_engine = HeadEngine(
                    head, info, max_num_seqs=config.max_num_seqs, kv_cache_memory_bytes=num_bytes
                )
                driver.call(lambda: try_device_kernels(None, head))
                # `costs` is None: no `StepCosts` describe a head, whose pass over committed tokens
                # runs attention only for the last token.
                drafter = FeatureDrafter(head, head_engine)
            elif (token := parallel_token(config)) is not None:
                drafter = ParallelDrafter(engine, token)
            else:
                drafter = ModelDrafter(engine)
        return DraftService(
            drafter,
            driver,
            costs=costs,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=batched_tokens(config),
            grammars=build_grammars(config),
        )

    def servicer(self, service: DraftService) -> ServicerOfDraft:
        from outrider.transport.codec import DRAFT
        from outrider.transport.stream_server import ReplicaServicer

        return ReplicaServicer(service, DRAFT)
