"""Answers on a connection that may break, and as events that the client reads as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.auth.access_control import Gate
from coordinator.http_api.answers import Answer, Chunks, Json, Shape
from coordinator.http_api.errors import error_body, json_response, meant, to_json
from coordinator.http_api.translation import Asked
from coordinator.service import CoordinatorService
from outrider.api_keys import Caller
from outrider.errors import BadRequest, InvariantError, Unavailable
from outrider.limits import EVENTS_AHEAD_MAX, TRACEPARENT_CHARS_MAX
from outrider.request import Event, Finished

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


async def run(
    service: CoordinatorService, asked: Asked, tenant: str, traceparent: str
) -> AsyncGenerator[tuple[int, Event]]:
    """The events of all choices as they come, each with its choice's index. None runs before every
    one of them was admitted, and none goes on once one of them has failed, or the iterator is
    closed. Raises as `CoordinatorService.generate` does, in the body's words."""
    streams = [
        _stream(service, asked, index, tenant, traceparent) for index in range(len(asked.requests))
    ]
    try:
        if len(streams) == 1:  # Nothing to wait for beside it: no queue, and no task of its own.
            async for event in streams[0]:
                yield 0, event
            return
        first = await _all([anext(stream) for stream in streams])
        for index, event in enumerate(first):
            yield index, event
        async with aclosing(_interleaved(streams)) as events:
            async for pair in events:
                yield pair
    finally:
        for stream in streams:
            await stream.aclose()


async def _stream(
    service: CoordinatorService, asked: Asked, index: int, tenant: str, traceparent: str
) -> AsyncGenerator[Event]:
    """The events of one of the requests."""
    request = asked.requests[index]
    try:
        async with aclosing(
            service.generate(request, tenant, traceparent, resumable=False)
        ) as events:
            async for event in events:
                yield event
    except BadRequest as error:
        raise asked.renamed(error, index) from error


async def _all(waiting: Sequence[object]) -> list[Event]:
    """What each brings. The first error is raised once all have ended."""
    found = await asyncio.gather(*waiting, return_exceptions=True)  # type: ignore[call-overload]
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return list(found)


async def _interleaved(
    streams: Sequence[AsyncGenerator[Event]],
) -> AsyncGenerator[tuple[int, Event]]:
    """The events of all streams as they come; the first error ends it. A stream waits while
    `EVENTS_AHEAD_MAX` events do."""
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

    def __init__(self, service: CoordinatorService, gate: Gate, closing: asyncio.Event) -> None:
        """`gate` counts what callers run; `closing` is set when the server waits no longer for
        that."""
        self._service = service
        self._gate = gate
        self._closing = closing

    async def answer(self, request: Request, asked: Asked, shape: Shape) -> Response:
        """The answer to a request whose body has been read. An error before the first token is
        raised, also where a stream is asked for. A client that goes takes its sessions with it."""
        events = self.events(request, asked)
        if asked.streams:
            return await self.stream(request, self._chunks(asked, shape, events))
        connection = Connection(request.receive, self._closing)
        try:
            return json_response(await connection.while_open(self._whole(asked, shape, events)))
        except ClientGone:
            return Unsent()

    def events(self, request: Request, asked: Asked) -> AsyncGenerator[tuple[int, Event]]:
        """The events of all choices as they come, each with its choice's index; they count as one
        request of who calls, and as a generation each. Raises `BadRequest` for more of these than
        there can ever be room for."""
        caller: Caller = request.state.caller
        number = len(asked.requests)
        if 0 < caller.concurrency < number:
            raise BadRequest(
                "n" if asked.n > 1 else "prompt",
                f"asks for {number} generations; the key {caller.name!r} may run "
                f"{caller.concurrency} at a time",
            )
        running = run(self._service, asked, caller.tenant, _traceparent(request))
        return self._counted(caller, number, running)

    async def stream(self, request: Request, chunks: AsyncGenerator[Json]) -> Response:
        """An answer of chunks as they come, of which there is one at least. An error before the
        first is raised. A client that goes closes them."""
        connection = Connection(request.receive, self._closing)
        try:
            first = await connection.while_open(_first(chunks))
        except BaseException as error:
            await chunks.aclose()  # The first one may have come, and nobody has it.
            if isinstance(error, ClientGone):
                return Unsent()
            raise
        return EventStream(connection, first, chunks)

    async def _counted(
        self, caller: Caller, number: int, running: AsyncGenerator[tuple[int, Event]]
    ) -> AsyncGenerator[tuple[int, Event]]:
        """The events of so many choices. Their places are free when the last one ends, so that who
        has that may ask again."""
        admitted = self._gate.admit(caller, num_generations=number)
        async with aclosing(running), admitted as grant:
            async for index, event in running:
                number -= isinstance(event, Finished)
                if number == 0:
                    await grant.release()
                yield index, event

    async def _whole(
        self, asked: Asked, shape: Shape, events: AsyncGenerator[tuple[int, Event]]
    ) -> Json:
        answer = Answer(asked, shape, self._service.text, self._bound(asked), _now())
        async with aclosing(events):
            async for index, event in events:
                answer.add(index, event)
        return answer.whole()

    async def _chunks(
        self, asked: Asked, shape: Shape, events: AsyncGenerator[tuple[int, Event]]
    ) -> AsyncGenerator[Json]:
        chunks = Chunks(asked, shape, self._service.text, self._bound(asked), _now())
        async with aclosing(events):
            async for index, event in events:
                for chunk in chunks.take(index, event):
                    yield chunk

    def _bound(self, asked: Asked) -> int:
        """The most draft tokens of a round."""
        given = asked.requests[0].num_draft_tokens
        return self._service.defaults.num_draft_tokens if given is None else given


async def _first(chunks: AsyncGenerator[Json]) -> dict[str, Any]:
    async for chunk in chunks:
        return chunk
    raise InvariantError("an answer without a chunk")


def _now() -> int:
    return int(time.time())


def _traceparent(request: Request) -> str:
    """The trace that the caller is part of, as W3C Trace Context has it; empty if it names none."""
    found = request.headers.get("traceparent", "")
    return found if len(found) <= TRACEPARENT_CHARS_MAX else ""
