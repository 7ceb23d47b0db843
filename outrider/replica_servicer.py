"""What the gRPC servicers of draft and target share: their unary calls, and the end of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Generic, cast

from outrider.errors import Unavailable
from outrider.v1 import types_pb2
from outrider.wire.codecs import Answer, Codec, Item
from outrider.wire.link import ReplicaService
from outrider.wire.server import Service
from outrider.wire.stream_server import StreamServer


class ReplicaServicer(Generic[Item, Answer]):
    """Answers the calls of one `ReplicaService`; a role adds its stream under the stream's name."""

    def __init__(self, service: ReplicaService[Item, Answer], codec: Codec[Item, Answer]) -> None:
        self._codec = codec
        self._streams = StreamServer(service, codec)
        self._readers: set[asyncio.Task[Any]] = set()
        """They wait for the next frame of a stream."""
        self._drain: Callable[[], Awaitable[None]] | None = None

    @property
    def grpc_service(self) -> Service:
        """The service for `outrider.wire.server.RpcServer`."""
        return Service(self._codec.service, self)

    def stream(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        """One stream of a coordinator."""
        return self._streams.serve(self._taken(requests))

    async def describe(
        self, request: types_pb2.DescribeRequest, context: Any
    ) -> types_pb2.ReplicaDescription:
        """What runs here."""
        return self._streams.describe()

    async def release(
        self, request: types_pb2.ReleaseRequest, context: Any
    ) -> types_pb2.ReleaseReply:
        """Forgets a session."""
        return self._streams.release(request)

    def finish(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Takes no more items. When `drain` returns, every stream sends the answers it has and
        ends as `Unavailable`. They end together, because a coordinator that loses one of its
        streams gives up the other; an answer that is then still on its way is asked for again."""
        self._drain = drain
        for reader in self._readers:
            reader.cancel()

    async def _taken(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        """The frames of `requests` that come before `finish`."""
        if self._drain is None:
            reader = cast(asyncio.Task[Any], asyncio.current_task())
            self._readers.add(reader)
            try:
                async for frame in requests:
                    yield frame
                return
            except asyncio.CancelledError:
                if self._drain is None or reader.uncancel() > 0:
                    raise  # The stream itself has ended.
            finally:
                self._readers.discard(reader)
        await self._drain()
        raise Unavailable("this replica is stopping")
