"""A deployment of emulated engines that a measurement makes larger and smaller."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from deploy.fleet.launcher import Deployment
from outrider.config import load_config
from outrider.errors import Unavailable
from outrider.registry.registry import Role

SCALE_S: Final = 120.0
"""What starting or ending replicas may take."""
_CPUS: Final = 0.05
"""That Ray reserves for a replica: emulated engines compute next to nothing."""


class ScaledDeployment:
    """See `benchmarks.scaling.Scalable`."""

    def __init__(self, deployment: Deployment, changed: asyncio.Event) -> None:
        """`changed` is set whenever the deployment's replicas are others."""
        self._deployment = deployment
        self._changed = changed

    @property
    def address(self) -> str:
        """See `Scalable.address`."""
        return self._deployment.endpoints.coordinator

    async def scale(self, counts: Mapping[Role, int]) -> None:
        """See `Scalable.scale`. Raises `Unavailable` where that takes too long."""
        await self._deployment.reconciler.call("want", dict(counts))
        try:
            async with asyncio.timeout(SCALE_S):
                while any(
                    self._deployment.overview.num_serving(role) != count
                    for role, count in counts.items()
                ):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(f"there are not {dict(counts)} after {SCALE_S:g} s") from None


@asynccontextmanager
async def scaled_deployment(
    engine: str, step_sessions: int, draft_step_sessions: int, num_draft_tokens: int
) -> AsyncIterator[ScaledDeployment]:
    """See `benchmarks.scaling.Starts`."""
    settings = {
        "engine": engine, "draft_model": "emulated", "grpc_port": 0, "http": False,
        "max_num_seqs": step_sessions, "draft_max_num_seqs": draft_step_sessions,
        "num_draft_tokens": num_draft_tokens,
        "length_control": False, "look_ahead": 0, "stop_timeout_s": 2,
        "target_num_cpus": _CPUS, "draft_num_cpus": _CPUS, "coordinator_num_cpus": _CPUS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="outrider-") as state:
        changed = asyncio.Event()
        config = load_config(settings, {})
        async with Deployment(config, Path(state), on_change=changed.set) as deployment:
            yield ScaledDeployment(deployment, changed)
