"""Answers a request for a generation, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coordinator.service import CoordinatorService
from outrider.errors import BadRequest, InvariantError
from outrider.limits import TRACEPARENT_CHARS_MAX
from outrider.request import Event, Finished
from outrider.security.callers import Caller
from outrider.security.gate import Gate

from .answers import Answer, Chunks, Json, Shape
from .rendering import json_response
from .running import run
from .streaming import ClientGone, Connection, EventStream, Unsent
from .translation import Asked


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
