"""The actors of a deployment in this process, without Ray: configurations as the reconciler makes
them, a store, gRPC between all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.fleet.preflight import resolve_models
from deploy.fleet.spec import ACTORS, plan_fleet
from outrider.config import load_config
from outrider.registry.registry import Role
from outrider.sessions.embedded import EmbeddedRedis

STARTING: tuple[Role, ...] = ("target", "draft", "coordinator")


@asynccontextmanager
async def actors_here(directory: Path, **settings: Any) -> AsyncIterator[dict[Role, str]]:
    """The address of each role's replica."""
    given = load_config({"grpc_port": 0, "http": False, **settings}, {})
    found = await asyncio.to_thread(resolve_models, given)
    with EmbeddedRedis(directory) as redis, pytest.MonkeyPatch.context() as patch:
        for module in ("coordinator.actor", "outrider.replica.host"):
            for name in ("log_to", "log_at", "use_threads"):  # They change the whole process.
                patch.setattr(f"{module}.{name}", lambda *_: None)
        address = replace(found.coordinator.redis, url=redis.url)
        found = replace(found, coordinator=found.coordinator.reaching(address))
        spec = plan_fleet(given, found, {}, "here", local=True)
        spec = spec.settled([(role, "here") for role in spec.demands])
        addresses: dict[Role, str] = {}
        async with AsyncExitStack() as exits:
            for role in STARTING:
                if role in spec.demands:
                    actor = ACTORS[role]()
                    config = spec.replica_config(role, f"{role}-0", 0)
                    addresses[role] = await actor.start(config, "")
                    exits.push_async_callback(actor.stop, 0.0)
            yield addresses
