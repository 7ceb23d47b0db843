"""The Ray actor of a target: its engine, its service and its gRPC server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.config.deployment import TargetConfig
from outrider.errors import InvariantError
from outrider.replica.engines import batched_tokens
from outrider.replica.grammars import build_grammars
from outrider.replica.host import ReplicaHost
from outrider.replica.lookups import build_lookup

if TYPE_CHECKING:
    from outrider.interfaces.engine import Engine
    from outrider.interfaces.step_costs import StepCosts
    from outrider.replica.drivers import ThreadDriver
    from outrider.replica.host import ServicerOfTarget

    from .service import TargetService
    from .verifier import SelfDrafter


class TargetActor(ReplicaHost[TargetConfig, "TargetService"]):
    """The process of a target replica."""

    def build(
        self,
        config: TargetConfig,
        driver: ThreadDriver,
        engine: Engine | None,
        costs: StepCosts | None,
    ) -> TargetService:
        from .service import TargetService

        if engine is None:
            raise InvariantError("a target without a model")
        return TargetService(
            engine,
            driver,
            max_num_seqs=config.max_num_seqs,
            costs=costs,
            max_num_batched_tokens=batched_tokens(config),
            self_drafter=self_drafter_of(engine),
            grammars=build_grammars(config, engine.info.eos_token_ids),
            stream_interval_ms=config.stream_interval_ms,
            lookup=build_lookup(config.lookup),
        )

    def servicer(self, service: TargetService) -> ServicerOfTarget:
        from outrider.transport.codec import VERIFY
        from outrider.transport.stream_server import ReplicaServicer

        return ReplicaServicer(service, VERIFY)


def self_drafter_of(engine: Engine) -> SelfDrafter | None:
    from outrider.engine.paged_engine import PagedEngine
    from outrider.interfaces.engine import DraftingEngine

    from .verifier import SelfDrafter

    layer = getattr(engine, "draft_layer", None)
    drafts_apart = isinstance(engine, PagedEngine) and engine.feature_width
    if layer is None or drafts_apart or not isinstance(engine, DraftingEngine):
        return None
    return SelfDrafter(layer, engine)
