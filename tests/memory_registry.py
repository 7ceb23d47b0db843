"""A registry without Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from outrider.errors import OutriderError
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import LEASE_S, ReplicaRecord, Role


class MemoryRegistry(RedisRegistry):
    """A registry for replicas and coordinators of one process."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` counts seconds; None = the running loop's."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._records: dict[tuple[Role, str], tuple[float, ReplicaRecord]] = {}
        self._wanted: dict[Role, int] = {}
        self._started = 0
        self.failure: OutriderError | None = None
        """What each call raises, while it is set."""

    def forget(self) -> None:
        """Loses everything, as a server does that is started anew without its data."""
        self._records.clear()
        self._wanted.clear()
        self._started = 0

    async def announce(self, record: ReplicaRecord) -> None:
        self._check()
        self._records[record.role, record.name] = (self._clock() + LEASE_S, record)

    async def withdraw(self, role: Role, name: str) -> None:
        self._check()
        self._records.pop((role, name), None)

    async def records(self, role: Role) -> list[ReplicaRecord]:
        self._check()
        now = self._clock()
        return [
            record
            for _, (until, record) in sorted(self._records.items())
            if record.role == role and until > now
        ]

    async def want(self, counts: Mapping[Role, int]) -> None:
        self._check()
        self._wanted.update(counts)

    async def wanted(self) -> dict[Role, int]:
        self._check()
        return dict(self._wanted)

    async def note_started(self, number: int) -> None:
        self._check()
        self._started = number

    async def started(self) -> int:
        self._check()
        return self._started

    async def close(self) -> None:
        """Does nothing."""

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
