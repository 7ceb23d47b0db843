"""The sessions of one request, which run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from coordinator.service import CoordinatorService
from outrider.errors import BadRequest
from outrider.limits import EVENTS_AHEAD_MAX
from outrider.request import Event

from .translation import Asked


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
