"""Calls a coordinator from Python.

    async with Client("127.0.0.1:50051") as client:
        async for event in client.generate(GenerateRequest("The capital of France is")):
            if isinstance(event, Tokens):
                print(event.text_delta, end="")

Every call has a deadline; every error is one of `outrider.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import BadRequest, DataLoss, Unavailable
from outrider.generation import (
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    Metrics,
    RoundReport,
    Started,
    Tokens,
    Usage,
)
from outrider.limits import DEADLINE_MS_DEFAULT, SEED_MAX
from outrider.messages import PositionLogprobs
from outrider.sessions.store import FinishReason
from outrider.speculation.decision import Origin
from outrider.speculation.sampling import Rule
from outrider.v1 import coordinator_pb2 as pb
from outrider.v1 import coordinator_pb2_grpc
from outrider.wire.channel import open_channel
from outrider.wire.generation import (
    FINISH_REASONS,
    event_from_proto,
    request_to_proto,
    rule_from_number,
)
from outrider.wire.status import status_to_error

__all__ = [
    "ChatMessage",
    "Client",
    "Completion",
    "CompletionBuilder",
    "Event",
    "Finished",
    "GenerateRequest",
    "Metrics",
    "RoundReport",
    "SessionView",
    "Started",
    "Tokens",
    "Usage",
]

CALL_TIMEOUT_S: Final = 10.0
"""Of a call that does no generation."""
GENERATE_SLACK_S: Final = 10.0
"""What the call of a generation may last longer than the generation's own deadline."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    session_id: str
    model: str
    seed: int
    rule: Rule
    text: str
    token_ids: tuple[int, ...]
    """Including the EOS or the token that completed a stop string; the text excludes both."""
    origins: tuple[Origin, ...]
    logprobs: tuple[PositionLogprobs, ...]
    rounds: tuple[RoundReport, ...]
    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as it is stored."""

    session_id: str
    epoch: int
    state: str
    seed: int
    rule: Rule
    prompt_length: int
    token_ids: tuple[int, ...]
    """Prompt and completion, committed."""
    finish_reason: FinishReason | None
    """None while it runs."""


class CompletionBuilder:
    """Puts a completion together from its events."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._origins: list[Origin] = []
        self._logprobs: list[PositionLogprobs] = []
        self._rounds: list[RoundReport] = []

    def add(self, event: Event) -> None:
        """Takes the next event. Raises `DataLoss` if tokens before it are missing."""
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Tokens):
            if event.first_index != len(self._token_ids):
                raise DataLoss(
                    f"token {event.first_index} came where {len(self._token_ids)} was expected"
                )
            self._text.append(event.text_delta)
            self._token_ids += event.token_ids
            self._origins += event.origins
            self._logprobs += event.logprobs
        elif isinstance(event, RoundReport):
            self._rounds.append(event)
        else:
            self._finished = event

    def build(self) -> Completion:
        """The completion. Raises `Unavailable` if its last event never came."""
        if self._started is None or self._finished is None:
            raise Unavailable("the stream ended before its last event")
        return Completion(
            session_id=self._started.session_id,
            model=self._started.model,
            seed=self._started.seed,
            rule=self._started.rule,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            origins=tuple(self._origins),
            logprobs=tuple(self._logprobs),
            rounds=tuple(self._rounds),
            finish_reason=self._finished.finish_reason,
            usage=self._finished.usage,
            metrics=self._finished.metrics,
        )


class Client:
    """One channel to a coordinator. Any number of calls at a time, on one event loop."""

    def __init__(self, address: str) -> None:
        """`address` is HOST:PORT. Nothing is sent before the first call."""
        self.address = address
        self._channel = open_channel(address)
        self._stub: Any = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what runs and closes the channel."""
        await self._channel.close(None)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """The events of one generation as they come. Leaving the iterator early (`aclose`) cancels
        the session. Raises what the coordinator refuses the request with."""
        _check_integers(request)
        deadline_ms = request.deadline_ms or DEADLINE_MS_DEFAULT
        call = self._stub.Generate(
            request_to_proto(request), timeout=deadline_ms / 1000 + GENERATE_SLACK_S
        )
        try:
            async for message in call:
                event = event_from_proto(message)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from error
        finally:
            call.cancel()

    async def complete(self, request: GenerateRequest) -> Completion:
        """The whole answer. Raises as `generate` does, and `Unavailable` if the stream broke."""
        builder = CompletionBuilder()
        async for event in self.generate(request):
            builder.add(event)
        return builder.build()

    async def cancel(self, session_id: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Ends a session with finish reason `cancelled`; its stream gets its last event. A
        finished one is unchanged. Raises `NotFound`."""
        await self._call(self._stub.Cancel, pb.CancelRequest(session_id=session_id), timeout_s)

    async def get_session(self, session_id: str, timeout_s: float = CALL_TIMEOUT_S) -> SessionView:
        """Reads a session from the store. Raises `NotFound`."""
        request = pb.GetSessionRequest(session_id=session_id)
        found: pb.Session = await self._call(self._stub.GetSession, request, timeout_s)
        return SessionView(
            session_id=found.session_id,
            epoch=found.epoch,
            state=found.state,
            seed=found.seed,
            rule=rule_from_number(found.rule),
            prompt_length=found.prompt_length,
            token_ids=tuple(found.token_ids),
            finish_reason=FINISH_REASONS.get(found.finish_reason),
        )

    async def healthy(self, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Whether the server answers and says that it can serve."""
        try:
            request = health_pb2.HealthCheckRequest()
            reply = await self._call(self._health.Check, request, timeout_s)
        except Unavailable:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from error


def _check_integers(request: GenerateRequest) -> None:
    """Raises `BadRequest` for a number that its field on the wire does not hold, and so cannot
    even be sent to be refused."""
    fields = {
        name: (getattr(request, name), -(2**31), 2**31 - 1)
        for name in ("max_tokens", "num_draft_tokens", "deadline_ms", "logprobs")
    }
    fields["seed"] = (request.seed, 0, SEED_MAX)
    fields["sampling.top_k"] = (request.sampling.top_k, -(2**31), 2**31 - 1)
    for name, (value, lowest, highest) in fields.items():
        if value is not None and not lowest <= value <= highest:
            raise BadRequest(name, f"{value} is wrong; it must be from {lowest} to {highest}")
