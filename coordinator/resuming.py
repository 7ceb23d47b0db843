"""A session that goes on after its stream broke: what its client lacks is told again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.errors import DataLoss, check
from outrider.generation import Event, Finished, Metrics, Started, Tokens, Usage
from outrider.messages import PositionLogprobs
from outrider.sessions.store import FinishReason, SessionRecord
from outrider.speculation.decision import Origin

from .completion import Completion
from .request import GenerationParameters


@dataclass(frozen=True, slots=True)
class Replayed:
    """A completion as far as it is stored."""

    completion: Completion
    """With all stored tokens."""
    tokens: Tokens | None
    """Those that the client lacks; None where it has all."""
    finish_reason: FinishReason | None
    """Why the completion ends with them, if it does: its end was not stored."""


def parameters_of(record: SessionRecord) -> GenerationParameters:
    """What the session was opened with. Raises `DataLoss` where that cannot be read."""
    prompt_ids = record.token_ids[: record.prompt_length]
    return GenerationParameters.from_json(record.parameters, prompt_ids)


def replay(
    record: SessionRecord,
    parameters: GenerationParameters,
    completion: Completion,
    num_known: int,
) -> Replayed:
    """Pushes the stored tokens into an empty `completion`. Its text depends on its tokens alone,
    however they came, so what follows the client's first `num_known` goes on from their text.
    Raises `DataLoss` where the store has fewer."""
    token_ids = record.token_ids[record.prompt_length :]
    if num_known > len(token_ids):
        raise DataLoss(
            f"num_tokens: the client has {num_known} tokens, the store {len(token_ids)}; "
            "the session cannot be resumed"
        )
    known = completion.push(token_ids[:num_known])
    missing = token_ids[num_known:]
    if not missing:
        return Replayed(completion, None, known.finish_reason)
    piece = completion.push(missing)
    check(piece.num_tokens == len(missing), "tokens are stored behind the end of a completion")
    lines = record.logprobs.split("\n")[:-1] if parameters.logprobs is not None else []
    text = piece.text
    if piece.finish_reason is None and record.finish_reason is not None:
        text += completion.finish()
    tokens = Tokens(
        first_index=num_known,
        token_ids=missing,
        text_delta=text,
        origins=(Origin.STORED,) * len(missing),
        logprobs=tuple(read_logprobs(line) for line in lines[num_known:]),
    )
    return Replayed(completion, tokens, piece.finish_reason)


def told_again(record: SessionRecord, model: str, replayed: Replayed) -> Iterator[Event]:
    """The events of a finished session, for a client that lacks the last of them."""
    if record.finish_reason is None:
        return
    yield Started(record.session_id, model, record.seed, record.rule)
    if replayed.tokens is not None:
        yield replayed.tokens
    counters = record.counters
    yield Finished(
        finish_reason=record.finish_reason,
        usage=Usage(record.prompt_length, len(record.token_ids) - record.prompt_length),
        metrics=Metrics(
            num_rounds=counters.num_rounds,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_draft_tokens=counters.num_accepted_draft_tokens,
            mean_acceptance_length=(
                1 + counters.num_accepted_draft_tokens / max(1, counters.num_rounds)
            ),
            time_to_first_token_ms=0.0,
            tokens_per_second=0.0,
        ),
    )


def write_logprobs(logprobs: PositionLogprobs) -> str:
    """A line of JSON for the store, which knows no infinity: an impossible token has null."""
    top = [[token_id, _finite(value)] for token_id, value in logprobs.top]
    return json.dumps([_finite(logprobs.logprob), top], allow_nan=False)


def read_logprobs(line: str) -> PositionLogprobs:
    """What `write_logprobs` wrote. Raises `DataLoss` for anything else."""
    try:
        logprob, top = json.loads(line)
        return PositionLogprobs(
            _number(logprob), tuple((int(token_id), _number(value)) for token_id, value in top)
        )
    except (ValueError, TypeError) as error:
        raise DataLoss(f"stored log-probabilities cannot be read: {error}") from error


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return -math.inf if value is None else float(value)
