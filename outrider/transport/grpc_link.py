"""The coordinator's end of the stream to a replica, over gRPC.

A link has one channel with up to two streams. The bulk stream is for large items (long prompts),
and for items with large answers (features of many tokens). So large messages do not delay the items
of the normal stream. On each stream, a session's first item has the sampling parameters and the
constraint in full, and later items have only hashes of both. After a `Resync`, the next item has
both in full again, because the replica may have lost them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from random import random
from typing import Generic

import grpc
from google.protobuf.message import DecodeError

from outrider import limits
from outrider.errors import BadRequest, LinkLost, Overloaded, Unavailable, check
from outrider.foundation.backoff import backoff
from outrider.interfaces.messages import Answer, Item, Prefix, ReplicaDescription, Resync
from outrider.transport.channel import PLAIN, Trust, open_channel
from outrider.transport.codec import Codec
from outrider.transport.fields import from_proto
from outrider.transport.link import Link
from outrider.transport.status import status_to_error
from outrider.transport.stream_server import SendQueue
from outrider.v1 import types_pb2

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0
_ITEM_BYTES_MAX = (
    limits.GRPC_MESSAGE_BYTES_MAX - (limits.GRPC_MESSAGE_BYTES_MAX - limits.FRAME_BYTES_MAX) // 8
)
"""Largest size in bytes of an item's frame for the normal stream. It is below gRPC's limit, because
the item's frame for the bulk stream is larger if it must have the parameters in full."""


class GrpcLink(Link[Item, Answer]):
    """After a stream breaks, `send` raises `LinkLost` for a time. The first `send` after that time
    opens a new stream. With each failed attempt, the time doubles, from `LINK_BACKOFF_MS_MIN` up to
    `LINK_BACKOFF_MS_MAX`."""

    def __init__(self, codec: Codec[Item, Answer], address: str, trust: Trust = PLAIN) -> None:
        """Opens a link to the target (`codec.VERIFY`) or draft (`codec.DRAFT`) at host:port. Must
        be called on the link's event loop."""
        super().__init__()
        self._channel = open_channel(address, trust, is_link=True)
        self._codec = codec
        self._address = address
        self._open_call = self._channel.stream_stream(codec.path(codec.stream_method), None, None)
        self._describe = self._channel.unary_unary(codec.path("Describe"), None, None)
        self._release = self._channel.unary_unary(codec.path("Release"), None, None)
        self._streams: dict[str, _Stream[Item, Answer]] = {}
        """The open streams by name: "normal" and "bulk"."""
        self._failures = 0
        self._down_until = 0.0
        self._background: set[asyncio.Task[None]] = set()
        self._releases: deque[tuple[str, int, Prefix | None]] = deque(
            maxlen=limits.RELEASES_WAITING_MAX
        )
        self._num_releasing = 0

    def send(self, item: Item) -> None:
        """See `Link.send`. Also raises `BadRequest` if the item is too large for a message, or has
        a value that no message can hold."""
        check(self._has_listener, "listen before the first send")
        if self._closed:
            raise LinkLost(f"the link to {self._address} is closed")
        missing_s = self._down_until - asyncio.get_running_loop().time()
        if self._failures and missing_s > 0:
            away = f"the replica at {self._address} cannot be reached at present"
            raise LinkLost(away, round(missing_s * 1000) + 1)
        stream = self._stream("normal")
        frame = stream.encode(item)
        if len(frame) > _ITEM_BYTES_MAX:
            reason = f"an item has {len(frame)} bytes; at most {_ITEM_BYTES_MAX} are allowed"
            raise BadRequest("head.append", reason)
        if len(frame) > limits.BULK_ITEM_BYTES or item.is_answered_in_bulk:
            stream = self._stream("bulk")
            frame = stream.encode(item)
        stream.put(item, frame)

    def release(self, session_id: str, epoch: int, learned: Prefix | None = None) -> None:
        self._forget(session_id)
        if self._closed:
            return
        self._releases.append((session_id, epoch, learned))
        if self._num_releasing < limits.RELEASES_IN_FLIGHT_MAX:
            self._num_releasing += 1
            self._spawn(self._send_releases())

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        request = types_pb2.DescribeRequest().SerializeToString()
        if self._closed:
            raise Unavailable(f"the link to {self._address} is closed")
        try:
            reply = await self._describe(request, timeout=timeout_s)
            description = types_pb2.ReplicaDescription.FromString(reply)
            return from_proto(description, ReplicaDescription)
        except grpc.aio.AioRpcError as error:
            reason = status_to_error(error).message
            raise Unavailable(f"{self._address} does not describe itself: {reason}") from error
        except (BadRequest, DecodeError) as error:
            raise Unavailable(f"{self._address} is not a replica of this kind: {error}") from error
        except asyncio.CancelledError:
            # `close` closes the channel. This cancels the gRPC call, but not the current task.
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise Unavailable(f"the link to {self._address} was closed") from None
            raise

    async def close(self) -> None:
        self._closed = True
        self._stop_streams()
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close(None)

    def _stream(self, name: str) -> _Stream[Item, Answer]:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(self, self._codec, self._open_call)
            self._spawn(stream.run(), f"{name} stream to {self._address}")
        return stream

    def _forget(self, session_id: str) -> None:
        for stream in self._streams.values():
            stream.forget(session_id)

    def _stop_streams(self) -> None:
        for stream in self._streams.values():
            stream.stop()
        self._streams.clear()

    def _spawn(self, work: Coroutine[None, None, None], name: str | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send_releases(self) -> None:
        try:
            while self._releases:
                await self._send_release(*self._releases.popleft())
        finally:
            self._num_releasing -= 1

    async def _send_release(self, session_id: str, epoch: int, learned: Prefix | None) -> None:
        length, digest = (0, 0) if learned is None else (learned.length, learned.digest)
        request = types_pb2.ReleaseRequest(
            session_id=session_id, epoch=epoch, learned_length=length, learned_digest=digest
        )
        try:
            await self._release(request.SerializeToString(), timeout=RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # A lost release does no harm, because the replica evicts unused sessions.
            logger.debug("release of %s at %s: %s", session_id, self._address, error.details())

    def heard(self, answer: Answer) -> None:
        self._failures = 0
        if isinstance(answer, Resync):
            self._forget(answer.key.session_id)
        self._on_answer(answer)

    def lost(self, stream: _Stream[Item, Answer], reason: str) -> None:
        """Stops both streams after `stream` broke, and tells the listener once."""
        if self._closed or stream not in self._streams.values():
            return
        self._stop_streams()
        delay_ms = backoff(
            limits.LINK_BACKOFF_MS_MIN, limits.LINK_BACKOFF_MS_MAX, self._failures, random
        )
        self._failures += 1
        self._down_until = asyncio.get_running_loop().time() + delay_ms / 1000
        error = LinkLost(f"the stream to {self._address} broke: {reason}", round(delay_ms))
        logger.info("%s", error.message)
        self._on_lost(error)


class _Stream(Generic[Item, Answer]):
    """One bidirectional call. Queued items are joined into one frame when they are sent."""

    def __init__(
        self,
        link: GrpcLink[Item, Answer],
        codec: Codec[Item, Answer],
        open_call: grpc.aio.StreamStreamMultiCallable[bytes, bytes],
    ) -> None:
        self._link = link
        self._codec = codec
        self._call = open_call(self._frames())
        self._outbox = SendQueue()
        self._sent: dict[str, tuple[int, bytes]] = {}
        """By session, the hashes of the parameters and constraint that were sent in full."""
        self._stopped = False

    def encode(self, item: Item) -> bytes:
        head = item.head
        return self._codec.item_frame(item, self._sent.get(head.session_id) == head.given_hashes)

    def put(self, item: Item, frame: bytes) -> None:
        if not self._outbox.put(frame):
            raise Overloaded(f"{limits.STREAM_QUEUE_ITEMS_MAX} items wait on this stream")
        if item.head.sampling is not None:
            self._sent[item.head.session_id] = item.head.given_hashes

    def forget(self, session_id: str) -> None:
        self._sent.pop(session_id, None)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._call.cancel()

    async def run(self) -> None:
        """Passes answers to the link until the call ends. Then tells the link the reason, unless
        `stop` was called."""
        try:
            reason = await self._read()
        except asyncio.CancelledError:  # The call or this task was cancelled.
            if self._stopped:
                raise
            reason = "the call was cancelled"
        finally:
            self._call.cancel()
            self._outbox.wake()  # Ends `_frames`.
        if not self._stopped:
            self._link.lost(self, reason)

    async def _frames(self) -> AsyncGenerator[bytes]:
        while not self._call.done():
            await self._outbox.wait()
            while data := self._outbox.gather():
                self._link.num_bytes["sent"] += len(data)
                yield data

    async def _read(self) -> str:
        try:
            async for data in self._call:
                self._link.num_bytes["received"] += len(data)
                for answer in self._codec.answers(data):
                    if self._stopped:
                        break
                    self._link.heard(answer)
        except grpc.aio.AioRpcError as error:
            return status_to_error(error).message
        except DecodeError:
            return "the replica sent bytes that are not a frame of answers"
        except BadRequest as error:
            # This ends the stream, so that callers that wait for an answer get an error.
            return f"the replica sent an invalid answer: {error}"
        return "the replica closed the stream"
