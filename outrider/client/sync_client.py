"""The client for programs without an event loop."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client.failover import RESUME_TIMEOUT_S, Asked, Found, Server, Told, Turns, avoided_s
from outrider.client.grpc_transport import call_error, description, session_view
from outrider.client.results import (
    CALL_TIMEOUT_S,
    CLOSED,
    RESUMED_TIMEOUT_S,
    Completion,
    CompletionBuilder,
    CoordinatorDescription,
    SessionView,
    check_sendable,
    check_timeout,
    generate_timeout_s,
    key_metadata,
)
from outrider.errors import DeadlineExceeded, OutriderError, StreamBroken, Unavailable
from outrider.request import Event, GenerateRequest, ResumeRequest
from outrider.transport.channel import PLAIN, Trust, open_blocking_channel
from outrider.transport.request_codec import event_from_proto, request_to_proto, resume_to_proto
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc, types_pb2


class SyncClient:
    """`Client`, but each call waits for its answer. Any number of threads may share one.

    It is gRPC's own blocking channel: there is no event loop behind it, so it may be used inside a
    program that runs one, and an interrupt (Ctrl-C) leaves a call at once."""

    def __init__(
        self,
        address: Server,
        *,
        api_key: str = "",
        trust: Trust = PLAIN,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> None:
        """`address` is HOST:PORT, or several with commas between them, or a function that says so;
        the rest as of `Client`. Nothing is sent before the first call."""
        self._metadata = key_metadata(api_key)
        self._found = Found(address, lambda one: _Coordinator(one, trust), time.monotonic)
        self._resume_timeout_s = resume_timeout_s
        each = self._found.each
        self._turns = Turns(each, time.monotonic, secrets.randbelow(max(1, len(each))))
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
        """HOST:PORT of each coordinator that is known."""
        return ",".join(one.address for one in self._turns.each)

    def close(self) -> None:
        """Cancels what runs and closes the channels; calls then raise `Unavailable`."""
        self._closed = True
        for coordinator in self._found.all:
            coordinator.channel.close()

    def generate(self, request: GenerateRequest) -> Generator[Event]:
        """See `Client.generate`. Leaving the iterator early (`close`, or an exception in the loop
        over it) cancels the session."""
        check_sendable(request)
        message = request_to_proto(request)
        yield from self._events(self._told(), message, generate_timeout_s(request))

    def resume(
        self, session_id: str, num_tokens: int = 0, timeout_s: float = RESUMED_TIMEOUT_S
    ) -> Generator[Event]:
        """See `Client.resume`."""
        told = self._told(ResumeRequest(session_id, num_tokens))
        yield from self._events(told, None, timeout_s)

    def _told(self, begun: ResumeRequest | None = None) -> Told:
        return Told(len(self._turns.each), self._resume_timeout_s, begun, self._found.may_change)

    def _events(self, told: Told, message: Any, timeout_s: float) -> Generator[Event]:
        """As `ResumingTransport` does it."""
        deadline = time.monotonic() + timeout_s
        current: _Coordinator | None = None
        while True:
            self._check_open()
            left_s = max(0.001, deadline - time.monotonic())
            rest = told.rest(left_s)
            try:
                current = current or self._turns.begin()
                stub = current.stub
                method, asked = (
                    (stub.Generate, message)
                    if rest is None
                    else (stub.Resume, resume_to_proto(rest))
                )
                call = method(asked, timeout=left_s, metadata=self._metadata)
                for event in self._heard(call, current):
                    if told.note(event):
                        yield event
                return
            except Unavailable as error:
                if self._knows_others(error):
                    told.asks_all(len(self._turns.each))
                wait_s = told.wait_after(error, time.monotonic(), deadline)
                if told.moves_on:
                    current = self._turns.after(current, avoided_s(error, begins=rest is None))
            time.sleep(wait_s)

    def _heard(self, call: Any, current: _Coordinator) -> Generator[Event]:
        self._check_open()
        try:
            for message in call:
                event = event_from_proto(message)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise self._explained(error, current.address) from error
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
        self._call("Cancel", pb.CancelRequest(session_id=session_id), timeout_s)

    def get_session(self, session_id: str, timeout_s: float = CALL_TIMEOUT_S) -> SessionView:
        """See `Client.get_session`."""
        request = pb.GetSessionRequest(session_id=session_id)
        return session_view(self._call("GetSession", request, timeout_s))

    def describe(self, timeout_s: float = CALL_TIMEOUT_S) -> CoordinatorDescription:
        """See `Client.describe`."""
        return description(self._call("Describe", types_pb2.DescribeRequest(), timeout_s))

    def healthy(self, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """See `Client.healthy`."""
        request = health_pb2.HealthCheckRequest()
        for coordinator in self._turns.each:
            try:
                reply = self._ask(coordinator, "Check", request, timeout_s)
            except (Unavailable, DeadlineExceeded):
                continue
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return True
        return False

    def _call(self, name: str, request: Any, timeout_s: float) -> Any:
        """See `ResumingTransport`."""
        current: _Coordinator | None = None
        begun = time.monotonic()
        asked = Asked(len(self._turns.each), min(timeout_s, self._resume_timeout_s), begun)
        while True:
            try:
                current = current or self._turns.begin()
                return self._ask(current, name, request, timeout_s)
            except Unavailable as error:
                if self._knows_others(error):
                    asked.num_left = len(self._turns.each) + 1
                wait_s = asked.wait_after(
                    error, time.monotonic(), len(self._turns.each), self._found.may_change
                )
                current = self._turns.after(current, avoided_s(error, begins=False))
            time.sleep(wait_s)

    def _knows_others(self, error: Unavailable) -> bool:
        """See `ResumingTransport`."""
        gone = self._found.renew() if isinstance(error, StreamBroken) else None
        if gone is None:
            return False
        self._turns.renew(self._found.each)
        for coordinator in gone:
            coordinator.channel.close()
        return True

    def _ask(self, coordinator: _Coordinator, name: str, request: Any, timeout_s: float) -> Any:
        self._check_open()
        method = coordinator.health.Check if name == "Check" else getattr(coordinator.stub, name)
        try:
            timeout_s = check_timeout(timeout_s)
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._explained(error, coordinator.address) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(CLOSED)

    def _explained(self, error: grpc.RpcError, address: str) -> OutriderError:
        """What an error of gRPC means; closing the channel ends its calls as cancelled."""
        if self._closed:
            return Unavailable(CLOSED)
        # It is the call too, and so has a status.
        return call_error(cast(Any, error), address)


class _Coordinator:
    """A channel to one of them."""

    def __init__(self, address: str, trust: Trust) -> None:
        self.address = address
        self.channel = open_blocking_channel(address, trust)
        self.stub: Any = coordinator_pb2_grpc.CoordinatorStub(self.channel)  # type: ignore[no-untyped-call]
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
