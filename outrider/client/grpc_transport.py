"""A coordinator on another process or machine, called by gRPC on an event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client.results import CLOSED, CoordinatorDescription, SessionView, key_metadata
from outrider.errors import DeadlineExceeded, OutriderError, StreamBroken, Unavailable
from outrider.request import Event, GenerateRequest, ResumeRequest
from outrider.transport.channel import PLAIN, Trust, open_channel
from outrider.transport.request_codec import (
    FINISH_REASONS,
    event_from_proto,
    request_to_proto,
    resume_to_proto,
    rule_from_number,
)
from outrider.transport.status import status_to_error
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc, types_pb2

STATUS_DETAILS: Final = "grpc-status-details-bin"
"""Metadata that every `Unavailable` of a coordinator has, and none of gRPC's own."""
_ERROR_NUMBER: Final = re.compile(r" \(\d+\)$")


class GrpcTransport:
    """One channel to HOST:PORT; any number of calls at a time. See `Transport`."""

    def __init__(
        self,
        address: str,
        trust: Trust = PLAIN,
        *,
        api_key: str = "",
    ) -> None:
        """Nothing is sent before the first call. Raises `BadRequest` for what cannot be a key."""
        self._address = address
        self._metadata = key_metadata(api_key)
        self._channel = open_channel(address, trust)
        self._stub: Any = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._closed = False

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._address

    def generate(self, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[Event]:
        """See `Transport.generate`."""
        return self._events(self._stub.Generate, request_to_proto(request), timeout_s)

    def resume(self, request: ResumeRequest, timeout_s: float) -> AsyncGenerator[Event]:
        """See `Transport.resume`."""
        return self._events(self._stub.Resume, resume_to_proto(request), timeout_s)

    async def _events(self, method: Any, request: Any, timeout_s: float) -> AsyncGenerator[Event]:
        self._check_open()
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                event = event_from_proto(message)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise call_error(error, self._address) from error
        except asyncio.CancelledError:
            self._explain_cancellation()
            raise
        finally:
            call.cancel()

    async def cancel(self, session_id: str, timeout_s: float) -> None:
        """See `Transport.cancel`."""
        await self._call(self._stub.Cancel, pb.CancelRequest(session_id=session_id), timeout_s)

    async def get_session(self, session_id: str, timeout_s: float) -> SessionView:
        """See `Transport.get_session`."""
        request = pb.GetSessionRequest(session_id=session_id)
        return session_view(await self._call(self._stub.GetSession, request, timeout_s))

    async def describe(self, timeout_s: float) -> CoordinatorDescription:
        """See `Transport.describe`."""
        request = types_pb2.DescribeRequest()
        return description(await self._call(self._stub.Describe, request, timeout_s))

    async def healthy(self, timeout_s: float) -> bool:
        """See `Transport.healthy`. Any server of ours may be asked, replicas too."""
        try:
            request = health_pb2.HealthCheckRequest()
            reply = await self._call(self._health.Check, request, timeout_s)
        except (Unavailable, DeadlineExceeded):
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Cancels what runs and closes the channel."""
        self._closed = True
        await self._channel.close(None)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        self._check_open()
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise call_error(error, self._address) from error
        except asyncio.CancelledError:
            self._explain_cancellation()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(CLOSED)

    def _explain_cancellation(self) -> None:
        """Closing a channel looks to its calls as if their task had been cancelled, which nobody
        has done: raises `Unavailable` where that is so."""
        task = asyncio.current_task()
        if self._closed and task is not None and not task.cancelling():
            raise Unavailable(CLOSED) from None


def call_error(error: grpc.aio.AioRpcError, address: str) -> OutriderError:
    """What a call to `address` failed with: the coordinator's error, or `StreamBroken` in words
    of our own where no coordinator answered. Those of gRPC stay in its cause."""
    meant = status_to_error(error)
    metadata: Any = error.trailing_metadata()
    answered = any(key == STATUS_DETAILS for key, _ in metadata or ())
    if answered or not isinstance(meant, Unavailable):
        return meant
    reason = _ERROR_NUMBER.sub("", meant.message.rpartition(": ")[2]).rstrip("])")
    return StreamBroken(f"nothing answers at {address} ({reason})")


def session_view(found: pb.Session) -> SessionView:
    """A session from its message."""
    return SessionView(
        session_id=found.session_id,
        epoch=found.epoch,
        state=found.state,
        seed=found.seed,
        rule=rule_from_number(found.rule),
        prompt_length=found.prompt_length,
        token_ids=tuple(found.token_ids),
        finish_reason=FINISH_REASONS.get(found.finish_reason),
    )


def description(found: pb.CoordinatorDescription) -> CoordinatorDescription:
    """A description from its message."""
    return CoordinatorDescription(
        model=found.model,
        vocab_size=found.vocab_size,
        max_model_len=found.max_model_len,
        num_running=found.num_running,
    )
