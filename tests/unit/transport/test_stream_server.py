"""When the replica's end of a stream ends, with a replica that answers on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from rounds import make_head

from outrider.limits import FRAME_BYTES_MAX, SESSIONS_PER_COORDINATOR_MAX, STREAM_QUEUE_ITEMS_MAX
from outrider.messages import DraftItem, Refused, VerifyItem
from outrider.transport import codec
from outrider.transport.stream_server import ReplicaServicer, SendQueue

FIRST = VerifyItem(make_head((1, 2)))
SECOND = VerifyItem(make_head((1, 2, 3), 2, round_index=1))
OTHER = VerifyItem(make_head((1, 2), session=2))
HELD = DraftItem(make_head((1, 2)), 4, 1, held=(3,))


class Replica:
    """A `ReplicaService` that records its items."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.send: Callable[[Sequence[Any]], None] = lambda answers: None

    def connect(self, send: Callable[[Sequence[Any]], None]) -> Any:
        self.send = send
        return self

    def receive(self, items: Sequence[Any]) -> None:
        self.items += items

    def close(self) -> None:
        """Nothing is open."""

    def answer(self, item: Any) -> None:
        self.send([Refused(item.head.key, 8, "full")])


class Served:
    """A stream whose caller sends only these items."""

    def __init__(self, codec: Any, *items: Any) -> None:
        self.replica = Replica()
        # Only what a stream calls.
        server: Any = ReplicaServicer(self.replica, codec)  # type: ignore[arg-type]
        self._codec = codec
        self.replies = server.stream(self._frames(items))
        self.seen: list[tuple[str, int]] = []
        self.reading = asyncio.create_task(self._read())

    async def _frames(self, items: Sequence[Any]) -> AsyncIterator[Any]:
        for item in items:
            yield self._codec.request.FromString(self._codec.item_frame(item))

    async def _read(self) -> None:
        async for frame in self.replies:
            answers = self._codec.reply.FromString(frame).items
            self.seen += [(answer.session_id, answer.round) for answer in answers]

    async def asked(self, number: int) -> None:
        async with asyncio.timeout(5):
            while len(self.replica.items) < number:
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("items", "answers"),
    [
        ((FIRST,), (FIRST,)),
        ((FIRST, FIRST), (FIRST,)),
        ((FIRST, SECOND), (SECOND,)),
        ((FIRST, SECOND, FIRST), (FIRST, SECOND)),
        ((FIRST, OTHER), (OTHER, FIRST)),
    ],
    ids=["one", "the same twice", "a newer round", "an older one behind it", "two sessions"],
)
async def test_it_ends_with_the_last_answer_that_is_waited_for(
    items: tuple[VerifyItem, ...], answers: tuple[VerifyItem, ...]
) -> None:
    served = Served(codec.VERIFY, *items)
    await served.asked(len(items))
    for item in answers:
        assert not served.reading.done(), "it ended before all answers had come"
        served.replica.answer(item)
        for _ in range(10):
            await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await served.reading
    assert served.seen == [(item.head.session_id, item.head.round) for item in answers]


async def test_a_caller_that_only_looks_ahead_waits_for_nothing() -> None:
    served = Served(codec.DRAFT, HELD)
    async with asyncio.timeout(5):
        await served.reading
    assert served.replica.items == [HELD]


async def test_what_it_remembers_of_rounds_is_bounded() -> None:
    number = SESSIONS_PER_COORDINATOR_MAX + 2
    items = [VerifyItem(make_head((1, 2), session=session)) for session in range(number)]
    served = Served(codec.VERIFY, *items)
    await served.asked(number)
    for item in items[2:]:
        served.replica.answer(item)
    async with asyncio.timeout(10):
        await served.reading
    assert len(served.seen) == SESSIONS_PER_COORDINATOR_MAX


async def test_the_number_of_messages_and_the_size_of_frames_are_bounded() -> None:
    """Three messages of 0.4 frames leave as two and one; an oversized one travels alone."""
    outbox = SendQueue()
    small, large = FRAME_BYTES_MAX * 2 // 5, FRAME_BYTES_MAX * 3 // 2
    for size in (small, small, small, large, 1):
        outbox.put(bytes(size))
    assert [len(outbox.gather()) for _ in range(5)] == [2 * small, small, large, 1, 0]
    assert all(outbox.put(b"x") for _ in range(STREAM_QUEUE_ITEMS_MAX))
    assert not outbox.put(b"x")
