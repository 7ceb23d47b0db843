"""From events to an answer: whole, in chunks of chat or completions, or with every round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from coordinator.http_api.translation import Asked
from coordinator.requests.validation import Text
from outrider.errors import check
from outrider.request import Event, Finished, Metrics, RoundReport, Started, Tokens
from outrider.sessions.store import FinishReason

IMPOSSIBLE: Final = -9999.0
"""OpenAI's log-probability of a token that cannot come: JSON knows no infinity."""


@dataclass(frozen=True, slots=True)
class Spelled:
    """A token as it is written."""

    data: bytes
    """Its bytes in a text."""
    text: str
    """The same as text; where they are no whole characters `bytes:` and each as `\\xNN`."""

    @classmethod
    def of(cls, data: bytes) -> Spelled:
        try:
            return cls(data, data.decode())
        except UnicodeDecodeError:
            return cls(data, "bytes:" + "".join(f"\\x{byte:02x}" for byte in data))


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, its log-probability, and the likeliest tokens in its place."""

    spelled: Spelled
    logprob: float
    top: tuple[tuple[Spelled, float], ...]
    offset: int
    """Of its first whole character in the answer's text."""


class LogprobSpeller:
    """Spells the log-probabilities of one choice."""

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self._stream = None if text is None else text.stream()
        self._offset = 0

    def score(self, event: Tokens) -> list[ScoredToken]:
        check(len(event.logprobs) == len(event.token_ids), "tokens without log-probabilities")
        scored = []
        for token_id, entry in zip(event.token_ids, event.logprobs, strict=True):
            top = tuple((self._spell(other), logprob) for other, logprob in entry.top)
            scored.append(ScoredToken(self._spell(token_id), entry.logprob, top, self._offset))
            if self._stream is not None:
                self._offset += len(self._stream.push(token_id))
        return scored

    def _spell(self, token_id: int) -> Spelled:
        if self._text is None:
            return Spelled.of(f"token_id:{token_id}".encode())
        return Spelled.of(self._text.spell(token_id))


def finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)


class SpeculationReport:
    """Adds up the sessions of one request.

    A step is a round; one without a proposal accepts nothing. So `mean_acceptance_length` is the
    tokens that a round brought, on average, before an answer's end cut it short."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._num_rounds = self._num_proposed = self._num_accepted = 0
        self._rounds: Counter[tuple[int, int]] = Counter()
        """By tokens proposed and accepted."""

    def add_round(self, report: RoundReport) -> None:
        self._rounds[len(report.proposed_token_ids), report.num_accepted] += 1

    def add_session(self, metrics: Metrics) -> None:
        self._num_rounds += metrics.num_rounds
        self._num_proposed += metrics.num_draft_tokens
        self._num_accepted += metrics.num_accepted_draft_tokens

    def told(self, *, histograms: bool) -> dict[str, Any]:
        """The report; of `histograms` the second is by the tokens that were proposed."""
        accepted, proposed = self._num_accepted, self._num_proposed
        told: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / max(1, self._num_rounds),
            "draft_acceptance_rate": accepted / proposed if proposed else 0.0,
            "num_spec_steps": self._num_rounds,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": proposed,
            "num_spec_tokens": self._num_draft_tokens,
        }
        if histograms:
            told["acceptance_histogram"] = self._histogram(self._num_draft_tokens, None)
            told["acceptance_histogram_by_draft_length"] = {
                str(length): self._histogram(length, length)
                for length in sorted({length for length, _ in self._rounds})
            }
        return told

    def _histogram(self, most: int, length: int | None) -> list[int]:
        """Rounds (that proposed so many tokens) by the tokens that they accepted: 0..`most`."""
        counts = [0] * (most + 1)
        for (proposed, accepted), count in self._rounds.items():
            if length in (None, proposed):
                counts[accepted] += count
        return counts


Json = dict[str, Any]
_CUT_OFF: Final = (FinishReason.DEADLINE, FinishReason.CANCELLED)
"""Told as `length`, which clients know, and by name in `stop_reason`."""


class Shape(Protocol):
    """What differs between the answers of chat and of completions."""

    id_prefix: str
    whole: str
    """What a whole answer calls itself ..."""
    chunk: str
    """... and each chunk of one."""

    def opening(self) -> Json | None:
        """What the first chunk of a choice has; None where there is no such chunk."""
        ...

    def delta(self, text: str) -> Json: ...

    def closing(self) -> Json: ...

    def message(self, text: str) -> Json: ...

    def logprobs(self, tokens: Sequence[ScoredToken]) -> Json: ...


class _Totals:
    """What an answer says of all its choices together."""

    def __init__(self, asked: Asked, shape: Shape, num_draft_tokens: int, created: int) -> None:
        self._asked = asked
        self._report = SpeculationReport(num_draft_tokens)
        self._created = created
        self._prefix = shape.id_prefix
        self._id = self._model = ""
        self._num_prompt_tokens = self._num_tokens = self._num_finished = 0

    def note(self, index: int, event: Event) -> None:
        if isinstance(event, Started):
            self._id = self._id or self._prefix + event.session_id
            self._model = event.model
            if index % self._asked.n == 0:  # The choices of a prompt share it.
                self._num_prompt_tokens += event.num_prompt_tokens
        elif isinstance(event, Tokens):
            self._num_tokens += len(event.token_ids)
        elif isinstance(event, RoundReport):
            self._report.add_round(event)
        else:
            self._num_finished += 1
            self._report.add_session(event.metrics)

    @property
    def is_whole(self) -> bool:
        return self._num_finished == len(self._asked.requests)

    @property
    def usage(self) -> Json:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }

    @property
    def metrics(self) -> Json:
        return {"speculative_decoding": self._report.told(histograms=self._asked.histograms)}

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class Answer:
    """An answer that is told at once."""

    def __init__(
        self, asked: Asked, shape: Shape, text: Text | None, num_draft_tokens: int, created: int
    ) -> None:
        """`num_draft_tokens` is the most of a round, `created` a time in seconds since 1970."""
        self._asked = asked
        self._shape = shape
        self._totals = _Totals(asked, shape, num_draft_tokens, created)
        places = range(len(asked.requests))
        self._texts: list[list[str]] = [[] for _ in places]
        self._token_ids: list[list[int]] = [[] for _ in places]
        self._scored: list[list[ScoredToken]] = [[] for _ in places]
        self._spellers = [LogprobSpeller(text) for _ in places]
        self._ends: dict[int, FinishReason] = {}

    def add(self, index: int, event: Event) -> None:
        self._totals.note(index, event)
        if isinstance(event, Tokens):
            self._texts[index].append(event.text_delta)
            self._token_ids[index] += event.token_ids
            if self._asked.logprobs:
                self._scored[index] += self._spellers[index].score(event)
        elif isinstance(event, Finished):
            self._ends[index] = event.finish_reason

    def whole(self) -> Json:
        check(self._totals.is_whole, "a choice has not ended")
        choices = [self._choice(index) for index in range(len(self._asked.requests))]
        totals = self._totals
        return totals.envelope(self._shape.whole, choices) | {
            "usage": totals.usage,
            "metrics": totals.metrics,
        }

    def _choice(self, index: int) -> Json:
        scored = self._shape.logprobs(self._scored[index]) if self._asked.logprobs else None
        choice = {
            "index": index,
            **self._shape.message("".join(self._texts[index])),
            "logprobs": scored,
            **_end(self._ends[index]),
        }
        if self._asked.token_ids:
            choice["token_ids"] = self._token_ids[index]
        return choice


class Chunks:
    """An answer that is told as it comes."""

    def __init__(
        self, asked: Asked, shape: Shape, text: Text | None, num_draft_tokens: int, created: int
    ) -> None:
        self._asked = asked
        self._shape = shape
        self._totals = _Totals(asked, shape, num_draft_tokens, created)
        self._spellers = [LogprobSpeller(text) for _ in asked.requests]
        self._opened: set[int] = set()

    def take(self, index: int, event: Event) -> list[Json]:
        """What is told once an event of a choice has come; often nothing."""
        self._totals.note(index, event)
        if isinstance(event, Tokens):
            return self._opening(index) + self._tokens(index, event)
        if isinstance(event, Finished):
            return self._opening(index) + self._finished(index, event)
        return []

    def _opening(self, index: int) -> list[Json]:
        opening = self._shape.opening()
        if opening is None or index in self._opened:
            return []
        self._opened.add(index)
        return [self._chunk({"index": index, **opening, "logprobs": None, **_end(None)})]

    def _tokens(self, index: int, event: Tokens) -> list[Json]:
        choice = {
            "index": index, **self._shape.delta(event.text_delta), "logprobs": None, **_end(None)
        }  # fmt: skip
        if self._asked.logprobs:
            choice["logprobs"] = self._shape.logprobs(self._spellers[index].score(event))
        if self._asked.token_ids:
            choice["token_ids"] = list(event.token_ids)
        return [self._chunk(choice)]

    def _finished(self, index: int, event: Finished) -> list[Json]:
        totals = self._totals
        last = self._chunk(
            {"index": index, **self._shape.closing(), "logprobs": None, **_end(event.finish_reason)}
        )
        if not totals.is_whole:
            return [last]
        if not self._asked.usage_at_end:
            return [last | {"metrics": totals.metrics}]
        told = {"usage": totals.usage, "metrics": totals.metrics}
        return [last, totals.envelope(self._shape.chunk, []) | told]

    def _chunk(self, choice: Json) -> Json:
        chunk = self._totals.envelope(self._shape.chunk, [choice])
        if self._asked.usage_always:
            chunk["usage"] = self._totals.usage
        elif self._asked.usage_at_end:
            chunk["usage"] = None
        return chunk


def _end(reason: FinishReason | None) -> Json:
    if reason in _CUT_OFF:
        return {"finish_reason": "length", "stop_reason": str(reason)}
    return {"finish_reason": None if reason is None else str(reason), "stop_reason": None}


class ChatShape:
    """What the choices of a chat completion look like. Implements `Shape`."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def closing(self) -> dict[str, Any]:
        return {"delta": {}}

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        content = [
            _scored(token.spelled, token.logprob)
            | {"top_logprobs": [_scored(*one) for one in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _scored(spelled: Spelled, logprob: float) -> dict[str, Any]:
    return {"token": spelled.text, "bytes": list(spelled.data), "logprob": finite(logprob)}


class CompletionShape:
    """What the choices of a completion look like. Implements `Shape`."""

    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def opening(self) -> dict[str, Any] | None:
        return None

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def closing(self) -> dict[str, Any]:
        return {"text": ""}

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """See `Shape.logprobs`. The token that came is among the likeliest ones, too."""
        return {
            "tokens": [token.spelled.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {
                    spelled.text: finite(logprob)
                    for spelled, logprob in (*token.top, (token.spelled, token.logprob))
                }
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }


class NativeEvents:
    """The events of one session as `POST /api/generate` tells them."""

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self._stream = None if text is None else text.stream()
        self._num_tokens = 0

    def take(self, index: int, event: Event) -> list[Json]:
        if isinstance(event, Tokens):
            return [self._tokens(event)]
        if isinstance(event, RoundReport):
            return [self._round(event)]
        return [{"type": "started" if isinstance(event, Started) else "finished", **asdict(event)}]

    def _tokens(self, event: Tokens) -> Json:
        self._num_tokens = event.first_index + len(event.token_ids)
        texts = None
        if self._stream is not None:
            texts = [self._stream.push(token_id) for token_id in event.token_ids]
        told: Json = {
            "type": "tokens",
            "first_index": event.first_index,
            "token_ids": event.token_ids,
            "origins": event.origins,
            "texts": texts,
            "text_delta": event.text_delta,
        }
        if event.logprobs:
            told["logprobs"] = [
                {
                    "logprob": finite(one.logprob),
                    "top": [[token_id, finite(logprob)] for token_id, logprob in one.top],
                }
                for one in event.logprobs
            ]
        return told

    def _round(self, event: RoundReport) -> Json:
        texts = None
        if self._text is not None:
            texts = [Spelled.of(self._text.spell(one)).text for one in event.proposed_token_ids]
        return {
            "type": "round",
            "first_index": self._num_tokens,
            **asdict(event),
            "proposed_texts": texts,
        }
