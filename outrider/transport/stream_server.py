"""The replica's end of a stream: what the servicers of draft and target share.

The caller decides how a stream ends. After a half-close (no more items) the last round of each
session is still answered. After a cancel or a broken connection queued work is dropped."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from outrider.errors import BadRequest, Overloaded, Unavailable
from outrider.limits import (
    FRAME_BYTES_MAX,
    SESSIONS_PER_COORDINATOR_MAX,
    STREAM_QUEUE_ITEMS_MAX,
    STUCK_WRITE_MS,
)
from outrider.messages import Refused, ReplyKey, Resync, RoundHead, RoundItem
from outrider.newest import Newest
from outrider.tokens import EMPTY_DIGEST
from outrider.transport.codec import Codec, session_id_from_wire, to_proto
from outrider.transport.link import Connection, ReplicaService
from outrider.transport.server import Service
from outrider.v1 import types_pb2

_ECHOED_SESSION_ID_CHARS = 64


class ReplicaServicer:
    """Answers the gRPC calls of one `ReplicaService`."""

    def __init__(self, service: ReplicaService, codec: Codec) -> None:
        self._service = service
        self._codec = codec
        self._readers: dict[asyncio.Task[None], SendQueue] = {}
        """Reader task of each open stream, and the queue of its answers."""
        self._ending: asyncio.Task[None] | None = None
        setattr(self, codec.stream_method.lower(), self.stream)

    @property
    def grpc_service(self) -> Service:
        return Service(self._codec.service, self)

    async def stream(
        self, frames: AsyncIterator[Any], context: Any = None
    ) -> AsyncGenerator[bytes]:
        """Takes frames of items and yields frames of answers, until the caller ends the stream.
        Raises errors of `frames`, and `Overloaded` when the caller does not read its answers. If a
        write stays stuck, cancels the iterating task."""
        stream = _Stream(self._codec, asyncio.current_task())
        stream.connection = self._service.connect(stream.answer)
        reader = asyncio.create_task(stream.read(frames), name="stream reader")
        reader.add_done_callback(lambda _: stream.outbox.wake())
        self._readers[reader] = stream.outbox
        if self._ending is not None:
            reader.cancel()
        try:
            while True:
                await stream.outbox.wait()
                while frame := stream.outbox.gather():
                    stream.writing = True
                    yield frame
                    stream.writing = False
                if stream.failure is not None:
                    raise stream.failure
                if self._ending is not None and self._ending.done():
                    raise Unavailable("this replica is stopping")
                if reader.done() and not reader.cancelled():
                    reader.result()
                    if not stream.unanswered:
                        return
        finally:
            stream.writing = False
            del self._readers[reader]
            reader.cancel()
            stream.connection.close()

    def finish(self, drained: Coroutine[Any, Any, None]) -> None:
        """Takes no more items. When `drained` returns, every stream sends its answers and ends with
        `Unavailable`. They end at the same time, because a coordinator that loses one of its two
        streams also gives up the other, and repeats its unanswered items."""
        self._ending = asyncio.create_task(drained)
        self._ending.add_done_callback(self._wake_all)
        for reader in self._readers:
            reader.cancel()

    def _wake_all(self, _: asyncio.Task[None]) -> None:
        for outbox in self._readers.values():
            outbox.wake()

    async def describe(
        self, request: types_pb2.DescribeRequest, context: Any
    ) -> types_pb2.ReplicaDescription:
        """Describes the replica."""
        return to_proto(self._service.describe(), types_pb2.ReplicaDescription)

    async def release(
        self, request: types_pb2.ReleaseRequest, context: Any
    ) -> types_pb2.ReleaseReply:
        """Forgets a session unless a newer epoch of it is known."""
        self._service.release(session_id_from_wire(request.session_id), request.epoch)
        return types_pb2.ReleaseReply()


class _Stream:
    """One stream: its outbox, parameters of its sessions, and unanswered items."""

    connection: Connection

    def __init__(self, codec: Codec, task: asyncio.Task[Any] | None) -> None:
        self._codec = codec
        self._task = task
        self.writing = False
        """Whether a frame is being written. While the caller does not read, this stays true."""
        self.outbox = SendQueue()
        self.failure: Exception | None = None
        """Why the stream must end, if it must."""
        self.unanswered: Newest[str, ReplyKey] = Newest(SESSIONS_PER_COORDINATOR_MAX)
        """The newest unanswered round of each session. Older rounds and repetitions need no answer.
        A target that runs ahead also answers later rounds."""
        self._known: Newest[str, RoundHead] = Newest(SESSIONS_PER_COORDINATOR_MAX)
        """By session, the head with which its parameters came in full."""

    async def read(self, frames: AsyncIterator[Any]) -> None:
        """Passes the items of each frame to the service in one call."""
        async for frame in frames:
            items: list[RoundItem] = []
            for message in frame.items:
                item = self._decode(message)
                if item is not None:
                    items.append(item)
            for item in items:
                if item.awaits_answer:
                    self._await(item.head.key)
            if items:
                self.connection.receive(items)

    def answer(self, answers: Sequence[Any]) -> None:
        """Queues answers of the service; ends the stream when the caller does not read."""
        for answer in answers:
            if self.unanswered.get(answer.key.session_id) == answer.key:
                del self.unanswered[answer.key.session_id]
            try:
                frame = self._codec.answer_frame(answer)
            except Exception as error:  # noqa: BLE001 - raised by `serve`, for this stream alone
                self._fail(error)
                return
            if not self.outbox.put(frame):
                number = STREAM_QUEUE_ITEMS_MAX
                self._fail(Overloaded(f"{number} answers wait to be read on this stream"))
                return

    def _await(self, key: ReplyKey) -> None:
        known = self.unanswered.get(key.session_id)
        if known is not None and (key.epoch, key.round) < (known.epoch, known.round):
            return  # It will be refused as stale.
        self.unanswered[key.session_id] = key

    def _fail(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self.outbox.wake()
        if self.writing:  # The caller may soon read the reason.
            asyncio.get_running_loop().call_later(STUCK_WRITE_MS / 1e3, self._give_up)

    def _give_up(self) -> None:
        if self.writing and self._task is not None:
            self._task.cancel()

    def _decode(self, message: Any) -> RoundItem | None:
        """The item with its parameters and constraint. If that is not possible, answers the item
        and returns None."""
        known = self._known.get(message.head.session_id)
        try:
            item = self._codec.item_from_proto(message, known)
        except BadRequest as error:
            asked = message.head  # Its fields may be invalid.
            key = ReplyKey(asked.session_id[:_ECHOED_SESSION_ID_CHARS], asked.epoch, asked.round)
            self.answer([Refused(key, error.grpc_code, error.message)])
            return None
        head = item.head
        if head.sampling is None:
            # The coordinator then sends tokens and parameters in full.
            self.answer([Resync(head.key, 0, EMPTY_DIGEST)])
            return None
        if known is None or head.sampling is not known.sampling:
            self._known[head.session_id] = replace(head, append=())
        return item


class SendQueue:
    """Frames of one message each, in order, at most `STREAM_QUEUE_ITEMS_MAX`. For the event loop's
    thread."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def put(self, frame: bytes) -> bool:
        """Queues a frame; False if the queue is full."""
        if len(self._waiting) >= STREAM_QUEUE_ITEMS_MAX:
            return False
        self._waiting.append(frame)
        self._changed.set()
        return True

    def wake(self) -> None:
        """Makes `wait` return although nothing was put."""
        self._changed.set()

    async def wait(self) -> None:
        """Returns once `put` or `wake` has been called since it last returned."""
        await self._changed.wait()
        self._changed.clear()

    def gather(self) -> bytes:
        """Joins waiting frames into one of at most `FRAME_BYTES_MAX` bytes; a longer one goes
        alone. Empty if none waits."""
        taken: list[bytes] = []
        total = 0
        while self._waiting and (not taken or total + len(self._waiting[0]) <= FRAME_BYTES_MAX):
            taken.append(self._waiting.popleft())
            total += len(taken[-1])
        return b"".join(taken)
