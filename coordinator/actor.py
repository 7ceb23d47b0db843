"""The Ray actor that hosts a coordinator."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from outrider.config.deployment import CoordinatorConfig
from outrider.foundation.garbage import skip_what_exists
from outrider.redis.address import with_password
from outrider.registry.registry import Engagement
from outrider.replica.logs import log_to
from outrider.replica.ray_actor import RayActor
from outrider.replica.threads import use_threads

if TYPE_CHECKING:
    from coordinator.decoding.trial import TrialSums

    from .host import CoordinatorHost


GARBAGE_OBJECTS = 50_000
"""Number of new objects (some MB) after which Python collects cyclic garbage. With Python's
default, garbage collection took 6 % of the CPU time of 200 sessions, and found almost nothing."""


def collect_less() -> None:
    """Makes garbage collections rare and short."""
    gc.set_threshold(GARBAGE_OBJECTS)
    skip_what_exists()


class CoordinatorActor(RayActor):
    """A coordinator. Only `prepare` imports the large modules, so Ray places the actor quickly."""

    def __init__(self) -> None:
        self.host: CoordinatorHost | None = None

    async def engagement(self) -> Engagement:
        return Engagement() if self.host is None else self.host.engagement

    async def prepare(self, config: CoordinatorConfig, log_directory: str) -> None:
        """Does the part of `start` that needs no target: imports, and the tokenizer."""
        use_threads(1)
        log_to(log_directory, config.log_name, config.log_level)
        from .host import load_text

        load_text(config)

    async def start(self, config: CoordinatorConfig, log_directory: str) -> str:
        """See `CoordinatorHost.start`."""
        await self.prepare(config, log_directory)
        config = config.reaching(with_password(config.redis))
        from .host import CoordinatorHost

        self.host = CoordinatorHost(config)
        address = await self.host.start()
        collect_less()
        return address

    async def trial_sums(self) -> TrialSums | None:
        service = None if self.host is None else self.host.service
        return None if service is None else service.runs.trial.sums

    async def wait(self) -> None:
        if self.host is not None:
            await self.host.wait()

    async def stop(self, grace_s: float) -> None:
        if self.host is not None:
            await self.host.stop(grace_s)
