"""How a client reaches a coordinator, and what its calls return."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from outrider.errors import DataLoss, Unavailable
from outrider.messages import PositionLogprobs
from outrider.request import (
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
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule

CLOSED: Final = "the client is closed"
"""Why a call on a closed transport is `Unavailable`."""
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


@dataclass(frozen=True, slots=True)
class CoordinatorDescription:
    """What a coordinator serves, and how many sessions run."""

    model: str
    """The name that requests call it by."""
    vocab_size: int
    max_model_len: int
    num_running: int


class CompletionBuilder:
    """Puts a completion together from its events."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._tokens: list[Tokens] = []
        self._num_tokens = 0
        self._rounds: list[RoundReport] = []

    @property
    def text(self) -> str:
        return "".join(event.text_delta for event in self._tokens)

    @property
    def session_id(self) -> str | None:
        """None before the session is open."""
        return None if self._started is None else self._started.session_id

    def add(self, event: Event) -> None:
        """Takes the next event. Raises `DataLoss` if tokens before it are missing."""
        match event:
            case Started():
                self._started = event
            case Tokens():
                if event.first_index != self._num_tokens:
                    raise DataLoss(
                        f"token {event.first_index} came where {self._num_tokens} was expected"
                    )
                self._tokens.append(event)
                self._num_tokens += len(event.token_ids)
            case RoundReport():
                self._rounds.append(event)
            case Finished():
                self._finished = event

    def build(self) -> Completion:
        """The completion. Raises `Unavailable` if its last event never came."""
        started, finished = self._started, self._finished
        if started is None or finished is None:
            raise Unavailable("the stream ended before its last event")
        return Completion(
            session_id=started.session_id,
            model=started.model,
            seed=started.seed,
            rule=started.rule,
            text=self.text,
            token_ids=tuple(one for event in self._tokens for one in event.token_ids),
            origins=tuple(one for event in self._tokens for one in event.origins),
            logprobs=tuple(one for event in self._tokens for one in event.logprobs),
            rounds=tuple(self._rounds),
            finish_reason=finished.finish_reason,
            usage=finished.usage,
            metrics=finished.metrics,
        )


Method = Literal["cancel", "get_session", "describe", "healthy"]


class Transport(Protocol):
    """Carries calls to one coordinator. Every method is for one event loop, ends within the
    `timeout_s` seconds it is given, and raises errors of `outrider.errors` alone, `Unavailable` and
    `DeadlineExceeded` among them, and `StreamBroken` where no coordinator answers."""

    @property
    def address(self) -> str:
        """Names the coordinator for people: HOST:PORT, where there is one."""
        ...

    def events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float
    ) -> AsyncGenerator[Event]:
        """The events of one generation, or of one whose stream broke from `Started` on, without the
        tokens that had come; closing the iterator early cancels its session."""
        ...

    async def call(self, method: Method, timeout_s: float, session_id: str = "") -> Any:
        """What a method of `Client` returns that is about no stream."""
        ...

    async def close(self) -> None:
        """Ends what runs on this transport. Idempotent."""
        ...
