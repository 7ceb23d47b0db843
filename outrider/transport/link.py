"""The interfaces of a stream's two ends, at a coordinator and at a replica. A stream carries the
items and answers of many sessions, several in one frame.

`outrider.transport.grpc_link` and `outrider.transport.stream_server` are the two ends over gRPC.
`MemoryLink` connects a coordinator to a replica in the same process."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from outrider.errors import InvariantError, LinkLost, Unavailable, check
from outrider.interfaces.messages import (
    Answer,
    DraftAnswer,
    DraftItem,
    Item,
    Prefix,
    ReplicaDescription,
    RoundAnswer,
    RoundItem,
    VerifyAnswer,
    VerifyItem,
)


def _unheard(_: object) -> None:
    raise InvariantError("listen before the first send")


class Link(Generic[Item, Answer]):
    """The coordinator's end of a stream. All methods must be called on the event loop's thread.
    In service, it is a `GrpcLink` (`outrider.transport.grpc_link`)."""

    def __init__(self) -> None:
        self.num_bytes = Counter(sent=0, received=0)  # bytes of frames; any thread may read this
        # In coordinators, these are `_deliver` and `lose` of a `ReplicaConnection`.
        self._on_answer: Callable[[Answer], None] = _unheard
        self._on_lost: Callable[[Exception], None] = _unheard
        self._closed = False

    def listen(
        self, on_answer: Callable[[Answer], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Registers the callbacks for answers and for a broken stream. Must be called once, before
        the first `send`. After `on_lost`, items that were sent earlier get no answer."""
        check(not self._has_listener, "a link has one listener")
        self._on_answer, self._on_lost = on_answer, on_lost

    @property
    def _has_listener(self) -> bool:
        return self._on_answer is not _unheard

    def send(self, item: Item) -> None:
        """Queues an item without waiting. Reopens a broken stream. Raises `Overloaded` if
        `STREAM_QUEUE_ITEMS_MAX` items wait, and `LinkLost` if the replica cannot be reached."""
        raise NotImplementedError

    def release(self, session_id: str, epoch: int, learned: Prefix | None = None) -> None:
        """Tells the replica to forget a session. Its look-up may learn the tokens `learned`, which
        must be stored. Does not wait, and ignores failures."""
        raise NotImplementedError

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        """Asks the replica what it runs. Raises `Unavailable` if the replica does not answer."""
        raise NotImplementedError

    async def close(self) -> None:
        """Closes the stream. Afterwards, no callback is called."""
        raise NotImplementedError


TargetLink = Link[VerifyItem, VerifyAnswer]
DraftLink = Link[DraftItem, DraftAnswer]

Taken = TypeVar("Taken", bound=RoundItem, contravariant=True)


class Connection(Protocol[Taken]):
    """The replica's end of one stream. `outrider.replica.service` implements it."""

    def receive(self, items: Sequence[Taken]) -> None:
        """Takes the items of one frame without waiting. An item that cannot be taken gets the
        answer `Refused`."""

    def close(self) -> None:
        """Called when the stream has ended. Drops the stream's queued work, and frees the pages of
        the stream's sessions."""


class ReplicaService(Protocol[Taken]):
    """A draft or a target. Knows neither gRPC nor Ray. `SteppedService` implements it
    (`outrider.replica.service`)."""

    def connect(self, send: Callable[[Sequence[RoundAnswer]], None]) -> Connection[Taken]:
        """Opens a stream. The event loop's thread calls `send` once for all answers of a step."""

    def describe(self) -> ReplicaDescription:
        """Describes what the replica runs."""

    def release(self, session_id: str, epoch: int, learned: Prefix | None = None) -> None:
        """Forgets a session, unless the replica knows a newer epoch of the session. Its look-up may
        learn the tokens `learned`."""


class MemoryLink(Link[Item, RoundAnswer]):
    """A link to a service on the same event loop."""

    def __init__(
        self,
        service: ReplicaService[Item],
        deliver: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`deliver` calls a function later, by default in the event loop's next iteration."""
        super().__init__()
        self._service = service
        self._deliver = deliver or (lambda call: asyncio.get_running_loop().call_soon(call))
        self._connection: Connection[Item] | None = None
        self._number = 0  # number of the connection; messages of earlier connections are dropped

    def trouble(self) -> str:
        """Why the replica cannot be reached; empty if it can be reached."""
        return "the link is closed" if self._closed else ""

    def send(self, item: Item) -> None:
        if trouble := self.trouble():
            raise LinkLost(f"the replica cannot be reached: {trouble}")
        check(self._has_listener, "listen before the first send")
        if self._connection is None:
            self._number += 1
            self._connection = self._service.connect(partial(self._answered, self._number))
        self._deliver(partial(self._receive, self._number, item))

    def release(self, session_id: str, epoch: int, learned: Prefix | None = None) -> None:
        if not self.trouble():
            self._deliver(partial(self._service.release, session_id, epoch, learned))

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        await asyncio.sleep(0)
        if trouble := self.trouble():
            raise Unavailable(f"the replica cannot be reached: {trouble}")
        return self._service.describe()

    async def close(self) -> None:
        self._closed = True
        self._disconnect()
        await asyncio.sleep(0)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._number += 1
            self._connection.close()
            self._connection = None

    def _receive(self, number: int, item: Item) -> None:
        if number == self._number and self._connection is not None:
            self._connection.receive([item])

    def _answered(self, number: int, answers: Sequence[RoundAnswer]) -> None:
        for answer in answers:
            self._deliver(partial(self._heard, number, answer))

    def _heard(self, number: int, answer: RoundAnswer) -> None:
        if number == self._number:
            self._on_answer(answer)
