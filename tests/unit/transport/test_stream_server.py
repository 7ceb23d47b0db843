"""The replica's end of a stream, and its queue of answers."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from outrider.interfaces.messages import VerifyItem
from outrider.limits import FRAME_BYTES_MAX, STREAM_QUEUE_ITEMS_MAX
from outrider.transport.codec import VERIFY
from outrider.transport.stream_server import ReplicaServicer, SendQueue
from tests.support.rounds import make_head

ITEM = VerifyItem(make_head((1, 2)))


class Replica:
    """A `ReplicaService` that records its items."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.is_closed = False

    def connect(self, send: Callable[[Sequence[Any]], None]) -> Any:
        return self

    def receive(self, items: Sequence[Any]) -> None:
        self.items += items

    def close(self) -> None:
        self.is_closed = True


async def test_it_ends_when_its_caller_sends_no_more() -> None:
    replica = Replica()
    server: Any = ReplicaServicer(replica, VERIFY)  # type: ignore[arg-type]

    async def frames() -> AsyncIterator[Any]:
        yield VERIFY.request.FromString(VERIFY.item_frame(ITEM))

    assert [frame async for frame in server.stream(frames(), None)] == []
    assert (replica.items, replica.is_closed) == ([ITEM], True)


async def test_the_number_of_messages_and_the_size_of_frames_are_bounded() -> None:
    """Three messages of 0.4 frames leave as two and one; an oversized one travels alone."""
    outbox = SendQueue()
    small, large = FRAME_BYTES_MAX * 2 // 5, FRAME_BYTES_MAX * 3 // 2
    for size in (small, small, small, large, 1):
        outbox.put(bytes(size))
    assert [len(outbox.gather()) for _ in range(5)] == [2 * small, small, large, 1, 0]
    assert all(outbox.put(b"x") for _ in range(STREAM_QUEUE_ITEMS_MAX))
    assert not outbox.put(b"x")
