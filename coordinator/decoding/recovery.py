"""A session that goes on after its stream broke: what its client lacks is told again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pydantic import ConfigDict, TypeAdapter

from coordinator.requests.validation import GenerationParameters
from coordinator.routing.replica_pool import ReplicaPool
from outrider.errors import DataLoss, Incompatible, OtherTokens, Unavailable, check
from outrider.messages import PositionLogprobs
from outrider.request import Event, Finished, Metrics, ResumeRequest, Started, Tokens, Usage
from outrider.sessions.store import FinishReason, SessionRecord
from outrider.speculation.accept_reject import Origin
from outrider.tokens import TokenSequence

from .detokenizer import Completion

TOKENS_PER_EVENT = 512
"""In one event of a replay: a long answer with log-probabilities would fill no message ..."""
ENTRIES_PER_EVENT = 1024
"""... nor may it take long to encode: log-probabilities in one event, unless of one token."""


_LOGPROBS = TypeAdapter(
    tuple[float, tuple[tuple[int, float], ...]], config=ConfigDict(ser_json_inf_nan="constants")
)


def write_logprobs(logprobs: PositionLogprobs) -> str:
    """A line of JSON for the store; of an impossible token with `-Infinity`."""
    return _LOGPROBS.dump_json((logprobs.logprob, logprobs.top)).decode()


def read_logprobs(line: str) -> PositionLogprobs:
    """What `write_logprobs` wrote. Raises `DataLoss` for anything else."""
    try:
        return PositionLogprobs(*_LOGPROBS.validate_json(line))
    except ValueError as error:
        raise DataLoss(f"stored log-probabilities cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Replayed:
    """A completion as far as it is stored."""

    completion: Completion
    """With all stored tokens."""
    events: tuple[Tokens, ...] = ()
    """What the client lacks of it."""
    finish_reason: FinishReason | None = None
    """Why the completion ends with them, if it does: its end may not be stored."""


def check_weights(session_id: str, weights: str, targets: ReplicaPool) -> None:
    """Raises `Unavailable` or `Incompatible` where no target has the weights of a session."""
    if targets.newest(weights) is None:
        if not targets.replicas:
            raise Unavailable("no target is known")
        raise Incompatible(
            f"session_id: {session_id} was decoded by a target with other weights "
            f"({weights}) than any here"
        )


def check_known(record: SessionRecord, request: ResumeRequest) -> GenerationParameters:
    """What the session was opened with. Raises `DataLoss` where that cannot be read, and
    `OtherTokens` where the client has tokens that the store lacks, or others than the store,
    whatever the rule: in bfloat16 no rule is sure to decode the same ones again. A store that lost
    a take-over may hold what an older owner decided in place of what the client was shown."""
    prompt_ids = record.token_ids[: record.prompt_length]
    parameters = GenerationParameters.from_json(record.parameters, prompt_ids)
    num_stored = len(record.token_ids) - record.prompt_length
    if request.num_tokens > num_stored:
        raise OtherTokens(
            f"num_tokens: the client has {request.num_tokens} tokens, the store {num_stored}; "
            f"the session can be resumed from {num_stored} on"
        )
    stored = record.token_ids[record.prompt_length :][: request.num_tokens]
    if request.tokens_digest not in (None, TokenSequence(stored).digest()):
        raise OtherTokens(
            f"tokens_digest: the client's {request.num_tokens} tokens are others than those that "
            f"are stored; the session can be resumed from 0 on"
        )
    return parameters


def replay(
    record: SessionRecord,
    parameters: GenerationParameters,
    completion: Completion,
    request: ResumeRequest,
) -> Replayed:
    """Pushes the stored tokens into an empty `completion`. Its text depends on its tokens alone,
    however they came, so what follows the client's goes on from its text; of a session that has
    ended, what was held back is told too, if the client says that it lacks it."""
    token_ids = record.token_ids[record.prompt_length :]
    first = 0 if request.cuts else request.num_tokens
    num_entries = 1 if parameters.logprobs is None else 1 + parameters.logprobs
    step = min(TOKENS_PER_EVENT, max(1, ENTRIES_PER_EVENT // num_entries))
    lines = record.logprobs.split("\n")[:-1] if parameters.logprobs is not None else []
    known = completion.push(token_ids[:first])
    reason = known.finish_reason
    text, events = known.text, []
    told = len(text) if request.num_characters is None else request.num_characters
    starts = {*range(first, len(token_ids), step), *request.cuts, len(token_ids)}
    for start, end in pairwise(sorted(one for one in starts if first <= one <= len(token_ids))):
        chunk = token_ids[start:end]
        piece = completion.push(chunk)
        check(piece.num_tokens == len(chunk), "tokens are stored behind a completion's end")
        reason, text = piece.finish_reason, text + piece.text
        origins = (Origin.STORED,) * len(chunk)
        logprobs = tuple(read_logprobs(line) for line in lines[start:end])
        events.append(Tokens(start, chunk, text[told:], origins, logprobs))
        told = max(told, len(text))
    if record.finish_reason is not None and reason is None:
        text += completion.finish()
        if text[told:]:
            events.append(Tokens(len(token_ids), (), text[told:], (), ()))
    return Replayed(completion, tuple(events), reason)


def told_again(record: SessionRecord, model: str, replayed: Replayed) -> Iterator[Event]:
    """The events of a finished session, for a client that lacks the last of them."""
    if record.finish_reason is None:
        return
    yield Started(record.session_id, model, record.seed, record.rule, record.prompt_length)
    yield from replayed.events
    yield Finished(
        finish_reason=record.finish_reason,
        usage=Usage(record.prompt_length, len(record.token_ids) - record.prompt_length),
        metrics=Metrics.of(record.counters, time_to_first_token_ms=0.0, tokens_per_second=0.0),
        stop_string=replayed.completion.stop_string,
        stop_token_id=replayed.completion.stop_token_id,
    )
