"""Users' requests, and the events that answer them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self, TypeVar

from annotated_types import Interval, MaxLen

from outrider import limits
from outrider.foundation.values import value
from outrider.grammar.constraint import Constraint
from outrider.interfaces.messages import PositionLogprobs
from outrider.sessions.store import Counters, FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule, SamplingParams

Entries = TypeVar("Entries")
StopStrings = Annotated[Entries, MaxLen(limits.STOP_STRINGS_MAX)]
Seed = Annotated[int, Interval(ge=0, le=limits.SEED_MAX)]
NumDraftTokens = Annotated[int, Interval(ge=0, le=limits.NUM_DRAFT_TOKENS_MAX)]
DeadlineMs = Annotated[int, Interval(ge=1, le=limits.DEADLINE_MS_MAX)]
DraftDeadlineMs = Annotated[int, Interval(ge=1, le=limits.DRAFT_DEADLINE_MS_MAX)]
Logprobs = Annotated[int, Interval(ge=0, le=limits.LOGPROBS_MAX)]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    more: Mapping[str, object] = field(default_factory=dict)
    """Further fields for the chat template, such as `tool_calls`. Not sent by gRPC."""


Prompt = str | tuple[ChatMessage, ...] | tuple[int, ...]
"""Text, a conversation for the model's chat template, or token ids."""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How errors name the fields that only the coordinator can check, because it knows the model.
    The defaults are gRPC's names."""

    prompt: str = ""
    """Empty = text, chat or token_ids, by the kind of the prompt."""
    max_tokens: str = "max_tokens"
    rule: str = "rule"
    sampling: str = "sampling."
    """Precedes the names of sampling parameters."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Asks for one completion. None = the coordinator's default. The types state the limits, as far
    as they do not depend on the model."""

    prompt: Prompt
    model: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: StopStrings[tuple[str, ...]] = ()
    ignore_eos: bool = False
    seed: Seed | None = None
    rule: Rule | None = None
    num_draft_tokens: NumDraftTokens | None = None
    """Largest number of draft tokens in a round; 0 = plain decoding by the target alone."""
    deadline_ms: DeadlineMs | None = None
    logprobs: Logprobs | None = None
    """How many of the likeliest tokens to report at every position; None = no log-probabilities."""
    include_rounds: bool = False
    """Whether to send a `RoundReport` for every round."""
    draft_deadline_ms: DraftDeadlineMs | None = None
    """Time limit for drafting in a round, ms. At the limit, the draft returns what it has drawn."""
    constraint: Constraint | None = None
    """The completion must match the constraint, and ends when no further token can match."""
    # Only HTTP requests set the following fields. gRPC does not send them.
    names: FieldNames = field(default_factory=FieldNames, compare=False)
    prompt_logprobs: Logprobs | None = None
    """Like `logprobs`, but for the prompt. If this field is set, `max_tokens` may be 0."""
    tools: Sequence[Mapping[str, object]] = ()
    template_variables: Mapping[str, object] = field(default_factory=dict)
    """Variables for the chat template, in addition to messages and tools."""
    shown_tokens: tuple[str, ...] = ()
    """Special tokens to keep in the text, such as marks of tool calls. Others are omitted."""
    answer_form: str = ""
    """JSON for `coordinator.http_api`: how to parse tool calls and reasoning; empty = no parser."""
    default_max_tokens: int = limits.MAX_TOKENS_DEFAULT
    """Used if `max_tokens` is None. The room in the model's context may reduce this number."""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Asks to continue a session whose stream has broken."""

    session_id: str
    num_tokens: int = 0
    """Number of completion tokens that the client has. Without `cuts`, they are not sent again."""
    num_characters: int | None = None
    """Number of characters (code points) that the client has; None = all text of its tokens."""
    deadline_ms: int | None = None
    """Time limit, counted from this request. Default and maximum: the session's time limit."""
    tokens_digest: int | None = None
    """`TokenSequence.digest` of the tokens that the client has; None = no check of these tokens."""
    cuts: tuple[int, ...] = ()
    """If set, all tokens are sent again, in events that end at these token counts. Not in gRPC."""


@dataclass(frozen=True, slots=True)
class Started:
    """The session is open."""

    session_id: str
    model: str
    seed: int
    rule: Rule
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Some tokens of the prompt. These events come before the events with completion tokens."""

    token_ids: tuple[int, ...]
    """[n]"""
    logprobs: tuple[PositionLogprobs | None, ...]
    """[n]: None for the first token of the prompt."""


@value(frozen=True, slots=True)
class Tokens:
    """Committed tokens. `text_delta` has whole characters only, so it may lag behind the tokens."""

    first_index: int
    """Index of `token_ids[0]` in the completion."""
    token_ids: tuple[int, ...]
    text_delta: str
    origins: tuple[Origin, ...]
    logprobs: tuple[PositionLogprobs, ...]
    """Empty if the request did not ask for log-probabilities."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round's proposal, and the times of the round's parts."""

    index: int
    proposed_token_ids: tuple[int, ...]
    num_accepted: int
    draft_ms: float
    wire_ms: float
    queue_ms: float
    verify_ms: float
    commit_ms: float
    look_ahead_hit: bool = False
    """Whether the proposal was ready when the round began."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of one request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """Statistics of speculation for one request."""

    num_rounds: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    """1 + accepted draft tokens / rounds with draft tokens, as in vLLM."""
    time_to_first_token_ms: float
    tokens_per_second: float
    """Completion tokens, divided by the time from the request's arrival to its last event."""
    num_drafts: int = 0
    """Number of rounds with draft tokens."""

    @classmethod
    def of(
        cls, counters: Counters, *, time_to_first_token_ms: float, tokens_per_second: float
    ) -> Self:
        """The metrics of a session with these counters."""
        drafts, accepted = counters.num_drafts, counters.num_accepted_draft_tokens
        return cls(
            num_rounds=counters.num_rounds,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_draft_tokens=accepted,
            mean_acceptance_length=1 + accepted / max(1, drafts),
            time_to_first_token_ms=time_to_first_token_ms,
            tokens_per_second=tokens_per_second,
            num_drafts=drafts,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event."""

    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics
    stop_string: str | None = None
    stop_token_id: int | None = None


Event = Started | PromptTokens | Tokens | RoundReport | Finished
