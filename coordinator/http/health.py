"""Whether requests can make progress, asked for once for all that want to know at a time."""

from __future__ import annotations

import asyncio
from typing import Final

from coordinator.service import CoordinatorService

KEPT_S: Final = 1.0
"""How long an answer is good for: nobody needs a key to ask, and it costs the store and a target a
question each."""


class KeptHealth:
    """The newest answer of a coordinator, on its event loop."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._asking: asyncio.Task[str] | None = None
        self._good_until = 0.0

    async def trouble(self) -> str:
        """What it is, or was up to `KEPT_S` ago. Where asking fails it raises, and
        the next one asks again."""
        now = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now >= self._good_until):
            self._good_until = 0.0
            self._asking = asyncio.create_task(self._answer())
        return await asyncio.shield(self._asking)

    async def _answer(self) -> str:
        found = await self._service.trouble()
        self._good_until = asyncio.get_running_loop().time() + KEPT_S
        return found
