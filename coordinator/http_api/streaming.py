"""Answers on a connection that may break, and as events that the client reads as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.errors import Unavailable

from .errors import error_body, meant
from .rendering import to_json

T = TypeVar("T")
_LAST: Final = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed its connection."""


class Unsent(Response):
    """The answer to a client that has gone: nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends nothing, so that nobody takes it for an answer."""


class Connection:
    """A request's client, for as long as it is there and the server does not end."""

    def __init__(self, receive: Receive, closing: asyncio.Event) -> None:
        """`closing` is set when the server waits no longer."""
        self._receive = receive
        self._closing = closing

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Ends it, and raises `ClientGone` or `Unavailable`, where the client
        goes or the server ends before that. The request's body must have been read."""
        working = asyncio.create_task(work)
        leaving = asyncio.create_task(self._gone())
        ending = asyncio.create_task(self._closing.wait())
        tasks = (working, leaving, ending)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if leaving.done():
                raise ClientGone
            raise Unavailable("this coordinator is shutting down")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class EventStream(Response):
    """Server-sent events: one for each part of an answer, and a last one. An error once they have
    begun is an event, too, and then there is no last one."""

    media_type = "text/event-stream"

    def __init__(
        self,
        connection: Connection,
        first: dict[str, Any],
        rest: AsyncGenerator[dict[str, Any]],
    ) -> None:
        """`rest` is read behind `first`, and closed however the response ends."""
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # Or a proxy waits for the end.
        self._connection = connection
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all of it."""
        begin = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        async with aclosing(self._rest):
            await send(begin)
            await send(_event(self._first))  # It is there: no task is waited for.
            try:
                await self._connection.while_open(self._send(send))
            except ClientGone:
                return
            except Exception as error:  # noqa: BLE001 (the client is told, whatever it is)
                told = to_json(error_body(meant(error)))
                await send(_part(b"data: " + told + b"\n\n", more=False))

    async def _send(self, send: Send) -> None:
        async for part in self._rest:
            await send(_event(part))
        await send(_part(_LAST, more=False))


def _event(value: dict[str, Any]) -> dict[str, Any]:
    return _part(b"data: " + to_json(value) + b"\n\n", more=True)


def _part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
