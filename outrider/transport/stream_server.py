"""The replica's end of a stream, over gRPC."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Generic

from outrider import limits
from outrider.errors import BadRequest, Overloaded, Unavailable
from outrider.foundation.bounded_dict import BoundedDict
from outrider.foundation.tokens import EMPTY_DIGEST
from outrider.interfaces.messages import (
    Answer,
    Item,
    Prefix,
    Refused,
    ReplyKey,
    Resync,
    RoundAnswer,
    RoundHead,
)
from outrider.transport.codec import Codec, ItemFrame, ItemMessage, session_id_from_wire
from outrider.transport.fields import to_proto
from outrider.transport.link import Connection, ReplicaService
from outrider.transport.server import Context, Service, both_stream, unary
from outrider.v1 import types_pb2

_ECHOED_SESSION_ID_CHARS = 64


class ReplicaServicer(Generic[Item, Answer]):
    """Answers the gRPC calls of one `ReplicaService`."""

    def __init__(self, service: ReplicaService[Item], codec: Codec[Item, Answer]) -> None:
        self._service = service
        self._codec = codec
        self._readers: dict[asyncio.Task[None], SendQueue] = {}  # queues of answers, by reader
        self._ending: asyncio.Task[None] | None = None

    @property
    def grpc_service(self) -> Service:
        codec = self._codec
        methods = {
            codec.stream_method: both_stream(codec.request, self.stream),
            "Describe": unary(types_pb2.DescribeRequest, self.describe),
            "Release": unary(types_pb2.ReleaseRequest, self.release),
        }
        return Service(codec.service, methods)

    async def stream(
        self, frames: AsyncIterator[ItemFrame], context: Context
    ) -> AsyncGenerator[bytes]:
        """Takes parsed requests (frames of items), and yields serialized replies (frames of
        answers), until the caller ends the stream. Raises errors of `frames`, and `Overloaded` if
        too many answers wait because the caller does not read. If a pending write delays the error
        by `STUCK_WRITE_MS`, cancels this task."""
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
                    return
        finally:
            stream.writing = False
            del self._readers[reader]
            reader.cancel()
            stream.connection.close()

    def finish(self, drained: Coroutine[None, None, None]) -> None:
        """Takes no more items. When `drained` returns, all streams send their queued answers and
        end with `Unavailable`. They end at the same time, because a coordinator with two streams
        cancels both when one ends, and would lose the answers queued on the other."""
        self._ending = asyncio.create_task(drained)
        self._ending.add_done_callback(self._wake_all)
        for reader in self._readers:
            reader.cancel()

    def _wake_all(self, _: asyncio.Task[None]) -> None:
        for outbox in self._readers.values():
            outbox.wake()

    async def describe(
        self, request: types_pb2.DescribeRequest, context: Context
    ) -> types_pb2.ReplicaDescription:
        """See `ReplicaService.describe`."""
        return to_proto(self._service.describe(), types_pb2.ReplicaDescription)

    async def release(
        self, request: types_pb2.ReleaseRequest, context: Context
    ) -> types_pb2.ReleaseReply:
        """See `ReplicaService.release`."""
        learned = None
        if request.learned_length:
            learned = Prefix(request.learned_length, request.learned_digest)
        self._service.release(session_id_from_wire(request.session_id), request.epoch, learned)
        return types_pb2.ReleaseReply()


class _Stream(Generic[Item, Answer]):
    connection: Connection[Item]

    def __init__(self, codec: Codec[Item, Answer], task: asyncio.Task[object] | None) -> None:
        self._codec = codec
        self._task = task
        self.writing = False  # whether a write is pending; it ends only if the caller reads
        self.outbox = SendQueue()
        self.failure: Exception | None = None  # the error with which the stream must end
        self._known: BoundedDict[str, RoundHead] = BoundedDict(limits.SESSIONS_PER_COORDINATOR_MAX)
        """For each session, the last head that had sampling parameters, not only their hash."""

    async def read(self, frames: AsyncIterator[ItemFrame]) -> None:
        """Passes the items of parsed requests to the service, until `frames` ends."""
        async for frame in frames:
            decoded = map(self._decode, frame.items)
            if items := [item for item in decoded if item is not None]:
                self.connection.receive(items)

    def answer(self, answers: Sequence[RoundAnswer]) -> None:
        """Queues answers. A full queue ends the stream, because the caller does not read."""
        try:
            for answer in answers:
                if not self.outbox.put(self._codec.answer_frame(answer)):
                    number = limits.STREAM_QUEUE_ITEMS_MAX
                    raise Overloaded(f"{number} answers wait to be read on this stream")
        except Exception as error:  # noqa: BLE001 - `stream` raises it, and only this stream ends
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self.outbox.wake()
        if self.writing:  # If the caller reads again within this time, it gets the error.
            asyncio.get_running_loop().call_later(limits.STUCK_WRITE_MS / 1e3, self._give_up)

    def _give_up(self) -> None:
        if self.writing and self._task is not None:
            self._task.cancel()

    def _decode(self, message: ItemMessage) -> Item | None:
        """Decodes an item. If the item is invalid, or its parameters are unknown, answers the item
        at once and returns None."""
        known = self._known.get(message.head.session_id)
        try:
            item = self._codec.item_from_proto(message, known)
        except BadRequest as error:
            echoed = message.head  # Its fields may be invalid.
            key = ReplyKey(echoed.session_id[:_ECHOED_SESSION_ID_CHARS], echoed.epoch, echoed.round)
            self.answer([Refused(key, error.grpc_code, error.message)])
            return None
        head = item.head
        if head.sampling is None:
            self.answer([Resync(head.key, 0, EMPTY_DIGEST)])
            return None
        if known is None or head.sampling is not known.sampling:
            self._known[head.session_id] = replace(head, append=())
        return item


class SendQueue:
    """A queue of at most `STREAM_QUEUE_ITEMS_MAX` frames, each with one message. All methods must
    be called on the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def put(self, frame: bytes) -> bool:
        """Queues a frame, or returns False if the queue is full."""
        if len(self._waiting) >= limits.STREAM_QUEUE_ITEMS_MAX:
            return False
        self._waiting.append(frame)
        self._changed.set()
        return True

    def wake(self) -> None:
        self._changed.set()

    async def wait(self) -> None:
        """Returns when `put` or `wake` has been called since the last `wait`."""
        await self._changed.wait()
        self._changed.clear()

    def gather(self) -> bytes:
        """Joins queued frames into a frame of at most `FRAME_BYTES_MAX` bytes. A queued frame that
        is longer is returned alone. Returns no bytes if the queue is empty."""
        taken, room = list[bytes](), limits.FRAME_BYTES_MAX
        while self._waiting and (not taken or len(self._waiting[0]) <= room):
            taken.append(self._waiting.popleft())
            room -= len(taken[-1])
        return b"".join(taken)
