"""The coordinator on gRPC: messages in, values inside, messages out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from outrider.v1 import coordinator_pb2 as pb
from outrider.wire.convert import session_id_from_wire
from outrider.wire.generation import event_to_proto, request_from_proto, session_to_proto
from outrider.wire.server import Context

from .service import CoordinatorService


class CoordinatorServicer:
    """The methods of `outrider.v1.Coordinator`."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    async def generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateEvent]:
        """Streams a generation; a client that goes away cancels it."""
        async with aclosing(self._service.generate(request_from_proto(request))) as events:
            async for event in events:
                yield event_to_proto(event)

    async def cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelReply:
        """Ends a session as cancelled; its stream still gets its last event."""
        await self._service.cancel(session_id_from_wire(request.session_id))
        return pb.CancelReply()

    async def get_session(self, request: pb.GetSessionRequest, context: Context) -> pb.Session:
        """Reads a session from the store."""
        session_id = session_id_from_wire(request.session_id)
        return session_to_proto(await self._service.session(session_id))
