"""What calls return, as values."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import DataLoss, Unavailable
from outrider.messages import PositionLogprobs
from outrider.request import Event, Finished, Metrics, RoundReport, Started, Tokens, Usage
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
