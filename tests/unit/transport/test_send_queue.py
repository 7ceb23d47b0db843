"""The outbox bounds what waits, and frames hold as much as a frame may."""

from __future__ import annotations

import asyncio

from outrider.limits import FRAME_BYTES_MAX, STREAM_QUEUE_ITEMS_MAX
from outrider.transport.stream_server import SendQueue
from outrider.v1 import types_pb2


def message(size: int) -> types_pb2.Refused:
    return types_pb2.Refused(message="x" * size)


async def test_it_takes_so_many_and_no_more() -> None:
    outbox = SendQueue()
    assert all(outbox.put(message(1)) for _ in range(STREAM_QUEUE_ITEMS_MAX))
    assert not outbox.put(message(1))
    assert len(outbox.gather()) == STREAM_QUEUE_ITEMS_MAX
    assert outbox.put(message(1))


async def test_a_frame_holds_everything_up_to_its_size() -> None:
    """Three items of 0.4 frames leave as two and one; an oversized one travels alone."""
    outbox = SendQueue()
    for size in (0.4, 0.4, 0.4, 1.5, 0.1):
        outbox.put(message(int(size * FRAME_BYTES_MAX)))
    sizes = []
    while frame := outbox.gather():
        sizes.append(len(frame))
    assert sizes == [2, 1, 1, 1]


async def test_waiting_ends_with_the_next_message_or_wake() -> None:
    outbox = SendQueue()
    waiter = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    outbox.put(message(1))
    await waiter
    waiter = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    outbox.wake()
    await waiter
