"""The coordinator's gRPC interface. It translates protobuf messages to Python values and back."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from coordinator.auth.access_control import OPEN, AccessControl, current_caller
from outrider.errors import Overloaded
from outrider.foundation.api_keys import Caller
from outrider.interfaces.request import Event
from outrider.limits import DEADLINE_MS_MAX, RECORD_READS_MAX, SLOT_RETRY_MS
from outrider.transport.codec import session_id_from_wire
from outrider.transport.request_codec import (
    event_to_proto,
    request_from_proto,
    resume_from_proto,
    session_to_proto,
)
from outrider.transport.server import Context, Service, server_stream, set_write_deadline, unary
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import types_pb2

from .service import CoordinatorService

_COORDINATOR = pb.DESCRIPTOR.services_by_name["Coordinator"]
SLOW_CLIENT_S = 5.0
"""How long after the deadline a client may take to receive the rest of the answer."""


class CoordinatorServicer:
    """The methods of `outrider.v1.Coordinator`. A call's API key determines the call's tenant."""

    def __init__(self, service: CoordinatorService, access: AccessControl = OPEN) -> None:
        self._service = service
        self._access = access
        self._num_reads: Counter[str] = Counter()
        """Name of a caller -> number of its `cancel` and `get_session` calls that run now."""

    @property
    def grpc_service(self) -> Service:
        methods = {
            "Generate": server_stream(pb.GenerateRequest, self.generate),
            "Resume": server_stream(pb.ResumeRequest, self.resume),
            "Cancel": unary(pb.CancelRequest, self.cancel),
            "GetSession": unary(pb.GetSessionRequest, self.get_session),
            "Describe": unary(types_pb2.DescribeRequest, self.describe),
        }
        return Service(_COORDINATOR, methods)

    def generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateEvent]:
        """Streams a generation. If the client disconnects, decoding stops, and the session is
        cancelled after `resume_grace_ms` unless it is resumed."""
        caller = current_caller()
        requested, trace = request_from_proto(request), _traceparent(context)
        _end_soon_after(requested.deadline_ms or self._service.config.deadline_ms)
        return self._events(self._service.streams.generate(requested, caller.tenant, trace))

    def resume(
        self, request: pb.ResumeRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateEvent]:
        """Streams the events that the client lacks."""
        caller, requested = current_caller(), resume_from_proto(request)
        _end_soon_after(requested.deadline_ms or DEADLINE_MS_MAX)
        running = self._service.streams.resume(requested, caller.tenant, _traceparent(context))
        return self._events(running, [requested.session_id])

    async def _events(
        self, running: AsyncGenerator[Event], resumes: Sequence[str] = ()
    ) -> AsyncGenerator[pb.GenerateEvent]:
        async with aclosing(running), self._access.admit(current_caller(), resumes) as grant:
            async for event in running:
                await grant.note(event)
                yield event_to_proto(event)

    async def cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelReply:
        """Cancels a session. The session's stream still gets the event `Finished`."""
        caller = current_caller()
        session_id = session_id_from_wire(request.session_id)
        self._begin_reading(caller, context)
        await self._service.streams.cancel(session_id, caller.reach)
        return pb.CancelReply()

    async def get_session(self, request: pb.GetSessionRequest, context: Context) -> pb.Session:
        """Reads a session from the store. The call counts towards the caller's rate limit, but not
        towards the limit on concurrent generations."""
        caller = current_caller()
        session_id = session_id_from_wire(request.session_id)
        self._begin_reading(caller, context)
        async with self._access.admit(caller, num_generations=0):
            record = await self._service.streams.session(session_id, caller.reach)
        return session_to_proto(record)

    def _begin_reading(self, caller: Caller, context: Context) -> None:
        """Counts a read until the client has taken its answer. Raises `Overloaded` if
        `RECORD_READS_MAX` reads of the caller run already. Stored sessions may be long, so the
        limit bounds memory."""
        if self._num_reads[caller.name] >= RECORD_READS_MAX:
            raise Overloaded(
                f"this caller already reads {RECORD_READS_MAX} stored sessions, the most allowed "
                "at a time; try again later",
                SLOT_RETRY_MS,
                "session_reads",
            )
        self._num_reads[caller.name] += 1
        context.add_done_callback(partial(self._end_reading, caller))  # type: ignore[arg-type]

    def _end_reading(self, caller: Caller, context: Context) -> None:
        self._num_reads[caller.name] -= 1
        self._num_reads += Counter()  # Removes entries that are 0.

    async def describe(
        self, request: types_pb2.DescribeRequest, context: Context
    ) -> pb.CoordinatorDescription:
        """Describes the served model, and counts the running sessions."""
        served = self._service.served
        return pb.CoordinatorDescription(
            model=served.model,
            vocab_size=served.vocab_size,
            max_model_len=served.max_model_len,
            num_running=self._service.num_running,
        )


def _end_soon_after(deadline_ms: int) -> None:
    """Gives a client that reads slowly a little time after the deadline of its generation."""
    set_write_deadline(asyncio.get_running_loop().time() + deadline_ms / 1e3 + SLOW_CLIENT_S)


def _traceparent(context: Context) -> str:
    return str(dict(context.invocation_metadata() or ()).get("traceparent", ""))
