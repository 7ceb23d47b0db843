"""What uvicorn's connections lack: an end for clients that do not read."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.limits import HTTP_STUCK_WRITE_S

_log = logging.getLogger(__name__)


class ImpatientConnection(H11Protocol):
    """Breaks off where its client takes nothing for `HTTP_STUCK_WRITE_S`, though more waits for it
    than a buffer holds. Then the client has gone, for whoever writes to it."""

    _giving_up: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        super().pause_writing()
        if self._giving_up is None:
            self._giving_up = self.loop.call_later(HTTP_STUCK_WRITE_S, self._give_up)

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._wait_on()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._wait_on()
        super().connection_lost(exc)

    def _wait_on(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        _log.info("a client has not read its answer for %g s", HTTP_STUCK_WRITE_S)
        self.transport.abort()  # `close` would wait until the client has read.
