"""Transports carry the calls of a client, by gRPC or to a coordinator in this process."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import errors
from outrider.interfaces.messages import PositionLogprobs
from outrider.interfaces.request import (
    Event,
    Finished,
    GenerateRequest,
    Metrics,
    ResumeRequest,
    RoundReport,
    Started,
    Tokens,
    Usage,
)
from outrider.limits import API_KEY_CHARS_MAX
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule
from outrider.transport import request_codec as codec
from outrider.transport.channel import PLAIN, Trust, open_blocking_channel, open_channel
from outrider.transport.codec import session_id_from_wire
from outrider.transport.fields import from_proto
from outrider.transport.status import status_to_error
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc, types_pb2

CLOSED = "the client is closed"
GENERATE_SLACK_S = 10.0
"""The timeout of a generating call is the generation's deadline plus this time."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    session_id: str
    model: str
    seed: int
    rule: Rule
    text: str
    token_ids: tuple[int, ...]
    """Tokens of the answer. Unlike `text`, they include EOS, stop tokens and stop strings."""
    origins: tuple[Origin, ...]
    logprobs: tuple[PositionLogprobs, ...]
    rounds: tuple[RoundReport, ...]
    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session, as the store has it."""

    session_id: str
    epoch: int
    state: str
    seed: int
    rule: Rule
    prompt_length: int
    token_ids: tuple[int, ...]
    """Committed tokens, prompt included."""
    finish_reason: FinishReason | None
    """None while the session runs."""


@dataclass(frozen=True, slots=True)
class CoordinatorDescription:
    """The served model, and the number of sessions that the coordinator runs now."""

    model: str
    vocab_size: int
    max_model_len: int
    num_running: int


class CompletionBuilder:
    """Builds a completion from its events."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self._joined("text_delta"))

    @property
    def session_id(self) -> str | None:
        """None before the event `Started`."""
        started = self._events[0] if self._events else None
        return started.session_id if isinstance(started, Started) else None

    def add(self, event: Event) -> None:
        """Adds the next event. Raises `DataLoss` if tokens before the event are missing."""
        if isinstance(event, Tokens):
            if event.first_index != self._num_tokens:
                raise errors.DataLoss(
                    f"the next token has index {event.first_index}, not {self._num_tokens}"
                )
            self._num_tokens += len(event.token_ids)
        self._events.append(event)

    def build(self) -> Completion:
        """Returns the completion. Raises `Unavailable` if the event `Finished` is missing."""
        match self._events:
            case [Started() as started, *_, Finished() as finished]:
                return Completion(
                    session_id=started.session_id,
                    model=started.model,
                    seed=started.seed,
                    rule=started.rule,
                    text=self.text,
                    token_ids=self._joined("token_ids"),
                    origins=self._joined("origins"),
                    logprobs=self._joined("logprobs"),
                    rounds=tuple(event for event in self._events if isinstance(event, RoundReport)),
                    finish_reason=finished.finish_reason,
                    usage=finished.usage,
                    metrics=finished.metrics,
                )
        raise errors.Unavailable("the stream ended before its last event")

    def _joined(self, name: str) -> tuple[Any, ...]:
        tokens = (event for event in self._events if isinstance(event, Tokens))
        return tuple(value for event in tokens for value in getattr(event, name))


Method = Literal["cancel", "get_session", "describe", "healthy"]


class Transport(Protocol):
    """Carries calls to a coordinator, from one event loop. Calls end within `timeout_s` seconds,
    and raise only errors of `outrider.errors`. If no coordinator answers, the error is
    `StreamBroken`."""

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator, or a description if there is no HOST:PORT."""

    def events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float
    ) -> AsyncGenerator[Event]:
        """Yields the events of a generation. The first is `Started`, also for a `ResumeRequest`.
        Closing the iterator early cancels the session."""

    async def call(self, method: Method, timeout_s: float, session_id: str = "") -> Any:
        """Returns the result of the method `method` of `Client`."""

    async def close(self) -> None:
        """Ends running calls. Idempotent."""


_STATUS_DETAILS = "grpc-status-details-bin"
"""Every `Unavailable` from a coordinator has this metadata key. Errors of gRPC itself lack it."""
_ERROR_NUMBER = re.compile(r" \(\d+\)$")
_VISIBLE = re.compile("[!-~]+")


class GrpcTransport(Transport):
    """A gRPC channel to HOST:PORT, for any number of calls at a time."""

    def __init__(self, address: str, trust: Trust = PLAIN, *, api_key: str = "") -> None:
        """Nothing is sent before the first call. Raises `BadRequest` for an invalid key."""
        self._address = address
        self._metadata = key_metadata(api_key)
        self._channel = self._open(address, trust)
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
            return self._events(self._stub.Resume, codec.resume_to_proto(request), timeout_s)
        return self._events(self._stub.Generate, codec.request_to_proto(request), timeout_s)

    async def call(self, method: Method, timeout_s: float, session_id: str = "") -> Any:
        """`healthy` also works at the address of a draft or target."""
        stub = self._stub
        match method:
            case "cancel":
                asked: Any = pb.CancelRequest(session_id=session_id_from_wire(session_id))
                return await self._call(stub.Cancel, asked, timeout_s)
            case "get_session":
                asked = pb.GetSessionRequest(session_id=session_id_from_wire(session_id))
                answer = await self._call(stub.GetSession, asked, timeout_s)
                return codec.from_coordinator(answer, SessionView)
            case "describe":
                answer = await self._call(stub.Describe, types_pb2.DescribeRequest(), timeout_s)
                return codec.from_coordinator(answer, CoordinatorDescription)
        answer = await self._call(self._health.Check, health_pb2.HealthCheckRequest(), timeout_s)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def close(self) -> None:
        self._closed = True
        await self._channel.close(None)

    def _open(self, address: str, trust: Trust) -> Any:
        return open_channel(address, trust)

    async def _answer(self, call: Any) -> Any:
        return await call

    def _messages(self, call: Any) -> AsyncIterator[Any]:
        return aiter(call)

    async def _events(self, method: Any, request: Any, timeout_s: float) -> AsyncGenerator[Event]:
        with self._explaining():
            call = method(request, timeout=timeout_s, metadata=self._metadata)
            try:
                async for message in self._messages(call):
                    event = codec.event_from_proto(message)
                    if event is not None:
                        yield event
            finally:
                call.cancel()

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        with self._explaining():
            return await self._answer(method(request, timeout=timeout_s, metadata=self._metadata))

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Converts errors of gRPC in the `with` block to `outrider.errors`. When the transport is
        closed, gRPC raises CancelledError in running calls. This error becomes `Unavailable`."""
        if self._closed:
            raise errors.Unavailable(CLOSED)
        try:
            yield
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                task = asyncio.current_task()
                if not self._closed or task is None or task.cancelling():
                    raise
            if self._closed:
                raise errors.Unavailable(CLOSED) from None
            raise call_error(error, self._address) from error


class BlockingGrpcTransport(GrpcTransport):
    """A `GrpcTransport` over a blocking channel. Its coroutines never suspend, so they need no
    event loop. Threads may share the transport."""

    def _open(self, address: str, trust: Trust) -> Any:
        return open_blocking_channel(address, trust)

    async def _answer(self, call: Any) -> Any:
        return call

    async def _messages(self, call: Any) -> AsyncIterator[Any]:
        for message in call:
            yield message

    async def close(self) -> None:
        self._closed = True
        self._channel.close()


def call_error(error: Any, address: str) -> errors.OutriderError:
    """Returns the error that the coordinator raised, or `StreamBroken` if it did not answer."""
    meant = status_to_error(error)
    answered = any(key == _STATUS_DETAILS for key, _ in error.trailing_metadata() or ())
    if answered or not isinstance(meant, errors.Unavailable):
        return meant
    if "Failed parsing HTTP/2" in meant.message:
        return errors.StreamBroken(
            f"{address} is not a gRPC port; the default gRPC port of coordinators is 50051"
        )
    reason = _ERROR_NUMBER.sub("", meant.message.rpartition(": ")[2]).rstrip("])")
    return errors.StreamBroken(f"nothing answers at {address} ({reason})")


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """Returns metadata with the key, if any. The `BadRequest` for a wrong key does not quote it."""
    if not api_key:
        return ()
    if not _VISIBLE.fullmatch(api_key) or len(api_key) > API_KEY_CHARS_MAX:
        raise errors.BadRequest(
            "api_key", f"is wrong; it must be up to {API_KEY_CHARS_MAX} visible ASCII characters"
        )
    return (("authorization", f"Bearer {api_key}"),)


class InProcessTransport(Transport):
    """Calls a coordinator in this process."""

    def __init__(self, service: Any, tenant: str = "") -> None:
        """`service` is a `coordinator.service.CoordinatorService`, which `close` does not close."""
        self._service = service
        self._tenant = tenant
        self._waiting: set[asyncio.Timeout] = set()
        self._idle: set[AsyncGenerator[Event]] = set()
        """Streams whose caller has an event and has not asked for the next one."""
        self._closed = False

    @property
    def address(self) -> str:
        return "in-process"

    async def events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float
    ) -> AsyncGenerator[Event]:
        if isinstance(request, ResumeRequest):
            asked: Any = codec.resume_from_proto(codec.resume_to_proto(request))
            stream = self._service.streams.resume(asked, self._tenant)
        else:
            asked = codec.request_from_proto(codec.request_to_proto(request))
            stream = self._service.streams.generate(asked, self._tenant)
        deadline = _now() + timeout_s
        async with aclosing(stream) as events:
            while True:
                # A timeout around a `yield` would cancel what the caller awaits.
                async with self._until(deadline):
                    event = await anext(events, None)
                if event is None:
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
                    return await service.streams.cancel(
                        session_id_from_wire(session_id), self._tenant
                    )
                case "get_session":
                    session = await service.streams.session(
                        session_id_from_wire(session_id), self._tenant
                    )
                    return from_proto(codec.session_to_proto(session), SessionView)
                case "describe":
                    served, num_running = service.served, service.num_running
                    return CoordinatorDescription(
                        served.model, served.vocab_size, served.max_model_len, num_running
                    )
                case _:
                    return not service.health.trouble

    async def close(self) -> None:
        self._closed = True
        now = _now()
        for timeout in self._waiting:
            if not timeout.expired():
                timeout.reschedule(now)
        for events in tuple(self._idle):
            await events.aclose()

    @asynccontextmanager
    async def _until(self, deadline: float) -> AsyncIterator[None]:
        """Cancels the `with` block at `deadline` (loop time), and raises `DeadlineExceeded`. If the
        transport is closed, cancels the block, too, and raises `Unavailable`."""
        if self._closed:
            raise errors.Unavailable(CLOSED)
        timeout = asyncio.timeout_at(deadline)
        self._waiting.add(timeout)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            if self._closed:
                raise errors.Unavailable(CLOSED) from None
            raise errors.DeadlineExceeded("the coordinator did not answer in time") from None
        finally:
            self._waiting.discard(timeout)


def _now() -> float:
    return asyncio.get_running_loop().time()
