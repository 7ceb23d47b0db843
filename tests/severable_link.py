"""Streams that break when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from outrider.errors import LinkLost, check
from outrider.transport.link import Answer, Item, MemoryLink, ReplicaService, deliver_soon


class SeverableLink(MemoryLink[Item, Answer]):
    """A stream in one process that can be broken."""

    def __init__(
        self,
        service: ReplicaService[Item, Answer],
        deliver: Callable[[Callable[[], None]], None] = deliver_soon,
    ) -> None:
        super().__init__(service, deliver)
        self._unreachable: Exception | None = None

    def trouble(self) -> str:
        return super().trouble() or ("" if self._unreachable is None else str(self._unreachable))

    def sever(self, error: Exception, *, reachable: bool = True) -> None:
        """Breaks the stream: what is on its way is lost, and `on_lost` hears of it with the event
        loop's next turn, if a stream was open. Until `restore`, an unreachable replica makes
        `send` raise."""
        self._unreachable = None if reachable else error
        was_open = self._connection is not None
        self._disconnect()
        if was_open and self._on_lost is not None:
            asyncio.get_running_loop().call_soon(self._tell_lost, error)

    def restore(self, service: Any = None) -> None:
        """Makes the replica reachable again, as `service` where it has been restarted."""
        if service is not None and service is not self._service:
            check(self._connection is None, "sever the stream to the old service first")
            self._service = service
        self._unreachable = None

    def _tell_lost(self, error: Exception) -> None:
        if self._on_lost is not None and not self._closed:
            self._on_lost(error if isinstance(error, LinkLost) else LinkLost(str(error)))
