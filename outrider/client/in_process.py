"""A coordinator in this process and on this event loop, called without gRPC.

For programs that embed Outrider, and for tests: the same requests are refused with the same errors,
because a request passes through its message all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from outrider.client.transport import CLOSED, CoordinatorDescription, Method, SessionView, Transport
from outrider.errors import DeadlineExceeded, Unavailable
from outrider.request import Event, GenerateRequest, ResumeRequest
from outrider.transport.codec import from_proto, session_id_from_wire
from outrider.transport.request_codec import (
    request_from_proto,
    request_to_proto,
    resume_from_proto,
    resume_to_proto,
    session_to_proto,
)


class InProcessTransport(Transport):
    """Calls a coordinator's methods."""

    def __init__(self, service: Any, tenant: str = "") -> None:
        """`service` is a `coordinator.service.CoordinatorService`; closing the transport leaves it
        running. The sessions are those of `tenant`."""
        self._service = service
        self._tenant = tenant
        self._waiting: set[asyncio.Timeout] = set()
        """Of every call that waits for the service now."""
        self._idle: set[AsyncGenerator[Event]] = set()
        """Streams whose reader has an event and has not come back for the next."""
        self._closed = False

    @property
    def address(self) -> str:
        return "in-process"

    def events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float
    ) -> AsyncGenerator[Event]:
        if isinstance(request, ResumeRequest):
            asked = resume_from_proto(resume_to_proto(request))
            return self._events(self._service.resume(asked, self._tenant), timeout_s)
        decoded = request_from_proto(request_to_proto(request))
        return self._events(self._service.generate(decoded, self._tenant), timeout_s)

    async def _events(
        self, stream: AsyncGenerator[Event], timeout_s: float
    ) -> AsyncGenerator[Event]:
        deadline = _now() + timeout_s
        async with aclosing(stream) as events:
            while True:
                # Entered anew for every event: a timeout that is held open over a yield would
                # cancel whatever the caller does meanwhile.
                async with self._until(deadline):
                    try:
                        event = await anext(events)
                    except StopAsyncIteration:
                        return
                self._idle.add(events)
                try:
                    yield event
                finally:
                    self._idle.discard(events)

    async def call(self, method: Method, timeout_s: float, session_id: str = "") -> Any:
        service = self._service
        async with self._until(_now() + timeout_s):
            match method:
                case "cancel":
                    return await service.cancel(session_id_from_wire(session_id), self._tenant)
                case "get_session":
                    found = await service.session(session_id_from_wire(session_id), self._tenant)
                    return from_proto(session_to_proto(found), SessionView)
                case "describe":
                    model, num_running = service.model, service.num_running
                    return CoordinatorDescription(
                        model.name, model.vocab_size, model.max_model_len, num_running
                    )
                case _:
                    return await service.healthy()

    async def close(self) -> None:
        """Cancels what runs on this transport; the service goes on."""
        self._closed = True
        now = _now()
        for timeout in self._waiting:
            if not timeout.expired():
                timeout.reschedule(now)
        for events in tuple(self._idle):
            await events.aclose()

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Ends what is awaited inside at a time of the loop, and when the transport is closed.
        Raises `DeadlineExceeded`, `Unavailable`."""
        if self._closed:
            raise Unavailable(CLOSED)
        timeout = asyncio.timeout_at(deadline)
        self._waiting.add(timeout)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            if self._closed:
                raise Unavailable(CLOSED) from None
            raise DeadlineExceeded("the coordinator did not answer in time") from None
        finally:
            self._waiting.discard(timeout)


def _now() -> float:
    return asyncio.get_running_loop().time()
