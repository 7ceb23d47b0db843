"""Both ends of a multiplexed stream between a coordinator and a replica.

Each end has two implementations: gRPC (`outrider.transport.grpc_link`,
`outrider.transport.stream_server`) and in one process (here)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from outrider.errors import LinkLost, Unavailable, check
from outrider.messages import ReplicaDescription


class Link:
    """The coordinator's end. All methods are for the event loop's thread. Items and answers are
    those of one kind of replica, see `outrider.messages`."""

    def __init__(self) -> None:
        self.num_bytes = Counter(sent=0, received=0)
        """Bytes of frames so far, 0 where nothing is serialised; may be read on any thread."""
        self._on_answer: Any = None
        self._on_lost: Any = None
        self._closed = False

    def listen(
        self, on_answer: Callable[[Any], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Registers callbacks for answers and for a broken stream. Items that are unanswered at a
        break get no answer later. Call it once, before the first `send`."""
        check(self._on_answer is None, "a link has one listener")
        self._on_answer, self._on_lost = on_answer, on_lost

    def send(self, item: Any) -> None:
        """Queues an item; never waits. Reopens a broken stream. Raises `Overloaded` when
        `STREAM_QUEUE_ITEMS_MAX` items wait, `LinkLost` when the replica cannot be reached now."""
        raise NotImplementedError

    def release(self, session_id: str, epoch: int) -> None:
        """Lets the replica forget the session; does not wait; best effort."""
        raise NotImplementedError

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        """Asks what the replica runs. Raises `Unavailable`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Closes the stream; no callback is called afterwards."""
        raise NotImplementedError


class Connection(Protocol):
    """The replica's end of one stream."""

    def receive(self, items: Sequence[Any]) -> None:
        """Takes items of one frame; answers go to the `send` given to `connect`. Never waits. The
        answer to an item that it cannot take is `Refused`."""

    def close(self) -> None:
        """The stream ended. Work whose answers only this stream awaited may be dropped."""


class ReplicaService(Protocol):
    """A draft or a target, without gRPC and Ray."""

    def connect(self, send: Callable[[Sequence[Any]], None]) -> Connection:
        """Opens a stream. `send` gets the answers of one step in one call, on the loop's thread."""

    def describe(self) -> ReplicaDescription:
        """What runs here."""

    def release(self, session_id: str, epoch: int) -> None:
        """Forgets a session unless a newer epoch of it is known."""


def deliver_soon(message: Callable[[], None]) -> None:
    """Delivers messages in order, in the event loop's next turn."""
    asyncio.get_running_loop().call_soon(message)


class MemoryLink(Link):
    """The coordinator's end of a stream to a service in the same event loop."""

    def __init__(
        self,
        service: ReplicaService,
        deliver: Callable[[Callable[[], None]], None] = deliver_soon,
    ) -> None:
        super().__init__()
        self._service = service
        self._deliver = deliver
        self._connection: Connection | None = None
        self._number = 0
        """Number of the connection; grows when a connection begins or ends. Messages of earlier
        connections are dropped."""

    def trouble(self) -> str:
        """Why the replica cannot be reached; empty if it can."""
        return "the link is closed" if self._closed else ""

    def send(self, item: Any) -> None:
        """See `Link.send`. Never raises `Overloaded`: `deliver` bounds the items under way."""
        if trouble := self.trouble():
            raise LinkLost(f"the replica cannot be reached: {trouble}")
        check(self._on_answer is not None, "listen before the first send")
        if self._connection is None:
            self._number += 1
            self._connection = self._service.connect(partial(self._answered, self._number))
        self._deliver(partial(self._receive, self._number, item))

    def release(self, session_id: str, epoch: int) -> None:
        if not self.trouble():
            service = self._service
            self._deliver(lambda: service.release(session_id, epoch))

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        """See `Link.describe`; the timeout is not needed."""
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

    def _receive(self, number: int, item: Any) -> None:
        if number == self._number and self._connection is not None:
            self._connection.receive([item])

    def _answered(self, number: int, answers: Sequence[Any]) -> None:
        for answer in answers:
            self._deliver(partial(self._heard, number, answer))

    def _heard(self, number: int, answer: Any) -> None:
        if number == self._number:
            self._on_answer(answer)
