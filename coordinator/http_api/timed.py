"""Times each request by HTTP, also one that is refused at the door."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from outrider.telemetry.http_times import HttpTimes


class Timed:
    """Around an application, from a request's arrival to the last byte of its answer."""

    def __init__(self, app: ASGIApp, times: HttpTimes) -> None:
        self._app = app
        self._times = times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a call through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begun = time.monotonic()
        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = status or 500  # As whoever catches it will say.
            raise
        finally:
            route = getattr(scope.get("route"), "path", "")
            seconds = time.monotonic() - begun
            self._times.add(seconds, scope["method"], scope["scheme"], route, status)
