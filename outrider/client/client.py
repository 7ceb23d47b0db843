"""`Client` for asyncio, and `SyncClient` for blocking calls."""

import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing
from functools import partial, wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from outrider.client import transport
from outrider.client.failover import RESUME_TIMEOUT_S, EndpointPool, ResumingTransport, Server
from outrider.errors import BadRequest, DeadlineExceeded, InvariantError, Unavailable
from outrider.interfaces.request import Event, GenerateRequest, ResumeRequest
from outrider.limits import DEADLINE_MS_DEFAULT, DEADLINE_MS_MAX
from outrider.transport.channel import PLAIN, Trust

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
CALL_TIMEOUT_S = 10.0
"""Default timeout of a call that generates no tokens."""
RESUMED_TIMEOUT_S = DEADLINE_MS_MAX / 1000 + transport.GENERATE_SLACK_S
"""Default timeout of a call that resumes a generation. It allows for the longest deadline, because
only the coordinator knows the generation's own deadline."""
TIMEOUT_S_MAX = 1e7
"""gRPC cannot represent much longer timeouts."""


class Client:
    """Calls one coordinator, or the coordinators of a deployment in turn. If a coordinator does not
    answer, the client calls the next. If a stream breaks, the client resumes the generation, and no
    token is lost or repeated. Any number of calls may run at a time, on one event loop."""

    def __init__(
        self,
        server: Server | transport.Transport,
        *,
        api_key: str = "",
        trust: Trust = PLAIN,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> None:
        """`server` is one of these:

        - HOST:PORT, or several of them separated by commas.
        - A function that returns such a text, or an empty text while there are no coordinators. If
          a coordinator does not answer, the client calls the function again.
        - A transport. The other parameters are then ignored, and `close` also closes the transport.

        Nothing is sent before the first call. `api_key` is sent with each call, unencrypted unless
        `trust` (see `caller_trust`) asks for TLS. For up to `resume_timeout_s` seconds (0 = never),
        the client resumes broken streams, and repeats generation requests that no coordinator can
        serve now. If `server` is a function and no coordinator answers, the client also repeats
        other calls, for up to this time."""
        if isinstance(server, str) or callable(server):
            connect = partial(transport.GrpcTransport, trust=trust, api_key=api_key)
            server = ResumingTransport(EndpointPool(server, connect), resume_timeout_s)
        self._transport = server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """HOST:PORT of each known coordinator, separated by commas."""
        return self._transport.address

    async def close(self) -> None:
        """Cancels running calls and closes the transport. Further calls raise `Unavailable`."""
        await self._transport.close()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """Yields the events of one generation as they arrive. Closing the iterator early cancels
        the session. Raises the coordinator's errors. If the last event does not arrive within ten
        seconds after the generation's deadline, raises `DeadlineExceeded`. If the stream breaks and
        cannot be resumed, raises `StreamBroken`. A later `resume` may then succeed."""
        deadline_s = (request.deadline_ms or DEADLINE_MS_DEFAULT) / 1000
        return self._transport.events(request, deadline_s + transport.GENERATE_SLACK_S)

    def resume(
        self, session_id: str, num_tokens: int = 0, timeout_s: float = RESUMED_TIMEOUT_S
    ) -> AsyncGenerator[Event]:
        """Continues a generation whose stream broke, also if another client began it. Yields
        `Started` again, and then all events after the first `num_tokens` tokens. If an earlier
        stream of the session is still open, that stream ends with `StaleEpoch`. Raises `NotFound`
        for an unknown session, `DataLoss` if the store has too few tokens, and `Unavailable` while
        another coordinator owns the session. Ownership ends about 2 s after the owner's death."""
        _check_timeout(timeout_s)
        return self._transport.events(ResumeRequest(session_id, num_tokens), timeout_s)

    async def complete(self, request: GenerateRequest) -> transport.Completion:
        """Returns the whole answer. Raises the errors of `generate`. If the stream ends before the
        event `Finished`, raises `Unavailable`."""
        builder = transport.CompletionBuilder()
        async with aclosing(self.generate(request)) as events:
            async for event in events:
                builder.add(event)
        return builder.build()

    async def cancel(self, session_id: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Ends a session as `cancelled`. A finished session stays as it is. Raises `NotFound`."""
        await self._call("cancel", timeout_s, session_id)

    async def get_session(
        self, session_id: str, timeout_s: float = CALL_TIMEOUT_S
    ) -> transport.SessionView:
        """Reads a session from the store. Raises `NotFound`."""
        return cast(transport.SessionView, await self._call("get_session", timeout_s, session_id))

    async def describe(self, timeout_s: float = CALL_TIMEOUT_S) -> transport.CoordinatorDescription:
        """Returns facts about the model, and the number of running sessions."""
        return cast(transport.CoordinatorDescription, await self._call("describe", timeout_s))

    async def healthy(self, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Whether the server answers in time and reports that it can serve."""
        try:
            return bool(await self._call("healthy", timeout_s))
        except (Unavailable, DeadlineExceeded):
            return False

    async def _call(self, method: transport.Method, timeout_s: float, session_id: str = "") -> Any:
        _check_timeout(timeout_s)
        return await self._transport.call(method, timeout_s, session_id)


def _check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        reason = f"{timeout_s} is wrong; it must be above 0, and at most {TIMEOUT_S_MAX:.0f}"
        raise BadRequest("timeout_s", reason)


def _run(call: Awaitable[T]) -> T:
    """Runs a coroutine that never suspends, because its calls block. The hooks for async generators
    are off meanwhile. Otherwise an event loop of this thread would close the coroutine's generators
    when the loop ends."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        call.__await__().send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    finally:
        sys.set_asyncgen_hooks(*hooks)
    raise InvariantError("a blocking call has suspended")


def _iterate(events: AsyncGenerator[T]) -> Generator[T]:
    async def following() -> T:
        return await anext(events)

    try:
        while True:
            try:
                event = _run(following())
            except StopAsyncIteration:
                return
            yield event
    finally:
        _run(events.aclose())


def _blocking(
    method: Callable[Concatenate[Client, P], T], run: Callable[[T], R]
) -> "Callable[Concatenate[SyncClient, P], R]":
    @wraps(method)
    def call(self: "SyncClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return run(method(self._client, *args, **kwargs))

    described = signature(method)
    if described.return_annotation == AsyncGenerator[Event]:
        described = described.replace(return_annotation=Generator[Event])
    call.__signature__ = described  # type: ignore[attr-defined]
    return call


class SyncClient:
    """A client whose calls block until they are answered. Any number of threads may share one
    `SyncClient`. An interrupt (Ctrl-C) ends a call at once. The methods are those of `Client`.
    Closing an iterator early (`close`, or an exception in the loop over it) cancels the session.

    A `SyncClient` runs the coroutines of a `Client` with a blocking transport. The coroutines never
    suspend, so they need no event loop."""

    def __init__(
        self,
        address: Server,
        *,
        api_key: str = "",
        trust: Trust = PLAIN,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> None:
        """Like `Client`. `address` takes the values of `server`, except a transport."""

        async def sleep(seconds: float) -> None:
            time.sleep(seconds)  # noqa: ASYNC251 (run by `_run`)

        connect = partial(transport.BlockingGrpcTransport, trust=trust, api_key=api_key)
        pool: EndpointPool[transport.Transport] = EndpointPool(address, connect)
        self._client = Client(ResumingTransport(pool, resume_timeout_s, sleep=sleep))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._client.address

    generate = _blocking(Client.generate, _iterate)
    resume = _blocking(Client.resume, _iterate)
    complete = _blocking(Client.complete, _run)
    cancel = _blocking(Client.cancel, _run)
    get_session = _blocking(Client.get_session, _run)
    describe = _blocking(Client.describe, _run)
    healthy = _blocking(Client.healthy, _run)
    close = _blocking(Client.close, _run)
