"""The client for programs without an event loop."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, Self, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client.grpc_transport import call_error, description, session_view
from outrider.client.requests import (
    CALL_TIMEOUT_S,
    check_sendable,
    check_timeout,
    generate_timeout_s,
)
from outrider.client.results import (
    Completion,
    CompletionBuilder,
    CoordinatorDescription,
    SessionView,
)
from outrider.client.transport import CLOSED
from outrider.errors import DeadlineExceeded, OutriderError, Unavailable
from outrider.generation import Event, GenerateRequest
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc, types_pb2
from outrider.wire.channel import channel_options
from outrider.wire.generation import event_from_proto, request_to_proto


class SyncClient:
    """`Client`, but each call waits for its answer. Any number of threads may share one.

    It is gRPC's own blocking channel: there is no event loop behind it, so it may be used inside a
    program that runs one, and an interrupt (Ctrl-C) leaves a call at once."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`address` is HOST:PORT. Nothing is sent before the first call."""
        self._address = address
        if credentials is None:
            self._channel = grpc.insecure_channel(address, channel_options())
        else:
            self._channel = grpc.secure_channel(address, credentials, channel_options())
        self._stub: Any = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._address

    def close(self) -> None:
        """Cancels what runs and closes the channel; calls then raise `Unavailable`."""
        self._closed = True
        self._channel.close()

    def generate(self, request: GenerateRequest) -> Generator[Event]:
        """See `Client.generate`. Leaving the iterator early (`close`, or an exception in the loop
        over it) cancels the session."""
        check_sendable(request)
        self._check_open()
        call = self._stub.Generate(request_to_proto(request), timeout=generate_timeout_s(request))
        try:
            for message in call:
                event = event_from_proto(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise self._explained(error) from error
        finally:
            call.cancel()

    def complete(self, request: GenerateRequest) -> Completion:
        """See `Client.complete`."""
        builder = CompletionBuilder()
        for event in self.generate(request):
            builder.add(event)
        return builder.build()

    def cancel(self, session_id: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """See `Client.cancel`."""
        self._call(self._stub.Cancel, pb.CancelRequest(session_id=session_id), timeout_s)

    def get_session(self, session_id: str, timeout_s: float = CALL_TIMEOUT_S) -> SessionView:
        """See `Client.get_session`."""
        request = pb.GetSessionRequest(session_id=session_id)
        return session_view(self._call(self._stub.GetSession, request, timeout_s))

    def describe(self, timeout_s: float = CALL_TIMEOUT_S) -> CoordinatorDescription:
        """See `Client.describe`."""
        return description(self._call(self._stub.Describe, types_pb2.DescribeRequest(), timeout_s))

    def healthy(self, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """See `Client.healthy`."""
        try:
            reply = self._call(self._health.Check, health_pb2.HealthCheckRequest(), timeout_s)
        except (Unavailable, DeadlineExceeded):
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        self._check_open()
        try:
            return method(request, timeout=check_timeout(timeout_s))
        except grpc.RpcError as error:
            raise self._explained(error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(CLOSED)

    def _explained(self, error: grpc.RpcError) -> OutriderError:
        """What an error of gRPC means; closing the channel ends its calls as cancelled."""
        if self._closed:
            return Unavailable(CLOSED)
        # It is the call too, and so has a status.
        return call_error(cast(Any, error), self._address)
