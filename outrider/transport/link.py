"""A multiplexed stream between a coordinator and a replica, seen from both ends.

Two implementations of each end: gRPC (`outrider.transport.grpc_link`,
`outrider.transport.stream_server`) and in one process (`outrider.transport.memory_link`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from outrider.messages import ReplicaDescription

Item_contra = TypeVar("Item_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)


class LinkBytes:
    """Bytes of a link's frames so far; may be read on any thread."""

    __slots__ = ("received", "sent")

    def __init__(self, sent: int = 0, received: int = 0) -> None:
        self.sent = sent
        self.received = received


class Link(Protocol, Generic[Item_contra, Answer_co]):
    """The coordinator's end. Every method is for the event loop's thread."""

    @property
    def num_bytes(self) -> LinkBytes:
        """Of what it has sent and heard; 0 where nothing is made bytes of."""
        ...

    def listen(
        self, on_answer: Callable[[Answer_co], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Names who hears answers, and who hears that the stream broke: every item without an
        answer is then unanswered for good. Call it once, before the first `send`."""
        ...

    def send(self, item: Item_contra) -> None:
        """Queues an item; never waits. A broken stream is opened anew by the next `send`.
        Raises `Overloaded` when `STREAM_QUEUE_ITEMS_MAX` items wait, `LinkLost` when the replica
        cannot be reached at present."""
        ...

    def release(self, session_id: str, epoch: int) -> None:
        """Tells the replica, without waiting, that it may forget the session; best effort."""
        ...

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        """Asks what the replica runs. Raises `Unavailable`."""
        ...

    async def close(self) -> None:
        """Closes the stream; nothing is heard afterwards."""
        ...


class Connection(Protocol, Generic[Item_contra]):
    """The replica's end of one stream."""

    def receive(self, items: Sequence[Item_contra]) -> None:
        """Takes items of one frame; answers come through the `send` given to `connect`. Never
        waits; an item that cannot be taken is answered `Refused`."""
        ...

    def close(self) -> None:
        """The stream ended: work that only it waited for may be dropped."""
        ...


class ReplicaService(Protocol, Generic[Item_contra, Answer_co]):
    """What serves such streams: a draft or a target, without gRPC, without Ray."""

    def connect(self, send: Callable[[Sequence[Answer_co]], None]) -> Connection[Item_contra]:
        """A new stream. `send` takes the answers of one step in one call, on the loop's thread."""
        ...

    def describe(self) -> ReplicaDescription:
        """What runs here."""
        ...

    def release(self, session_id: str, epoch: int) -> None:
        """Forgets a session unless a newer epoch of it is known."""
        ...
