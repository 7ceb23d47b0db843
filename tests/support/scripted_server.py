"""A coordinator's gRPC server that answers from a script."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from coordinator.grpc_api import CoordinatorServicer
from outrider.client import Event, Finished, Metrics, Started, Tokens, Usage
from outrider.errors import NotFound
from outrider.sessions.store import FinishReason, SessionRecord
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule
from outrider.transport.request_codec import event_to_proto, session_to_proto
from outrider.transport.server import RpcServer
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import types_pb2

ID = "ab" * 16


STARTED = Started(ID, "demo", 2**64 - 1, Rule.TOKEN, num_prompt_tokens=3)


FIRST = Tokens(0, (5, 6), "he", (Origin.ACCEPTED, Origin.CORRECTION), ())


SECOND = Tokens(2, (7,), "llo", (Origin.BONUS,), ())


FINISHED = Finished(FinishReason.LENGTH, Usage(4, 3), Metrics(2, 3, 1, 1.5, 10.0, 30.0))


class ScriptedServicer(CoordinatorServicer):
    """For each entry, sends the event, raises the error, or waits for the `asyncio.Event`."""

    def __init__(self, *events: Event | Exception | asyncio.Event) -> None:
        self.events: Sequence[Event | Exception | asyncio.Event] = events
        self.waits = asyncio.Event()
        self.left = asyncio.Event()
        """Set when a call has ended, in any way."""
        self.requests: list[pb.GenerateRequest] = []
        self.resumed: list[tuple[str, int]] = []
        self.cancelled: list[str] = []

    async def generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateEvent]:
        self.requests.append(request)
        try:
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, asyncio.Event):
                    self.waits.set()
                    await event.wait()
                else:
                    yield event_to_proto(event)
        finally:
            self.left.set()

    async def resume(
        self, request: pb.ResumeRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateEvent]:
        self.resumed.append((request.session_id, request.num_tokens))
        async for event in self.generate(pb.GenerateRequest(), context):
            yield event

    async def cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelReply:
        self.cancelled.append(request.session_id)
        return pb.CancelReply()

    async def describe(
        self, request: types_pb2.DescribeRequest, context: Any
    ) -> pb.CoordinatorDescription:
        return pb.CoordinatorDescription(
            model="demo", vocab_size=320, max_model_len=256, num_running=2
        )

    async def get_session(self, request: pb.GetSessionRequest, context: Any) -> pb.Session:
        if request.session_id != ID:
            raise NotFound(f"session_id: there is no session {request.session_id}")
        record = SessionRecord.new(ID, "", "x", 1, Rule.BLOCK, "", (1, 2))
        return session_to_proto(replace(record, epoch=3))


async def serve(coordinator: ScriptedServicer) -> RpcServer:
    server = RpcServer([coordinator.grpc_service])
    await server.start()
    return server
