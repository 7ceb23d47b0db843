"""The client for an event loop."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self

from outrider.client.failover import RESUME_TIMEOUT_S, Found, ResumingTransport, Server
from outrider.client.grpc_transport import GrpcTransport
from outrider.client.results import (
    CALL_TIMEOUT_S,
    RESUMED_TIMEOUT_S,
    Completion,
    CompletionBuilder,
    CoordinatorDescription,
    SessionView,
    Transport,
    check_sendable,
    check_timeout,
    generate_timeout_s,
)
from outrider.request import Event, GenerateRequest, ResumeRequest
from outrider.transport.channel import PLAIN, Trust


class Client:
    """One way to a coordinator, or to several of a deployment, which are asked in turn; where one
    does not answer the next one is. Any number of calls at a time, on one event loop. A generation
    whose stream breaks goes on by itself, at another coordinator if there is one, without a token
    lost or told twice.

    `timeout_s` bounds a call that does no generation, in seconds; a generation's bound is its
    `deadline_ms`, or the default one, and some seconds for its last event."""

    def __init__(
        self,
        server: Server | Transport,
        *,
        api_key: str = "",
        trust: Trust = PLAIN,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> None:
        """`server` is HOST:PORT, or several with commas between them; or a function that says so,
        which is asked again where one of them does not answer, so that coordinators which have
        come since are known, and which may return an empty text while there is none; or a
        transport, which the client then owns and closes, and which has its own key. Nothing is
        sent before the first call. `api_key` is shown with each call; without TLS, which `trust`
        says (`caller_trust`), whoever is on the way can read it. A broken stream is tried to be
        resumed for `resume_timeout_s` seconds, and a request that cannot be served now is asked
        for again as long; so is any other call while no coordinator that a function names
        answers; 0 = not at all."""
        if isinstance(server, str) or callable(server):
            found = Found[Transport](
                server, lambda one: GrpcTransport(one, trust, api_key=api_key), time.monotonic
            )
            first = secrets.randbelow(max(1, len(found.each)))
            server = ResumingTransport(found, resume_timeout_s, first)
        self._transport = server

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
        """HOST:PORT of each coordinator that is known, or the name of a transport that has none."""
        return self._transport.address

    async def close(self) -> None:
        """Cancels what runs and closes the transport; calls then raise `Unavailable`."""
        await self._transport.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """The events of one generation as they come. Leaving the iterator early (`aclose`) cancels
        the session. Raises what the coordinator refuses the request with, and `DeadlineExceeded`
        if its last event does not come. A stream that breaks is resumed, or ends with
        `StreamBroken`; then `resume` may be tried later."""
        check_sendable(request)
        events = self._transport.generate(request, generate_timeout_s(request))
        async with aclosing(events):
            async for event in events:
                yield event

    async def resume(
        self, session_id: str, num_tokens: int = 0, timeout_s: float = RESUMED_TIMEOUT_S
    ) -> AsyncGenerator[Event]:
        """The events of a generation that another client, or this one, has begun and whose stream
        broke: `Started` again, then what follows the `num_tokens` tokens that are known already.
        Of a session that has ended these are its last ones, also where it counts as cancelled by
        now; a stream of it that still runs ends with `StaleEpoch`.
        Raises `NotFound`, `DataLoss` where the store lacks tokens that are known, and `Unavailable`
        as long as another coordinator may still have the session (some two seconds)."""
        events = self._transport.resume(ResumeRequest(session_id, num_tokens), timeout_s)
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
