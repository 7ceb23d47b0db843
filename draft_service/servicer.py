"""The gRPC face of the draft service (`outrider.v1.Draft`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from outrider.messages import DraftAnswer, DraftItem
from outrider.v1 import draft_pb2, types_pb2
from outrider.wire import codecs
from outrider.wire.link import ReplicaService
from outrider.wire.server import Service
from outrider.wire.stream_server import StreamServer


class DraftServicer:
    """Answers the calls of `outrider.v1.Draft`."""

    def __init__(self, service: ReplicaService[DraftItem, DraftAnswer]) -> None:
        self._streams = StreamServer(service, codecs.DRAFT)

    def propose(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncGenerator[draft_pb2.DraftReply]:
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


def draft_grpc_service(service: ReplicaService[DraftItem, DraftAnswer]) -> Service:
    """The service for `outrider.wire.server.RpcServer`."""
    return Service(codecs.DRAFT.service, DraftServicer(service))
