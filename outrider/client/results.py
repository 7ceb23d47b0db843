"""What calls return, as values."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.errors import BadRequest, DataLoss, Unavailable
from outrider.limits import API_KEY_CHARS_MAX, DEADLINE_MS_DEFAULT, DEADLINE_MS_MAX, SEED_MAX
from outrider.messages import PositionLogprobs
from outrider.request import (
    ChatMessage,
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
    """What a coordinator serves, and how busy it is."""

    model: str
    """The name that requests call it by."""
    vocab_size: int
    max_model_len: int
    num_running: int
    """Sessions that run now."""


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

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def session_id(self) -> str | None:
        """None before the session is open."""
        return None if self._started is None else self._started.session_id

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
            text=self.text,
            token_ids=tuple(self._token_ids),
            origins=tuple(self._origins),
            logprobs=tuple(self._logprobs),
            rounds=tuple(self._rounds),
            finish_reason=self._finished.finish_reason,
            usage=self._finished.usage,
            metrics=self._finished.metrics,
        )


CALL_TIMEOUT_S: Final = 10.0
"""Of a call that does no generation."""
GENERATE_SLACK_S: Final = 10.0
"""What the call of a generation may last longer than the generation's own deadline."""
RESUMED_TIMEOUT_S: Final = DEADLINE_MS_MAX / 1000 + GENERATE_SLACK_S
"""Of the call that goes on with one, whose deadline only the coordinator knows."""
_VISIBLE: Final = re.compile("[!-~]+")
_INT32: Final = (-(2**31), 2**31 - 1)


def generate_timeout_s(request: GenerateRequest) -> float:
    """Seconds that the call of a generation may last: the coordinator ends it before."""
    return (request.deadline_ms or DEADLINE_MS_DEFAULT) / 1000 + GENERATE_SLACK_S


def addresses_of(server: object) -> list[str]:
    """Each HOST:PORT of those with commas between them. Raises `BadRequest` where one is empty, or
    it is no text."""
    each = [one.strip() for one in server.split(",")] if isinstance(server, str) else [""]
    if not all(each):
        raise BadRequest(
            "server", f"{server!r} is wrong; it must be HOST:PORT, or several with commas between"
        )
    return each


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """What each call shows of a key; nothing where there is none. Raises `BadRequest`, which does
    not repeat it."""
    if not api_key:
        return ()
    if not _VISIBLE.fullmatch(api_key) or len(api_key) > API_KEY_CHARS_MAX:
        raise BadRequest(
            "api_key", f"is wrong; it must be up to {API_KEY_CHARS_MAX} visible ASCII characters"
        )
    return (("authorization", f"Bearer {api_key}"),)


def check_timeout(timeout_s: float) -> float:
    """The timeout itself. Raises `BadRequest` unless it is a positive number of seconds."""
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise BadRequest("timeout_s", f"{timeout_s} is wrong; it must be a number above 0")
    return timeout_s


def check_sendable(request: GenerateRequest) -> None:
    """Raises `BadRequest` for what no message holds, and so cannot even be sent to be refused. All
    other limits are the coordinator's to check."""
    _check_prompt(request)
    for name, text in _texts(request):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(name, f"is not Unicode text: {error.reason}") from None
    for name, value, lowest, highest in _integers(request):
        if not lowest <= value <= highest:
            raise BadRequest(name, f"{value} is wrong; it must be from {lowest} to {highest}")


def _check_prompt(request: GenerateRequest) -> None:
    if not isinstance(request.prompt, str) and len({type(part) for part in request.prompt}) > 1:
        raise BadRequest("prompt", "mixes kinds; give text, chat messages or token ids")


def _texts(request: GenerateRequest) -> Iterator[tuple[str, str]]:
    yield "model", request.model
    if isinstance(request.prompt, str):
        yield "text", request.prompt
    else:
        for index, turn in enumerate(request.prompt):
            if isinstance(turn, ChatMessage):
                yield f"chat.messages[{index}].role", turn.role
                yield f"chat.messages[{index}].content", turn.content
    for index, text in enumerate(request.stop):
        yield f"stop[{index}]", text


def _integers(request: GenerateRequest) -> Iterator[tuple[str, int, int, int]]:
    for name in (
        "max_tokens", "num_draft_tokens", "deadline_ms", "logprobs", "draft_deadline_ms"
    ):  # fmt: skip
        value: int | None = getattr(request, name)
        if value is not None:
            yield name, value, *_INT32
    if request.seed is not None:
        yield "seed", request.seed, 0, SEED_MAX
    yield "sampling.top_k", request.sampling.top_k, *_INT32
    for token_id, _ in request.sampling.logit_bias:
        yield "sampling.logit_bias", token_id, *_INT32
    if not isinstance(request.prompt, str):
        for index, part in enumerate(request.prompt):
            if isinstance(part, int):
                yield f"token_ids.ids[{index}]", part, *_INT32


CLOSED: Final = "the client is closed"
"""Why a call on a closed transport is `Unavailable`."""


class Transport(Protocol):
    """Carries calls to one coordinator. Every method is for one event loop, ends within the
    `timeout_s` seconds it is given, and raises errors of `outrider.errors` alone, `Unavailable` and
    `DeadlineExceeded` among them, and `StreamBroken` where no coordinator answers. Requests have
    been checked (`outrider.client.results`)."""

    @property
    def address(self) -> str:
        """Names the coordinator for people: HOST:PORT, where there is one."""
        ...

    def generate(self, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[Event]:
        """The events of one generation; closing the iterator early cancels its session."""
        ...

    def resume(self, request: ResumeRequest, timeout_s: float) -> AsyncGenerator[Event]:
        """The events of a generation whose stream broke, from `Started` on, without the tokens that
        had come; closing the iterator early cancels its session."""
        ...

    async def cancel(self, session_id: str, timeout_s: float) -> None:
        """Ends a session as cancelled; a finished one is unchanged. Raises `NotFound`."""
        ...

    async def get_session(self, session_id: str, timeout_s: float) -> SessionView:
        """Reads a session from the store. Raises `NotFound`."""
        ...

    async def describe(self, timeout_s: float) -> CoordinatorDescription:
        """What is served, and how many sessions run."""
        ...

    async def healthy(self, timeout_s: float) -> bool:
        """Whether the coordinator says that it can serve."""
        ...

    async def close(self) -> None:
        """Ends what runs on this transport. A second time it does nothing."""
        ...
