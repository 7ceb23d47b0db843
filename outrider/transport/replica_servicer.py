"""What the gRPC servicers of draft and target share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Generic

from outrider.transport.link import ReplicaService
from outrider.transport.server import Service
from outrider.transport.stream_codecs import Answer, Codec, Item
from outrider.transport.stream_server import StreamServer
from outrider.v1 import types_pb2


class ReplicaServicer(Generic[Item, Answer]):
    """Answers the calls of one `ReplicaService`; a role adds its stream under the stream's name."""

    def __init__(self, service: ReplicaService[Item, Answer], codec: Codec[Item, Answer]) -> None:
        self._codec = codec
        self._streams = StreamServer(service, codec)

    @property
    def grpc_service(self) -> Service:
        """The service for `outrider.transport.server.RpcServer`."""
        return Service(self._codec.service, self)

    def stream(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        """One stream of a coordinator."""
        return self._streams.serve(requests)

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

    def finish(self, drained: Coroutine[Any, Any, None]) -> None:
        """See `StreamServer.finish`."""
        self._streams.finish(drained)
