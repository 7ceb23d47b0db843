"""Calls several coordinators, and goes on with a generation whose stream has broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

from outrider.client.results import CoordinatorDescription, SessionView
from outrider.client.transport import Transport
from outrider.errors import StreamBroken, Unavailable
from outrider.generation import Event, GenerateRequest, ResumeRequest, Started, Tokens

T = TypeVar("T")
RESUME_TIMEOUT_S: Final = 15.0
"""How long a broken stream is tried to be resumed, by default: coordinators may be started anew."""
_WAIT_S: Final = (0.05, 1.0)
"""First and longest wait between two tries; doubled each time."""


class ResumingTransport:
    """A `Transport` over others, each to a coordinator of the same deployment. Calls go to one that
    answers. A stream that breaks goes on at the next: `Started` is told once, and each token."""

    def __init__(
        self, transports: Sequence[Transport], resume_timeout_s: float = RESUME_TIMEOUT_S
    ) -> None:
        """Owns and closes `transports`, of which there is one at least. 0 seconds: a generation
        whose stream breaks is not resumed."""
        self._transports = tuple(transports)
        self._resume_timeout_s = resume_timeout_s
        self._current = 0

    @property
    def address(self) -> str:
        """Of all coordinators, with commas between them."""
        return ",".join(transport.address for transport in self._transports)

    async def generate(self, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[Event]:
        """See `Transport.generate`. Raises `StreamBroken` where a stream could not be resumed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        told = Told(len(self._transports), self._resume_timeout_s)
        while True:
            left_s = max(0.001, deadline - loop.time())
            transport = self._transports[self._current]
            rest = told.rest
            stream = (
                transport.generate(request, left_s)
                if rest is None
                else transport.resume(rest, left_s)
            )
            try:
                async with aclosing(stream) as events:
                    async for event in events:
                        if told.note(event):
                            yield event
                return
            except Unavailable as error:
                wait_s = told.wait_after(error, loop.time(), deadline)
            self._current = (self._current + 1) % len(self._transports)
            await asyncio.sleep(wait_s)

    def resume(self, request: ResumeRequest, timeout_s: float) -> AsyncGenerator[Event]:
        """See `Transport.resume`, of the coordinator that answered last."""
        return self._transports[self._current].resume(request, timeout_s)

    async def cancel(self, session_id: str, timeout_s: float) -> None:
        """See `Transport.cancel`."""
        await self._first(lambda transport: transport.cancel(session_id, timeout_s))

    async def get_session(self, session_id: str, timeout_s: float) -> SessionView:
        """See `Transport.get_session`."""
        return await self._first(lambda transport: transport.get_session(session_id, timeout_s))

    async def describe(self, timeout_s: float) -> CoordinatorDescription:
        """See `Transport.describe`, of one that answers."""
        return await self._first(lambda transport: transport.describe(timeout_s))

    async def healthy(self, timeout_s: float) -> bool:
        """Whether one of the coordinators says that it can serve."""
        for transport in self._transports:
            if await transport.healthy(timeout_s):
                return True
        return False

    async def close(self) -> None:
        """See `Transport.close`."""
        for transport in self._transports:
            await transport.close()

    async def _first(self, call: Callable[[Transport], Awaitable[T]]) -> T:
        """The answer of the first coordinator that gives one."""
        for _ in self._transports[1:]:
            try:
                return await call(self._transports[self._current])
            except StreamBroken:
                self._current = (self._current + 1) % len(self._transports)
        return await call(self._transports[self._current])


class Told:
    """What the caller of a generation has heard, and what is done when its stream breaks."""

    def __init__(self, num_coordinators: int, resume_timeout_s: float) -> None:
        self._tries_left = num_coordinators
        self._resume_timeout_s = resume_timeout_s
        self._session_id: str | None = None
        self._num_tokens = 0
        self._tried_until: float | None = None
        self._wait_s = _WAIT_S[0]

    @property
    def rest(self) -> ResumeRequest | None:
        """Asks for what is missing; None before anything came, when all is."""
        if self._session_id is None:
            return None
        return ResumeRequest(self._session_id, self._num_tokens)

    def note(self, event: Event) -> bool:
        """An event has come; returns whether the caller is to hear it: not a second `Started`."""
        self._tried_until, self._wait_s = None, _WAIT_S[0]
        if isinstance(event, Started):
            is_first = self._session_id is None
            self._session_id = event.session_id
            return is_first
        if isinstance(event, Tokens):
            self._num_tokens = event.first_index + len(event.token_ids)
        return True

    def wait_after(self, error: Unavailable, now: float, deadline: float) -> float:
        """How long to wait until the next coordinator is asked; times in seconds of one clock.
        Raises the error where that is of no use: a coordinator has answered that it cannot serve
        the request, all have been asked to begin it, or they have been asked for long enough to
        go on."""
        if self._session_id is None:
            self._tries_left -= 1
            if self._tries_left == 0 or not isinstance(error, StreamBroken):
                raise error
            return 0.0
        if self._tried_until is None:
            if not isinstance(error, StreamBroken):
                raise error
            self._tried_until = now + self._resume_timeout_s
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, _WAIT_S[1])
        if now + wait_s > min(self._tried_until, deadline):
            raise error
        return wait_s
