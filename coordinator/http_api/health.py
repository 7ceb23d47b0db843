"""Whether requests can make progress: asked once for all callers of `/health`."""

from __future__ import annotations

import asyncio
from typing import Final

from coordinator.service import CoordinatorService

KEPT_S: Final = 1.0
"""How long an answer is good for: no key is needed to ask, and each question costs the store and a
target one."""
SLOW_S: Final = 0.5
"""Callers wait so long for a new answer where the last one said that all is well, ..."""
WELL_S: Final = 5.0
"""... and are given that one then, unless it is older than this."""


class KeptHealth:
    """The newest answer of a coordinator, on its event loop."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._asking: asyncio.Task[str] | None = None
        self._good_until = self._well_until = 0.0

    async def trouble(self) -> str:
        """Why no request can make progress, or was up to `KEPT_S` ago; empty where they can, or
        could up to `WELL_S` ago and nothing else is known within `SLOW_S`. Where asking fails it
        raises, and the next caller asks again."""
        loop = asyncio.get_running_loop()
        if self._asking is None or (self._asking.done() and loop.time() >= self._good_until):
            self._good_until = 0.0
            self._asking = asyncio.create_task(self._answer())
        asking = self._asking
        await asyncio.wait([asking], timeout=SLOW_S)
        if not asking.done() and loop.time() < self._well_until:
            return ""
        return await asyncio.shield(asking)

    async def _answer(self) -> str:
        found = await self._service.trouble()
        now = asyncio.get_running_loop().time()
        self._good_until = now + KEPT_S
        self._well_until = 0.0 if found else now + WELL_S
        return found
