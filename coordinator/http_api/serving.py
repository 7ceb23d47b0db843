"""Answers a request for a generation, whole or as server-sent events, for as long as its client is
there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Final, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.auth.access_control import AccessControl
from coordinator.service import CoordinatorService
from outrider.api_keys import Caller
from outrider.errors import BadRequest, Unavailable
from outrider.limits import EVENTS_AHEAD_MAX, TRACEPARENT_CHARS_MAX
from outrider.request import Event, Finished

from .answers import Answer, Json
from .bodies import TranslatedBody
from .errors import error_body, json_response, to_json

Events = AsyncGenerator[tuple[int, Event]]
"""Of all choices of a request, each with its choice's index."""
_LAST: Final = b"data: [DONE]\n\n"
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # Or a proxy waits for the end.
)


class Generated(Response):
    """The answer to a request whose body has been read: once, when all events have come, or each
    part as a server-sent event, and a last one. It ends, and closes the events, where the client
    goes or the server is closing. An error is raised before the first part, and the last event
    behind it."""

    def __init__(
        self,
        events: Events,
        closing: asyncio.Event,
        tell: Callable[[int, Event], Sequence[Json]],
        whole: Callable[[], Json] | None = None,
    ) -> None:
        """`tell` says what a client is told of an event, often nothing, and `whole` what it is told
        once; None = nothing."""
        super().__init__()
        self._events = events
        self._closing = closing
        self._tell = tell
        self._whole = whole
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        working = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(gone())
        tasks = (working, leaving, asyncio.create_task(self._closing.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            elif not leaving.done():
                raise Unavailable("this coordinator is shutting down")
        except Exception as error:
            if not self._has_begun:
                raise
            await self._send(send, error_body(error), more=False)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for index, event in events:
                for part in self._tell(index, event):
                    await self._send(send, part)
        if self._whole is None:
            await send({"type": "http.response.body", "body": _LAST})
        else:
            await json_response(self._whole())(scope, receive, send)

    async def _send(self, send: Send, part: Json, *, more: bool = True) -> None:
        if not self._has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._has_begun = True
        body = b"data: " + to_json(part) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _interleaved(streams: Sequence[AsyncGenerator[Event]], asked: TranslatedBody) -> Events:
    """The events of all streams as they come, once each has begun; the first error ends it. A
    stream waits while `EVENTS_AHEAD_MAX` events do."""
    first = await asyncio.gather(*(anext(one) for one in streams), return_exceptions=True)
    for index, begun in enumerate(first):
        if isinstance(begun, BaseException):
            raise asked.renamed(begun, index)
    for index, event in enumerate(first):
        yield index, cast(Event, event)
    if len(streams) == 1:  # Nothing to wait for beside it: no queue, and no task of its own.
        try:
            async for event in streams[0]:
                yield 0, event
        except BadRequest as error:
            raise asked.renamed(error, 0) from error
        return
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(EVENTS_AHEAD_MAX)

    async def forward(index: int, stream: AsyncGenerator[Event]) -> None:
        try:
            async for event in stream:
                await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:  # noqa: BLE001 (raised by whoever reads)
            await queue.put((index, error))

    tasks = [asyncio.create_task(forward(*pair)) for pair in enumerate(streams)]
    try:
        num_left = len(streams)
        while num_left:
            index, found = await queue.get()
            if found is None:
                num_left -= 1
            elif isinstance(found, Exception):
                raise asked.renamed(found, index)
            else:
                yield index, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Generations:
    """The generations of one coordinator that are asked for by HTTP."""

    def __init__(
        self, service: CoordinatorService, access: AccessControl, closing: asyncio.Event
    ) -> None:
        """`access` counts what callers run; `closing` is set when the server waits no longer for
        that."""
        self._service = service
        self._access = access
        self._closing = closing

    def answer(self, request: Request, asked: TranslatedBody, kind: type[Answer]) -> Response:
        """The answer to a request whose body has been read, in chunks if it asks for a stream."""
        given = asked.requests[0].num_draft_tokens
        bound = self._service.defaults.num_draft_tokens if given is None else given
        answer = kind(asked, self._service.text, bound, int(time.time()))
        if asked.body.stream:
            return self.stream(request, asked, answer.take)
        return Generated(self.events(request, asked), self._closing, answer.add, answer.whole)

    def stream(
        self, request: Request, asked: TranslatedBody, tell: Callable[[int, Event], Sequence[Json]]
    ) -> Response:
        """An answer of what `tell` makes of each event."""
        return Generated(self.events(request, asked), self._closing, tell)

    async def events(self, request: Request, asked: TranslatedBody) -> Events:
        """The events of all choices as they come, each with its choice's index. They count as one
        request of who calls, and as a generation each, whose places are free when the last one
        ends. None runs before every one of them was admitted, and none goes on once one of them has
        failed. Raises `BadRequest` for more choices than there can ever be room for, and what
        `CoordinatorService.generate` does, in the body's words."""
        caller: Caller = request.state.caller
        left = len(asked.requests)
        if 0 < caller.concurrency < left:
            raise BadRequest(
                "n" if asked.body.n > 1 else "prompt",
                f"asks for {left} generations; the key {caller.name!r} may run "
                f"{caller.concurrency} at a time",
            )
        # The trace that the caller is part of, as W3C Trace Context has it.
        trace = request.headers.get("traceparent", "")
        trace = trace if len(trace) <= TRACEPARENT_CHARS_MAX else ""
        async with AsyncExitStack() as exits:
            streams = [
                await exits.enter_async_context(
                    aclosing(self._service.generate(one, caller.tenant, trace, resumable=False))
                )
                for one in asked.requests
            ]
            running = await exits.enter_async_context(aclosing(_interleaved(streams, asked)))
            admitted = self._access.admit(caller, num_generations=left)
            grant = await exits.enter_async_context(admitted)
            async for index, event in running:
                left -= isinstance(event, Finished)
                if left == 0:
                    await grant.release()
                yield index, event
