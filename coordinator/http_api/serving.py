"""Answers a request for a generation, whole or as server-sent events, for as long as its client is
there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, Final, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from coordinator.auth.access_control import AccessControl
from coordinator.service import CoordinatorService
from outrider.api_keys import Caller
from outrider.errors import BadRequest, InvariantError, Unavailable
from outrider.limits import EVENTS_AHEAD_MAX, TRACEPARENT_CHARS_MAX
from outrider.request import Event, Finished

from .answers import Answer, Json
from .bodies import TranslatedBody
from .errors import error_body, json_response, to_json

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, Event]]
"""Of all choices of a request, each with its choice's index."""
Tell = Callable[[int, Event], Sequence[Json]]
"""What a client is told of an event; often nothing."""
_LAST: Final = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed its connection."""


class Unsent(Response):
    """The answer to a client that has gone: nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


async def while_open(request: Request, closing: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Ends it, and raises `ClientGone` or `Unavailable`, where the request's
    client goes or the server is `closing` before that. The body must have been read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    leaving = asyncio.create_task(gone())
    tasks = (working, leaving, asyncio.create_task(closing.wait()))
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


class EventStream(Response):
    """Server-sent events: one for each part of an answer, and a last one. An error once they have
    begun is an event, too, and then there is no last one."""

    media_type = "text/event-stream"

    def __init__(
        self,
        while_open: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]],
        first: Sequence[Json],
        events: Events,
        tell: Tell,
    ) -> None:
        """Of `events` are told behind `first` what `tell` makes of them. They are closed however
        the response ends."""
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # Or a proxy waits for the end.
        self._while_open = while_open
        self._first = first
        self._events = events
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        async with aclosing(self._events):
            await send(begin)
            for value in self._first:  # It is there: no task is waited for.
                await send(_part(value))
            try:
                await self._while_open(self._send(send))
            except ClientGone:
                return
            except Exception as error:  # noqa: BLE001 (the client is told, whatever it is)
                await send(_part(error_body(error), more=False))

    async def _send(self, send: Send) -> None:
        async for index, event in self._events:
            for value in self._tell(index, event):
                await send(_part(value))
        await send({"type": "http.response.body", "body": _LAST})


def _part(value: Json, *, more: bool = True) -> Message:
    body = b"data: " + to_json(value) + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _interleaved(streams: Sequence[AsyncGenerator[Event]], asked: TranslatedBody) -> Events:
    """The events of all streams as they come, once each has begun; the first error ends it. A
    stream waits while `EVENTS_AHEAD_MAX` events do."""
    first = await asyncio.gather(*(anext(one) for one in streams), return_exceptions=True)
    for index, begun in enumerate(first):
        if isinstance(begun, BadRequest):
            raise asked.renamed(begun, index) from begun
        if isinstance(begun, BaseException):
            raise begun
    for index, event in enumerate(first):
        yield index, cast(Event, event)
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
                raise found
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

    async def answer(self, request: Request, asked: TranslatedBody, kind: type[Answer]) -> Response:
        """The answer to a request whose body has been read. An error before the first token is
        raised, also where a stream is asked for. A client that goes takes its sessions with it."""
        given = asked.requests[0].num_draft_tokens
        bound = self._service.defaults.num_draft_tokens if given is None else given
        answer = kind(asked, self._service.text, bound, int(time.time()))
        if asked.body.stream:
            return await self.stream(request, asked, answer.take)

        async def whole() -> Response:
            async with aclosing(self._events(request, asked)) as events:
                async for index, event in events:
                    answer.add(index, event)
            return json_response(answer.whole())

        try:
            return await while_open(request, self._closing, whole())
        except ClientGone:
            return Unsent()

    async def stream(self, request: Request, asked: TranslatedBody, tell: Tell) -> Response:
        """An answer of chunks as they come, of which there is one at least. An error before the
        first is raised. A client that goes ends the events."""
        events = self._events(request, asked)
        try:
            first = await while_open(request, self._closing, _first(events, tell))
        except BaseException as error:
            await events.aclose()  # The first one may have come, and nobody has it.
            if isinstance(error, ClientGone):
                return Unsent()
            raise
        return EventStream(partial(while_open, request, self._closing), first, events, tell)

    async def _events(self, request: Request, asked: TranslatedBody) -> Events:
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
        streams = [
            self._service.generate(one, caller.tenant, _traceparent(request), resumable=False)
            for one in asked.requests
        ]
        is_single = left == 1  # Nothing to wait for beside it: no queue, and no task of its own.
        running: AsyncGenerator[Any] = streams[0] if is_single else _interleaved(streams, asked)
        async with AsyncExitStack() as exits:
            for stream in streams:
                exits.push_async_callback(stream.aclose)
            exits.push_async_callback(running.aclose)
            grant = await exits.enter_async_context(
                self._access.admit(caller, num_generations=left)
            )
            try:
                async for found in running:
                    index, event = (0, found) if is_single else found
                    left -= isinstance(event, Finished)
                    if left == 0:
                        await grant.release()
                    yield index, event
            except BadRequest as error:
                raise (asked.renamed(error, 0) if is_single else error) from error


async def _first(events: Events, tell: Tell) -> Sequence[Json]:
    async for index, event in events:
        if told := tell(index, event):
            return told
    raise InvariantError("an answer without a chunk")


def _traceparent(request: Request) -> str:
    """The trace that the caller is part of, as W3C Trace Context has it; empty if it names none."""
    found = request.headers.get("traceparent", "")
    return found if len(found) <= TRACEPARENT_CHARS_MAX else ""
