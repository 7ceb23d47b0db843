"""Resumes sessions whose streams broke: checks the tokens that the client has, and replays the
stored tokens that the client lacks."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pydantic import ConfigDict, TypeAdapter

from coordinator.requests.validation import GenerationParameters
from outrider.errors import DataLoss, OtherTokens, check
from outrider.foundation.tokens import TokenSequence
from outrider.interfaces.messages import PositionLogprobs
from outrider.interfaces.request import (
    Event,
    Finished,
    Metrics,
    ResumeRequest,
    Started,
    Tokens,
    Usage,
)
from outrider.sessions.store import FinishReason, SessionRecord
from outrider.speculation.accept_reject import Origin

from .detokenizer import Completion

TOKENS_PER_EVENT = 512
"""Largest number of tokens in one event of a replay, which bounds the size of the message."""
ENTRIES_PER_EVENT = 1024
"""Largest number of log-probabilities in an event of a replay. One token alone may have more."""
_LOGPROBS = TypeAdapter(
    tuple[float, tuple[tuple[int, float], ...]], config=ConfigDict(ser_json_inf_nan="constants")
)


def write_logprobs(logprobs: PositionLogprobs) -> str:
    """Returns a position's log-probabilities as a line of JSON. log(0) is `-Infinity`."""
    return _LOGPROBS.dump_json((logprobs.logprob, logprobs.top)).decode()


def read_logprobs(line: str) -> PositionLogprobs:
    """Reads a line that `write_logprobs` wrote. Raises `DataLoss` if the line is malformed."""
    try:
        return PositionLogprobs(*_LOGPROBS.validate_json(line))
    except ValueError as error:
        raise DataLoss(f"stored log-probabilities cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Replayed:
    """The part of a completion that the store has."""

    completion: Completion
    events: tuple[Tokens, ...] = ()
    """The stored tokens that the client lacks."""
    finish_reason: FinishReason | None = None
    """Why the stored tokens end the completion; None if they do not. The stored record may still
    lack this reason."""


def check_known(record: SessionRecord, request: ResumeRequest) -> GenerationParameters:
    """Returns the session's parameters. Raises `DataLoss` if the parameters cannot be read, and
    `OtherTokens` if the client has more or other tokens than the store. If a failover of the
    store loses a take-over, the former owner runs on. Its tokens may differ from the client's."""
    parameters = GenerationParameters.of(record)
    num_stored = len(record.token_ids) - record.prompt_length
    if request.num_tokens > num_stored:
        raise OtherTokens(
            f"num_tokens: the client has {request.num_tokens} tokens, the store {num_stored}; "
            f"the session can be resumed with num_tokens {num_stored}"
        )
    stored = record.token_ids[record.prompt_length :][: request.num_tokens]
    if request.tokens_digest not in (None, TokenSequence(stored).digest()):
        raise OtherTokens(
            f"tokens_digest: the client's {request.num_tokens} tokens differ from those stored; "
            f"the session can be resumed with num_tokens 0"
        )
    return parameters


def replay(
    record: SessionRecord,
    parameters: GenerationParameters,
    completion: Completion,
    request: ResumeRequest,
) -> Replayed:
    """Pushes the stored tokens into an empty `completion`. Returns events with the tokens and text
    that the client lacks. If the session is finished, the last event has the text that the
    completion held back."""
    token_ids = record.token_ids[record.prompt_length :]
    first = 0 if request.cuts else request.num_tokens
    num_entries = 1 if parameters.logprobs is None else 1 + parameters.logprobs
    step = min(TOKENS_PER_EVENT, max(1, ENTRIES_PER_EVENT // num_entries))
    lines = record.logprobs.split("\n")[:-1] if parameters.logprobs is not None else []
    known = completion.push(token_ids[:first])
    reason = known.finish_reason
    text, events = known.text, []
    num_sent = len(text) if request.num_characters is None else request.num_characters
    starts = {*range(first, len(token_ids), step), *request.cuts, len(token_ids)}
    for start, end in pairwise(
        sorted(index for index in starts if first <= index <= len(token_ids))
    ):
        chunk = token_ids[start:end]
        piece = completion.push(chunk)
        check(piece.num_tokens == len(chunk), "tokens are stored after the completion's end")
        reason, text = piece.finish_reason, text + piece.text
        origins = (Origin.STORED,) * len(chunk)
        logprobs = tuple(read_logprobs(line) for line in lines[start:end])
        events.append(Tokens(start, chunk, text[num_sent:], origins, logprobs))
        num_sent = max(num_sent, len(text))
    if record.finish_reason is not None and reason is None:
        text += completion.finish()
        if text[num_sent:]:
            events.append(Tokens(len(token_ids), (), text[num_sent:], (), ()))
    return Replayed(completion, tuple(events), reason)


def started(record: SessionRecord, model: str) -> Started:
    """Returns the first event of a session."""
    return Started(record.session_id, model, record.seed, record.rule, record.prompt_length)


def replayed_events(record: SessionRecord, replayed: Replayed) -> Iterator[Event]:
    """Yields all events after `Started` if the session is finished, otherwise nothing."""
    if record.finish_reason is None:
        return
    yield from replayed.events
    yield Finished(
        finish_reason=record.finish_reason,
        usage=Usage(record.prompt_length, len(record.token_ids) - record.prompt_length),
        metrics=Metrics.of(record.counters, time_to_first_token_ms=0.0, tokens_per_second=0.0),
        stop_string=replayed.completion.stop_string,
        stop_token_id=replayed.completion.stop_token_id,
    )
