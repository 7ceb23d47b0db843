"""Calls the coordinators of a deployment in turn, and resumes broken streams."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import reduce
from random import random as any_random
from typing import Any, Generic, TypeAlias, TypeVar

from outrider.client.transport import GENERATE_SLACK_S, Method, Transport
from outrider.errors import BadRequest, DeadlineExceeded, StreamBroken, Unavailable
from outrider.foundation.backoff import backoff
from outrider.foundation.tokens import EMPTY_DIGEST, extend_digest
from outrider.interfaces.request import Event, GenerateRequest, ResumeRequest, Started, Tokens
from outrider.limits import DEADLINE_MS_MAX, LEASE_WAIT_SPREAD_MS

_log = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint = TypeVar("Endpoint")
Server: TypeAlias = str | Callable[[], str]
"""HOST:PORT, or several of them separated by commas, or a function that returns such a text. The
function runs on the caller's thread or event loop, so it must be quick."""
RESUME_TIMEOUT_S = 15.0
"""Default time for resuming a broken stream, or for repeating a request that no coordinator can
serve now. Another coordinator can take over within this time. If there is no target, requests wait
at their coordinators, which this time does not limit."""
REREAD_PERIOD_S = 0.5
"""Shortest time between two calls of the function that names the coordinators."""
GONE_MAX = 16
"""Largest number of endpoints kept for running calls after `server` has stopped naming them."""
AVOIDED_S = 5.0
"""If a coordinator does not answer, new calls avoid it for this time. If it answers that it cannot
serve now, new calls avoid it for the `retry_after_ms` of its error."""
_WAIT_S = (0.05, 1.0)
"""The first and the longest wait between two tries."""


def addresses_of(server: object) -> list[str]:
    """Splits a comma-separated text into addresses. Raises `BadRequest` for other values."""
    each = [address.strip() for address in server.split(",")] if isinstance(server, str) else [""]
    if not all(each):
        raise BadRequest(
            "server", f"{server!r} is wrong; it must be HOST:PORT, or several separated by commas"
        )
    return list(dict.fromkeys(each))


class EndpointPool(Generic[Endpoint]):
    """Keeps an endpoint, such as a connection, for each coordinator that `server` names. New calls
    begin at each coordinator in turn. Threads may share a pool."""

    def __init__(
        self,
        server: Server,
        connect: Callable[[str], Endpoint],
        clock: Callable[[], float] = time.monotonic,
        first: int | None = None,
    ) -> None:
        """`connect` makes an endpoint for an address, and sends nothing. The first call begins at
        the address with index `first`, by default at a random address. Raises `BadRequest` for
        invalid addresses, and the errors of the function `server`."""
        self._name = server if callable(server) else None
        self.may_change = callable(server)
        self._connect = connect
        self.clock = clock
        self._read_at = clock()
        self._open: dict[str, Endpoint] = {}
        """Address -> endpoint, the oldest first. Includes addresses that are no longer named."""
        self._named: dict[str, Endpoint] = {}
        named = server() if callable(server) else server
        if not callable(server) or named != "":
            self._set_named(addresses_of(named))
        self._next = secrets.randbelow(max(1, len(self._named))) if first is None else first
        self._avoided: dict[Endpoint, float] = {}
        """Endpoint -> time until which new calls avoid the endpoint."""
        self._changing = threading.Lock()

    def _set_named(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            if address not in self._open:
                self._open[address] = self._connect(address)
        self._named = {address: self._open[address] for address in addresses}

    @property
    def each(self) -> list[Endpoint]:
        """Endpoints of the named coordinators; empty if `server` has named no coordinator yet."""
        return list(self._named.values())

    @property
    def all(self) -> list[Endpoint]:
        return list(self._open.values())

    def begin(self) -> Endpoint:
        """Returns the next endpoint that new calls do not avoid. If they avoid all endpoints,
        returns the next endpoint. Raises `StreamBroken` if there are no endpoints."""
        each, now = self.each, self.clock()
        if not each:
            raise StreamBroken("no coordinator is known yet")
        start = self._next % len(each)
        order = each[start:] + each[:start]
        chosen = next(
            (endpoint for endpoint in order if self._avoided.get(endpoint, now) <= now), order[0]
        )
        self._next = each.index(chosen) + 1
        return chosen

    def after(self, tried: Endpoint, avoided_s: float = AVOIDED_S) -> Endpoint | None:
        """Returns the endpoint after `tried`, or None if `tried` is no longer named. For
        `avoided_s` seconds, new calls avoid `tried`."""
        each, now = self.each, self.clock()
        if tried not in each:
            return None
        known = {endpoint: end for endpoint, end in self._avoided.items() if end > now}
        self._avoided = {**known, tried: max(now + avoided_s, known.get(tried, now))}
        return each[(each.index(tried) + 1) % len(each)]

    def renew(self) -> list[Endpoint]:
        """Calls the function `server` again, at most once in `REREAD_PERIOD_S`. If this function
        returns an empty text or fails, the named coordinators stay the same. Returns the endpoints
        that the pool no longer keeps, which the caller must close."""
        with self._changing:
            now = self.clock()
            if self._name is None or now - self._read_at < REREAD_PERIOD_S:
                return []
            self._read_at = now
            try:
                if text := self._name():
                    self._set_named(addresses_of(text))
            except Exception as error:  # noqa: BLE001 (the caller's function)
                _log.warning(
                    "cannot look up coordinators, so the known ones stay in use: %r", error
                )
            gone = [address for address in self._open if address not in self._named]
            return [self._open.pop(address) for address in gone[:-GONE_MAX]]


class ResumingTransport(Transport):
    """Calls one coordinator after another until one answers. Continues a broken stream at any
    coordinator. The caller gets `Started` and each token once."""

    def __init__(
        self,
        pool: EndpointPool[Transport],
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        random: Callable[[], float] = any_random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`close` also closes the transports in `pool`. If `resume_timeout_s` is 0, nothing is
        resumed or repeated. `random` returns numbers in [0, 1)."""
        self._pool = pool
        self._resume_timeout_s = resume_timeout_s
        self._random = random
        self._sleep = sleep
        self._closed = False

    @property
    def address(self) -> str:
        return ",".join(transport.address for transport in self._pool.each)

    def events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float
    ) -> AsyncGenerator[Event]:
        tries = Tries(self._pool, self._resume_timeout_s, self._random)
        tries.received = request if isinstance(request, ResumeRequest) else None

        async def ask(transport: Transport, left_s: float) -> AsyncGenerator[Event]:
            asked = tries.remainder(left_s) or request
            async with aclosing(transport.events(asked, left_s)) as events:
                async for event in events:
                    if tries.note(event):
                        yield event

        return self._tried(ask, tries, timeout_s)

    async def call(self, method: Method, timeout_s: float, session_id: str = "") -> Any:
        """Returns the first answer. If all coordinators raise `Unavailable`, raises the last error.
        But if this error is `StreamBroken` and a function names the coordinators, calls all again
        until the time is over, because the function may name others."""
        if method == "healthy":
            for transport in self._pool.each:
                with suppress(Unavailable, DeadlineExceeded):
                    if await transport.call(method, timeout_s):
                        return True
            return False
        tries_s = min(timeout_s, self._resume_timeout_s)
        tries = Tries(self._pool, tries_s, self._random, is_stream=False)

        async def ask(transport: Transport, left_s: float) -> AsyncGenerator[Any]:
            yield await transport.call(method, timeout_s, session_id)

        async with aclosing(self._tried(ask, tries, math.inf)) as answers:
            return await anext(answers)

    async def _tried(
        self, ask: Callable[[Transport, float], AsyncGenerator[T]], tries: Tries, timeout_s: float
    ) -> AsyncGenerator[T]:
        pool = self._pool
        deadline = pool.clock() + timeout_s
        current: Transport | None = None
        while True:
            try:
                current = current or pool.begin()
                left_s = max(0.001, deadline - pool.clock())
                async with aclosing(ask(current, left_s)) as answers:
                    async for answer in answers:
                        yield answer
                return
            except Unavailable as error:
                if self._closed:
                    raise
                if isinstance(error, StreamBroken):
                    for transport in pool.renew():
                        await transport.close()
                current, wait_s = tries.after(current, error, deadline)
            await self._sleep(wait_s)

    async def close(self) -> None:
        self._closed = True
        for transport in self._pool.all:
            await transport.close()


class Tries:
    """State of one call: the caller's events so far, and the coordinators that were tried."""

    def __init__(
        self,
        pool: EndpointPool[Transport],
        resume_timeout_s: float,
        random: Callable[[], float],
        *,
        is_stream: bool = True,
    ) -> None:
        """`is_stream` is false for calls that generate no tokens. These calls do not wait for a
        coordinator that cannot serve now."""
        self._pool = pool
        self._resume_timeout_s = resume_timeout_s
        self._random = random
        self._is_stream = is_stream
        self.received: ResumeRequest | None = None
        self._is_started = False
        self._tried: set[Transport | None] = set()
        """Coordinators that could not begin the call since the last wait."""
        self._tried_until: float | None = None
        """Time at which the tries end. None if no try has failed since the last token."""
        self._has_answer = False
        """Whether a coordinator in `_tried` answered, so that a later try may succeed."""
        self._num_waits = 0
        """Number of waits for coordinators that did not answer, since the last token."""
        self._stayed = False
        """Whether the last two tries were at the same coordinator."""

    def remainder(self, left_s: float) -> ResumeRequest | None:
        """Returns a request for the remaining events, or None if the generation has not begun."""
        if self.received is None or not self._is_started:
            return self.received
        left_ms = round((left_s - GENERATE_SLACK_S) * 1000)
        return replace(self.received, deadline_ms=min(max(1, left_ms), DEADLINE_MS_MAX))

    def note(self, event: Event) -> bool:
        """Records an event. Returns False for a repeated `Started`."""
        if isinstance(event, Started):
            is_first, self._is_started = not self._is_started, True
            self.received = self.received or ResumeRequest(
                event.session_id, 0, 0, tokens_digest=EMPTY_DIGEST
            )
            return is_first
        if isinstance(event, Tokens) and (known := self.received) is not None:
            if event.token_ids:  # Empty events could repeat forever, so they are no progress.
                self._tried_until, self._num_waits, self._stayed = None, 0, False
            characters, digest = known.num_characters, known.tokens_digest
            if characters is not None:
                characters += len(event.text_delta)
            if digest is not None:
                digest = reduce(extend_digest, event.token_ids, digest)
            num_tokens = event.first_index + len(event.token_ids)
            self.received = replace(
                known, num_tokens=num_tokens, num_characters=characters, tokens_digest=digest
            )
        return True

    def after(
        self, tried: Transport | None, error: Unavailable, deadline: float
    ) -> tuple[Transport | None, float]:
        """Returns the coordinator to call next (None = any), and the seconds to wait before the
        call.

        Before a stream has begun, all coordinators are called without waiting. If a stream has just
        broken, its coordinator is called again at once, because perhaps only the connection is
        lost. If a coordinator cannot continue the session now, it is called again after the time
        that its error states, because no other coordinator could continue the session sooner.

        Raises `error` if a coordinator ended a running stream with this error, or if the time is
        over. Also raises `error` if all coordinators have failed to begin the call. There are two
        exceptions. A stream is tried again if at least one coordinator answered. Any call is tried
        again if `tried` did not answer and a function may name other coordinators later."""
        pool, now = self._pool, self._pool.clock()
        answered, begins = not isinstance(error, StreamBroken), self.received is None
        may_stay = answered or self._tried_until is None
        self._stayed = not begins and not self._stayed and may_stay
        following = tried
        if tried is not None and not self._stayed:
            can_begin_s = error.retry_after_ms / 1e3 if begins and self._is_stream else 0.0
            following = pool.after(tried, can_begin_s if answered else AVOIDED_S)
        if self._tried_until is None:
            if answered and not begins:
                raise error
            self._tried_until = now + self._resume_timeout_s
        if begins:
            self._tried.add(tried)
            self._has_answer |= answered
            if not self._tried.issuperset(pool.each):
                return following, 0.0
            may_wait = pool.may_change and not answered
            if not may_wait and not (self._is_stream and self._has_answer):
                raise error
            self._tried, self._has_answer = set(), False
        wait_s = error.retry_after_ms / 1e3
        if not answered and self._stayed:
            wait_s = 0.0
        elif not answered:
            wait_s = backoff(*_WAIT_S, self._num_waits, self._random)
            self._num_waits += 1
        elif wait_s > 0:
            # All clients of a dead coordinator wait for the end of its lease. The random part keeps
            # them from retrying at the same time.
            wait_s += LEASE_WAIT_SPREAD_MS / 1e3 * self._random()
        if now + wait_s >= min(self._tried_until, deadline):
            raise error
        return following, wait_s
