"""Calls the coordinators of a deployment in turn, and resumes a generation whose stream breaks."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import reduce
from random import random as any_random
from typing import Any, Final, Generic, TypeAlias, TypeVar

from outrider.backoff import backoff, spread
from outrider.client.transport import GENERATE_SLACK_S, Method, Transport, is_healthy
from outrider.errors import BadRequest, StreamBroken, Unavailable
from outrider.limits import DEADLINE_MS_MAX, LEASE_WAIT_SPREAD_MS
from outrider.request import Event, GenerateRequest, ResumeRequest, Started, Tokens
from outrider.tokens import EMPTY_DIGEST, extend_digest

_log = logging.getLogger(__name__)

T = TypeVar("T")
Server: TypeAlias = str | Callable[[], str]
"""HOST:PORT, or several with commas between them, or a function that returns such a text. It is
called in the thread, or on the event loop, of the caller, and so must not take long."""
RESUME_TIMEOUT_S: Final = 15.0
"""How long a broken stream is tried to be resumed, by default, or a request to be begun that the
coordinators cannot serve now: they, or what they need, may be started anew."""
LOOK_S: Final = 0.5
"""The function is not called again sooner."""
GONE_MAX: Final = 16
"""Connections that are kept to coordinators which are named no more: calls may still run there."""
AVOIDED_S: Final = 5.0
"""For so long calls begin elsewhere than at one that did not answer. One that cannot serve now says
how long."""
_WAIT_S: Final = (0.05, 1.0)
"""First and longest wait between two tries; see `backoff`."""


def addresses_of(server: object) -> list[str]:
    """Each HOST:PORT of those with commas between them. Raises `BadRequest` where one is empty, or
    it is no text."""
    each = [one.strip() for one in server.split(",")] if isinstance(server, str) else [""]
    if not all(each):
        raise BadRequest(
            "server", f"{server!r} is wrong; it must be HOST:PORT, or several with commas between"
        )
    return list(dict.fromkeys(each))


class EndpointPool(Generic[T]):
    """One connection to each coordinator that is named. Calls begin at each in turn, so that all
    have a share of a client's sessions. Any number of threads may share it."""

    def __init__(
        self,
        server: Server,
        connect: Callable[[str], T],
        clock: Callable[[], float] = time.monotonic,
        first: int | None = None,
    ) -> None:
        """`connect` makes a connection to HOST:PORT, without sending anything; the first call
        begins at the one at `first`, by default at any. Raises what a function as `server` does,
        and `BadRequest` for what are no addresses. It may name none at first, by an empty text."""
        self._name = server if callable(server) else None
        self._connect = connect
        self.clock = clock
        self._looked_at = clock()
        named = server() if callable(server) else server
        is_none = callable(server) and named == ""
        self._named = [] if is_none else addresses_of(named)
        self._open = {address: connect(address) for address in self._named}
        """The oldest first; those that are named no more among them."""
        self._next = secrets.randbelow(max(1, len(self._named))) if first is None else first
        self._avoided: dict[T, float] = {}
        """Until when."""
        self._trouble = ""
        """What the function failed with last, if it did."""
        self._changing = threading.Lock()

    @property
    def may_change(self) -> bool:
        return self._name is not None

    @property
    def each(self) -> list[T]:
        """To those that were named last; empty until a function has named any."""
        return [self._open[address] for address in self._named]

    @property
    def all(self) -> list[T]:
        return list(self._open.values())

    def begin(self) -> T:
        """For another call: the next that is not avoided, or the next where all are. Raises
        `StreamBroken` where there are none."""
        each, now = self.each, self.clock()
        if not each:
            raise StreamBroken("no coordinator is named yet")
        order = [(self._next + place) % len(each) for place in range(len(each))]
        found = next((at for at in order if self._avoided.get(each[at], now) <= now), order[0])
        self._next = found + 1
        return each[found]

    def after(self, tried: T | None, avoided_s: float = AVOIDED_S) -> T | None:
        """For a call that has tried one in vain: the next one, so that it goes round all of them.
        Others do not begin there for so many seconds. None where there are none."""
        each = self.each
        if tried is None or tried not in each:  # There are others now.
            return self.begin() if each else None
        until = self.clock() + avoided_s
        self._avoided[tried] = max(until, self._avoided.get(tried, until))
        return each[(each.index(tried) + 1) % len(each)]

    def renew(self) -> list[T] | None:
        """For one that does not answer: has the coordinators named again. Returns None where they
        are those that are known, else what is to be closed, as it is to one of long ago. A
        function that names none (an empty text) changes nothing, nor does one that fails, which the
        log says, once."""
        with self._changing:
            now = self.clock()
            if self._name is None or now - self._looked_at < LOOK_S:
                return None
            self._looked_at = now
            try:
                text = self._name()
                if not text:  # For the moment, as while the only one is replaced.
                    return None
                named = addresses_of(text)
            except Exception as error:  # noqa: BLE001 (the caller's function)
                if repr(error) != self._trouble:
                    _log.warning("the coordinators stay those that are known: %r", error)
                self._trouble = repr(error)
                return None
            self._trouble = ""
            if set(named) == set(self._named):
                return None
            for address in named:
                if address not in self._open:
                    self._open[address] = self._connect(address)
            self._named = named
            gone = [address for address in self._open if address not in named]
            closed = [self._open.pop(address) for address in gone[: max(0, len(gone) - GONE_MAX)]]
            for one in closed:
                self._avoided.pop(one, None)
            return closed


class ResumingTransport(Transport):
    """Over other transports, each to a coordinator of the same deployment. Calls go to one that
    answers. A stream that breaks goes on at the next: `Started` comes once, and each token."""

    def __init__(
        self,
        transports: Sequence[Transport] | EndpointPool[Transport],
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        random: Callable[[], float] = any_random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Owns and closes `transports`; of a sequence the first is called first. 0 seconds: a
        generation whose stream breaks is not resumed, and one that cannot begin now is not sent
        again. `random` is for `backoff`."""
        if not isinstance(transports, EndpointPool):
            given = {str(index): one for index, one in enumerate(transports)}
            transports = EndpointPool(",".join(given), given.__getitem__, _loop_time, first=0)
        self._pool = transports
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
        """Raises `StreamBroken` where a stream could not be resumed."""
        begun = request if isinstance(request, ResumeRequest) else None
        progress = StreamProgress(
            len(self._pool.each), self._resume_timeout_s, begun, self._pool.may_change, self._random
        )

        async def ask(transport: Transport, left_s: float) -> AsyncGenerator[Event]:
            asked = progress.remainder(left_s) or request
            async with aclosing(transport.events(asked, left_s)) as events:
                async for event in events:
                    if progress.note(event):
                        yield event

        return self._tried(ask, progress, timeout_s)

    async def call(self, method: Method, timeout_s: float, session_id: str = "") -> Any:
        """The answer of the first coordinator that gives one; that it cannot now is none, but the
        last coordinator's. Where a function names the coordinators and none of them answers, they
        are called again until the time is over."""
        pool = self._pool
        if method == "healthy":
            for transport in pool.each:
                if await is_healthy(transport, timeout_s):
                    return True
            return False
        tries_s = min(timeout_s, self._resume_timeout_s)
        progress = StreamProgress(
            len(pool.each), tries_s, None, pool.may_change, self._random, waits_for_answers=False
        )

        async def ask(transport: Transport, left_s: float) -> AsyncGenerator[Any]:
            yield await transport.call(method, timeout_s, session_id)

        async with aclosing(self._tried(ask, progress, math.inf)) as answers:
            return await anext(answers)

    async def _tried(
        self,
        ask: Callable[[Transport, float], AsyncGenerator[T]],
        progress: StreamProgress,
        timeout_s: float,
    ) -> AsyncGenerator[T]:
        """What coordinators are asked for, one after the other, and answer."""
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
                is_gone = isinstance(error, StreamBroken)
                if is_gone and (closed := pool.renew()) is not None:  # There are others by now.
                    for transport in closed:
                        await transport.close()
                    progress.begin_round(len(pool.each))
                wait_s = progress.wait_after(error, pool.clock(), deadline)
                if progress.moves_on:
                    avoided_s = error.retry_after_ms / 1e3 if progress.may_begin else 0.0
                    current = pool.after(current, AVOIDED_S if is_gone else avoided_s)
            await self._sleep(wait_s)

    async def close(self) -> None:
        self._closed = True
        for transport in self._pool.all:
            await transport.close()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class StreamProgress:
    """What the caller of a generation has received, and what is done when its stream breaks."""

    def __init__(
        self,
        num_coordinators: int,
        resume_timeout_s: float,
        begun: ResumeRequest | None = None,
        may_change: bool = False,
        random: Callable[[], float] = any_random,
        *,
        waits_for_answers: bool = True,
    ) -> None:
        """`begun` is what was received before, of a stream that is resumed; with `may_change` other
        coordinators may come to be known; `random` is for `backoff`. A call that is no stream does
        not wait until one that has answered can."""
        self._num_coordinators = self._tries_left = num_coordinators
        self._may_change = may_change
        self._waits_for_answers = waits_for_answers
        self._has_answer = False
        """Whether one of them has answered in this round, and so may be called again."""
        self._resume_timeout_s = resume_timeout_s
        self._received = begun
        self._is_started = False
        self._tried_until: float | None = None
        self._random = random
        self._num_waits = 0
        self._num_failures = 0
        """Since the last token."""
        self._waits = False
        """Whether the coordinator that was called last is called once more, when it says."""
        self.moves_on = True
        """Whether the next coordinator is to be called."""

    def remainder(self, left_s: float) -> ResumeRequest | None:
        """Asks for what is missing, to be there in so many seconds; None before anything came, when
        all is."""
        if self._received is None or not self._is_started:
            return self._received
        left_ms = round((left_s - GENERATE_SLACK_S) * 1000)
        return replace(self._received, deadline_ms=min(max(1, left_ms), DEADLINE_MS_MAX))

    @property
    def may_begin(self) -> bool:
        """Whether a coordinator that cannot now says so of others, too, and not of a session."""
        return self._received is None and self._waits_for_answers

    def note(self, event: Event) -> bool:
        """An event has come; returns whether the caller gets it: not a second `Started`."""
        if isinstance(event, Started):
            is_first, self._is_started = not self._is_started, True
            self._received = self._received or ResumeRequest(
                event.session_id, 0, 0, tokens_digest=EMPTY_DIGEST
            )
            return is_first
        if isinstance(event, Tokens) and self._received is not None:
            if event.token_ids:  # Of these alone there can be only so many.
                self._tried_until, self._num_waits, self._num_failures = None, 0, 0
                self._waits = False
            characters, digest = self._received.num_characters, self._received.tokens_digest
            if digest is not None:
                digest = reduce(extend_digest, event.token_ids, digest)
            self._received = replace(
                self._received,
                num_tokens=event.first_index + len(event.token_ids),
                num_characters=None if characters is None else characters + len(event.text_delta),
                tokens_digest=digest,
            )
        return True

    def begin_round(self, num_coordinators: int) -> None:
        """There are so many now, others than before, and all are called after the one that has just
        not answered."""
        self._num_coordinators, self._tries_left = num_coordinators, num_coordinators + 1

    def wait_after(self, error: Unavailable, now: float, deadline: float) -> float:
        """How long to wait until a coordinator is called again: the next one, if this `moves_on`.
        The same one is called once more where a stream broke, as it has the session, and maybe only
        the connection is gone; and where another one has answered that it cannot go on with the
        session now, when it says, for no other could sooner. Times in s of one clock. Raises the
        error where that is of no use: all have been asked to begin, none has answered, and there
        will be no others; or a stream has ended with an answer, or they have been called for long
        enough."""
        answered = not isinstance(error, StreamBroken)
        self._num_failures += 1
        is_once_more = not answered and self._num_failures == 1
        self._waits = answered and self._num_failures > 2 and not self._waits
        self.moves_on = self._received is None or not (is_once_more or self._waits)
        if self._received is None:
            if self._tried_until is None:
                self._tried_until = now + self._resume_timeout_s
            self._tries_left -= 1
            self._has_answer |= answered
            if self._tries_left > 0:
                return 0.0
            waits = self._waits_for_answers if answered else self._may_change
            if not (waits or (self._has_answer and self._waits_for_answers)):
                raise error
            self._tries_left, self._has_answer = self._num_coordinators, False
        if self._tried_until is None:
            if answered and self._received is not None:
                raise error
            self._tried_until = now + self._resume_timeout_s
        wait_s = error.retry_after_ms / 1e3
        if is_once_more:
            wait_s = 0.0
        elif not answered:
            wait_s = backoff(*_WAIT_S, self._num_waits, self._random)
            self._num_waits += 1
        elif wait_s > 0:  # All clients of a dead coordinator wait for the same lease.
            wait_s = spread(wait_s, LEASE_WAIT_SPREAD_MS / 1e3, self._random)
        if now + wait_s >= min(self._tried_until, deadline):
            raise error
        return wait_s
