"""The gRPC face of the target service (`outrider.v1.Target`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from outrider.messages import VerifyAnswer, VerifyItem
from outrider.v1 import target_pb2, types_pb2
from outrider.wire import codecs
from outrider.wire.link import ReplicaService
from outrider.wire.server import Service
from outrider.wire.stream_server import StreamServer


class TargetServicer:
    """Answers the calls of `outrider.v1.Target`."""

    def __init__(self, service: ReplicaService[VerifyItem, VerifyAnswer]) -> None:
        self._streams = StreamServer(service, codecs.VERIFY)

    def verify(
        self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncGenerator[target_pb2.VerifyReply]:
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


def target_grpc_service(service: ReplicaService[VerifyItem, VerifyAnswer]) -> Service:
    """The service for `outrider.wire.server.RpcServer`."""
    return Service(codecs.VERIFY.service, TargetServicer(service))
