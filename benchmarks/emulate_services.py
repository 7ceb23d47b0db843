"""Deployments without Ray, for `bench emulate` and the rehearsal of `outrider plan`: services and
Redis in processes of their own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from outrider.client import Client
from outrider.config import (
    EMULATED,
    CoordinatorConfig,
    DraftConfig,
    TargetConfig,
    unlocked,
)
from outrider.sessions.embedded import EmbeddedRedis

from .role_process import RoleProcess

DRAFT_TIMEOUT_MS: Final = 30_000
"""A draft that stalls is to be measured, not done without."""
_MODEL: Final = EMULATED.removesuffix(":")


@dataclass(frozen=True, slots=True)
class Replicas:
    """A target, a draft and a store that run."""

    target_address: str
    draft_address: str
    """Empty where the coordinators look drafts up."""
    redis_url: str
    settings: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    """Of coordinators, as far as they are not said here."""

    @asynccontextmanager
    async def coordinator(self, look_ahead: int, delay_ms: float = 0.0) -> AsyncIterator[Client]:
        """Calls a coordinator that runs as long as this lasts, with `settings` but for
        `look_ahead`. What it and the draft send each other takes `delay_ms` more in each direction.
        Raises `Unavailable` where a process breaks off."""
        async with AsyncExitStack() as stack:
            draft_address = self.draft_address
            if delay_ms > 0 and draft_address:
                way = {"address": draft_address, "delay_ms": delay_ms}
                relay = await stack.enter_async_context(RoleProcess("relay", "relay", way))
                draft_address = relay.address
            config = replace(
                unlocked(self.settings),
                grpc_port=0,
                http=False,
                telemetry="",
                redis_url=self.redis_url,
                target_address=self.target_address,
                draft_address=draft_address,
                draft_timeout_ms=DRAFT_TIMEOUT_MS,
                look_ahead=look_ahead,
                length_control=False,  # Each K is measured by itself.
            )
            process = RoleProcess("service_roles", "coordinator", {"config": asdict(config)})
            coordinator = await stack.enter_async_context(process)
            yield await stack.enter_async_context(Client(coordinator.address))


@asynccontextmanager
async def running_replicas(engine: str) -> AsyncIterator[Replicas]:
    """Both replicas on the emulated `engine`, one thread each, and an embedded Redis. Raises
    `Unavailable` where a process breaks off, and `ConfigError`."""
    target = TargetConfig(engine=engine, model=_MODEL, num_threads=1)
    draft = DraftConfig(engine=engine, model=_MODEL, num_threads=1)
    async with running_pair(target, draft, CoordinatorConfig()) as replicas:
        yield replicas


@asynccontextmanager
async def running_pair(
    target: TargetConfig, draft: DraftConfig, coordinator: CoordinatorConfig
) -> AsyncIterator[Replicas]:
    """A target, a draft where a model drafts, and an embedded Redis, for coordinators with these
    settings. No process binds a port that they name, as a deployment with the same ones may run
    here.
    Raises `Unavailable` where a process breaks off, and `ConfigError`."""
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-"))
        redis = EmbeddedRedis(Path(directory))
        redis.start()
        stack.callback(redis.stop)
        pair: dict[str, TargetConfig | DraftConfig] = {"target": target}
        if draft.drafter.model is not None:
            pair["draft"] = draft
        addresses = {}
        for role, config in pair.items():
            config = replace(unlocked(config), port=0, telemetry="")
            process = RoleProcess("service_roles", role, {"config": asdict(config)})
            addresses[role] = (await stack.enter_async_context(process)).address
        yield Replicas(addresses["target"], addresses.get("draft", ""), redis.url, coordinator)
