"""Whether a coordinator can serve, and why it cannot; and the same for its telemetry."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from coordinator.decoding.committer import Committer
from coordinator.routing.replica_pool import ReplicaPool
from outrider.errors import NotFound, OutriderError
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ROLES
from outrider.sessions.store import SessionStore

LOOK_PERIOD_S: Final = 1.0
"""Between two looks at whether target and store answer, and at the fleet."""
HEALTH_TIMEOUT_S: Final = 2.0
"""How long a target may take to describe itself."""
TROUBLE_S: Final = 3.0
"""Trouble that passes sooner is none: while a replica is loaded on cores that others share, a
target or the store may be silent for some seconds, and running requests outlast that."""
TROUBLE_RETRY_S: Final = 0.2
"""Between two questions within that time."""
NO_SESSION: Final = "0" * 32
"""An id that no session has; asking for it shows whether the store answers."""


class HealthMonitor:
    """Asks store and targets, now and then and when it is asked itself, and remembers."""

    def __init__(
        self,
        committer: Committer,
        store: SessionStore,
        targets: ReplicaPool,
        drafts: ReplicaPool,
        registry: RedisRegistry | None = None,
    ) -> None:
        self._committer = committer
        self._store = store
        self._pools = (targets, drafts)
        self._registry = registry
        self._flags: dict[str, dict[str, float]] = {"target_available": {}, "store_available": {}}
        """1 or 0; nothing before it is known."""
        self._counts: dict[str, Mapping[Any, float]] = {
            "replicas_wanted": {}, "replicas_present": {}
        }  # fmt: skip

    def readings(self) -> dict[str, Mapping[str, float]]:
        """By metric and the value of its label what is known now. May be called by any thread."""
        pools = self._pools
        return self._flags | self._counts | {
            "wire_bytes_sent": {pool.role: pool.num_bytes.sent for pool in pools},
            "wire_bytes_received": {pool.role: pool.num_bytes.received for pool in pools},
            "stale_answers": {pool.role: pool.num_stale for pool in pools},
        }  # fmt: skip

    async def run(self) -> None:
        while True:
            await asyncio.gather(self.look(), self._count())
            await asyncio.sleep(LOOK_PERIOD_S)

    async def trouble(self) -> str:
        """Why a request that comes now cannot make progress; empty where commits go on, and the
        store and a target answer within `TROUBLE_S`. The draft is not asked, because requests do
        without it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + TROUBLE_S
        while True:
            if self._committer.closing:
                return "the coordinator is shutting down"
            found = await self.look()
            if not found or loop.time() >= until:
                return found
            await asyncio.sleep(TROUBLE_RETRY_S)

    async def look(self) -> str:
        """What is wrong now with store or targets."""
        has_target, store_trouble = await asyncio.gather(
            self._pools[0].healthy(HEALTH_TIMEOUT_S), self._store_trouble()
        )
        self._flags = {
            "target_available": {"": float(has_target)},
            "store_available": {"": float(not store_trouble)},
        }
        return store_trouble or ("" if has_target else "no target answers")

    async def _store_trouble(self) -> str:
        try:
            await self._store.load(NO_SESSION)
        except NotFound:
            return ""
        except OutriderError as error:
            return f"the session store does not answer: {error.message}"
        return ""

    async def _count(self) -> None:
        registry = self._registry
        if registry is None:
            return
        with suppress(OutriderError):
            wanted = await registry.wanted()
            present = {
                role: sum(not record.leaving for record in await registry.records(role))
                for role in ROLES
            }
            self._counts = {"replicas_wanted": wanted, "replicas_present": present}
