"""Whether a coordinator's target and store answer, and how large its fleet is."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from coordinator.routing.replica_pool import ReplicaPool
from outrider.errors import OutriderError
from outrider.registry.registry import ROLES, Registry
from outrider.sessions.store import SessionStore

from .health import HEALTH_TIMEOUT_S, store_trouble

_log = logging.getLogger(__name__)

LOOK_PERIOD_S: Final = 1.0
"""Between two looks at whether target and store answer, and at the fleet."""


class HealthMonitor:
    """Looks now and then, and remembers. Implements `CoordinatorHealth`."""

    def __init__(
        self,
        store: SessionStore,
        targets: ReplicaPool[Any, Any],
        drafts: ReplicaPool[Any, Any],
        registry: Registry | None = None,
    ) -> None:
        """Without a `registry` nobody knows the fleet."""
        self._store = store
        self._pools = (targets, drafts)
        self._registry = registry
        self.target_available: bool | None = None
        self.store_available: bool | None = None
        self.replicas_wanted: dict[str, int] = {}
        self.replicas_present: dict[str, int] = {}

    @property
    def bytes_sent(self) -> dict[str, int]:
        """See `CoordinatorHealth.bytes_sent`."""
        return {pool.role: pool.num_bytes.sent for pool in self._pools}

    @property
    def bytes_received(self) -> dict[str, int]:
        """See `CoordinatorHealth.bytes_received`."""
        return {pool.role: pool.num_bytes.received for pool in self._pools}

    @property
    def stale_answers(self) -> dict[str, int]:
        """See `CoordinatorHealth.stale_answers`."""
        return {pool.role: pool.num_stale for pool in self._pools}

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self) -> None:
        """Once."""
        self.target_available, self.store_available, _ = await asyncio.gather(
            self._pools[0].healthy(HEALTH_TIMEOUT_S), self._ask_store(), self._count()
        )

    async def _ask_store(self) -> bool:
        return not await store_trouble(self._store)

    async def _count(self) -> None:
        """While the registry is away the numbers stay as they were."""
        registry = self._registry
        if registry is None:
            return
        try:
            wanted = await registry.wanted()
            present: dict[str, int] = {}
            for role in ROLES:
                records = await registry.records(role)
                present[role] = sum(not record.leaving for record in records)
        except OutriderError as error:
            _log.debug("how large the fleet is, is not known: %s", error)
            return
        self.replicas_wanted = {role: wanted[role] for role in ROLES if role in wanted}
        self.replicas_present = present
