"""One replica's lease in a registry, held as long as the replica runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from outrider.errors import OutriderError
from outrider.registry.registry import RENEWAL_S, Registry, ReplicaRecord

_log = logging.getLogger(__name__)


class Lease:
    """Announces a replica until it is closed. While the registry is away the replica goes on, and
    is announced once that is back."""

    def __init__(self, registry: Registry, record: Callable[[], ReplicaRecord]) -> None:
        """`record()` is what to say now. The registry is the announcer's from now on."""
        self._registry = registry
        self._record = record
        self._task: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()

    async def start(self) -> None:
        """Announces it for the first time, and goes on to. Raises `StoreUnavailable`."""
        await self._registry.announce(self._record())
        self._task = asyncio.create_task(self._run())

    def say_again(self) -> None:
        """What is to be said has changed: it is said at once."""
        self._soon.set()

    async def _run(self) -> None:
        heard = True
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEWAL_S):
                    await self._soon.wait()
            self._soon.clear()
            try:
                await self._registry.announce(self._record())
                heard = True
            except OutriderError as error:
                if heard:
                    _log.warning("this replica cannot be announced: %s", error)
                heard = False

    async def withdraw(self) -> None:
        """It is announced no more. Repeating it does nothing."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            record = self._record()
            with suppress(OutriderError):
                await self._registry.withdraw(record.role, record.name)

    async def close(self) -> None:
        """Withdraws it, and closes the registry."""
        await self.withdraw()
        await self._registry.close()
