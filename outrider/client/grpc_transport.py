"""A coordinator on another process or machine, called by gRPC."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client.transport import CLOSED, CoordinatorDescription, Method, SessionView, Transport
from outrider.errors import BadRequest, OutriderError, StreamBroken, Unavailable
from outrider.limits import API_KEY_CHARS_MAX
from outrider.request import Event, GenerateRequest, ResumeRequest
from outrider.transport.channel import PLAIN, Trust, open_channel
from outrider.transport.request_codec import (
    event_from_proto,
    from_coordinator,
    request_to_proto,
    resume_to_proto,
)
from outrider.transport.status import status_to_error
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc, types_pb2

STATUS_DETAILS: Final = "grpc-status-details-bin"
"""Metadata that every `Unavailable` of a coordinator has, and none of gRPC's own."""
_ERROR_NUMBER: Final = re.compile(r" \(\d+\)$")
_VISIBLE: Final = re.compile("[!-~]+")


class GrpcTransport(Transport):
    """One channel to HOST:PORT; any number of calls at a time."""

    blocking = False

    def __init__(self, address: str, trust: Trust = PLAIN, *, api_key: str = "") -> None:
        """Nothing is sent before the first call. Raises `BadRequest` for what cannot be a key."""
        self._address = address
        self._metadata = key_metadata(api_key)
        self._channel = open_channel(address, trust, blocking=self.blocking)
        self._stub: Any = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    def events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float
    ) -> AsyncGenerator[Event]:
        if isinstance(request, ResumeRequest):
            return self._events(self._stub.Resume, resume_to_proto(request), timeout_s)
        return self._events(self._stub.Generate, request_to_proto(request), timeout_s)

    async def call(self, method: Method, timeout_s: float, session_id: str = "") -> Any:
        """See `Transport.call`. Any server of ours may be asked whether it is healthy, replicas
        too."""
        match method:
            case "cancel":
                request: Any = pb.CancelRequest(session_id=session_id)
                return await self._call(self._stub.Cancel, request, timeout_s)
            case "get_session":
                request = pb.GetSessionRequest(session_id=session_id)
                found = await self._call(self._stub.GetSession, request, timeout_s)
                return from_coordinator(found, SessionView)
            case "describe":
                request = types_pb2.DescribeRequest()
                found = await self._call(self._stub.Describe, request, timeout_s)
                return from_coordinator(found, CoordinatorDescription)
            case _:
                request = health_pb2.HealthCheckRequest()
                found = await self._call(self._health.Check, request, timeout_s)
                return found.status == health_pb2.HealthCheckResponse.SERVING

    async def close(self) -> None:
        self._closed = True
        await self._channel.close(None)

    async def _answer(self, call: Any) -> Any:
        return await call

    def _messages(self, call: Any) -> AsyncIterator[Any]:
        return aiter(call)

    async def _events(self, method: Any, request: Any, timeout_s: float) -> AsyncGenerator[Event]:
        self._check_open()
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for message in self._messages(call):
                event = event_from_proto(message)
                if event is not None:
                    yield event
        except (grpc.RpcError, asyncio.CancelledError) as error:
            self._explain(error)
            raise
        finally:
            call.cancel()

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        self._check_open()
        try:
            return await self._answer(method(request, timeout=timeout_s, metadata=self._metadata))
        except (grpc.RpcError, asyncio.CancelledError) as error:
            self._explain(error)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(CLOSED)

    def _explain(self, error: BaseException) -> None:
        """Raises what an error of a call means. Closing a channel looks to its calls as if their
        task had been cancelled, which is then not so; a cancellation proper is left as it is."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                return
        if self._closed:
            raise Unavailable(CLOSED) from None
        raise call_error(error, self._address) from error


class BlockingGrpcTransport(GrpcTransport):
    """The same over a blocking channel. Its coroutines never suspend, so they need no event loop.
    Any number of threads may share it."""

    blocking = True

    async def _answer(self, call: Any) -> Any:
        return call

    async def _messages(self, call: Any) -> AsyncIterator[Any]:
        for message in call:
            yield message

    async def close(self) -> None:
        self._closed = True
        self._channel.close()


def call_error(error: Any, address: str) -> OutriderError:
    """What a call to `address` failed with: the coordinator's error, or `StreamBroken` in words
    of our own where no coordinator answered. Those of gRPC stay in its cause."""
    meant = status_to_error(error)
    answered = any(key == STATUS_DETAILS for key, _ in error.trailing_metadata() or ())
    if answered or not isinstance(meant, Unavailable):
        return meant
    reason = _ERROR_NUMBER.sub("", meant.message.rpartition(": ")[2]).rstrip("])")
    return StreamBroken(f"nothing answers at {address} ({reason})")


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """What each call sends of a key; nothing where there is none. Raises `BadRequest`, which does
    not repeat it."""
    if not api_key:
        return ()
    if not _VISIBLE.fullmatch(api_key) or len(api_key) > API_KEY_CHARS_MAX:
        raise BadRequest(
            "api_key", f"is wrong; it must be up to {API_KEY_CHARS_MAX} visible ASCII characters"
        )
    return (("authorization", f"Bearer {api_key}"),)
