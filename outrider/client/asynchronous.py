"""The client for an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self

from outrider.client.grpc_transport import GrpcTransport
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
from outrider.client.transport import Transport
from outrider.generation import Event, GenerateRequest


class Client:
    """One way to a coordinator. Any number of calls at a time, on one event loop.

    `timeout_s` bounds a call that does no generation, in seconds; a generation's bound is its
    `deadline_ms`, or the default one, and some seconds for its last event."""

    def __init__(self, server: str | Transport) -> None:
        """`server` is HOST:PORT, or a transport, which the client then owns and closes. Nothing
        is sent before the first call."""
        self._transport = GrpcTransport(server) if isinstance(server, str) else server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """HOST:PORT, or the name of a transport that has none."""
        return self._transport.address

    async def close(self) -> None:
        """Cancels what runs and closes the transport; calls then raise `Unavailable`."""
        await self._transport.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """The events of one generation as they come. Leaving the iterator early (`aclose`) cancels
        the session. Raises what the coordinator refuses the request with, and `DeadlineExceeded`
        if its last event does not come."""
        check_sendable(request)
        events = self._transport.generate(request, generate_timeout_s(request))
        async with aclosing(events):
            async for event in events:
                yield event

    async def complete(self, request: GenerateRequest) -> Completion:
        """The whole answer. Raises as `generate` does, and `Unavailable` if the stream broke."""
        builder = CompletionBuilder()
        async with aclosing(self.generate(request)) as events:
            async for event in events:
                builder.add(event)
        return builder.build()

    async def cancel(self, session_id: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Ends a session with finish reason `cancelled`; its stream gets its last event. A
        finished one is unchanged. Raises `NotFound`."""
        await self._transport.cancel(session_id, check_timeout(timeout_s))

    async def get_session(self, session_id: str, timeout_s: float = CALL_TIMEOUT_S) -> SessionView:
        """Reads a session from the store. Raises `NotFound`."""
        return await self._transport.get_session(session_id, check_timeout(timeout_s))

    async def describe(self, timeout_s: float = CALL_TIMEOUT_S) -> CoordinatorDescription:
        """What the coordinator serves, and how many sessions run."""
        return await self._transport.describe(check_timeout(timeout_s))

    async def healthy(self, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Whether the server answers in time and says that it can serve."""
        return await self._transport.healthy(check_timeout(timeout_s))


AsyncClient = Client
"""The other name of `Client`, where it stands beside `SyncClient`."""
