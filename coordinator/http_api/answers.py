"""From events to an answer, whole or in chunks; the same for chat and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from coordinator.requests.tokenization import Text
from outrider.errors import check
from outrider.request import Event, Finished, RoundReport, Started, Tokens
from outrider.sessions.store import FinishReason

from .logprobs import ScoredToken, Verifier
from .speculation import SpeculationReport
from .translation import Asked

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

    def delta(self, text: str) -> Json:
        """More of a choice; its text may lag behind its tokens."""
        ...

    def closing(self) -> Json:
        """What the last chunk of a choice has."""
        ...

    def message(self, text: str) -> Json:
        """All text of a choice."""
        ...

    def logprobs(self, tokens: Sequence[ScoredToken]) -> Json:
        """The log-probabilities of some tokens of a choice."""
        ...


class _Ledger:
    """What an answer says of all its choices together."""

    def __init__(self, asked: Asked, shape: Shape, num_draft_tokens: int, created: int) -> None:
        self._asked = asked
        self._report = SpeculationReport(num_draft_tokens)
        self._created = created
        self._prefix = shape.id_prefix
        self._id = self._model = ""
        self._num_prompt_tokens = self._num_tokens = self._num_finished = 0

    def note(self, index: int, event: Event) -> None:
        """The next event of a choice."""
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
        """Whether every choice has ended."""
        return self._num_finished == len(self._asked.requests)

    @property
    def usage(self) -> Json:
        """Tokens so far."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }

    @property
    def metrics(self) -> Json:
        """What speculation did, of the choices that have ended."""
        return {"speculative_decoding": self._report.told(histograms=self._asked.histograms)}

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        """What holds choices; `kind` is what it calls itself."""
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
        self._ledger = _Ledger(asked, shape, num_draft_tokens, created)
        places = range(len(asked.requests))
        self._texts: list[list[str]] = [[] for _ in places]
        self._token_ids: list[list[int]] = [[] for _ in places]
        self._scored: list[list[ScoredToken]] = [[] for _ in places]
        self._scorers = [Verifier(text) for _ in places]
        self._ends: dict[int, FinishReason] = {}

    def add(self, index: int, event: Event) -> None:
        """The next event of a choice."""
        self._ledger.note(index, event)
        if isinstance(event, Tokens):
            self._texts[index].append(event.text_delta)
            self._token_ids[index] += event.token_ids
            if self._asked.logprobs:
                self._scored[index] += self._scorers[index].score(event)
        elif isinstance(event, Finished):
            self._ends[index] = event.finish_reason

    def whole(self) -> Json:
        """The answer, once every choice has ended."""
        check(self._ledger.is_whole, "a choice has not ended")
        choices = [self._choice(index) for index in range(len(self._asked.requests))]
        ledger = self._ledger
        return ledger.envelope(self._shape.whole, choices) | {
            "usage": ledger.usage,
            "metrics": ledger.metrics,
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
        """As of `Answer`."""
        self._asked = asked
        self._shape = shape
        self._ledger = _Ledger(asked, shape, num_draft_tokens, created)
        self._scorers = [Verifier(text) for _ in asked.requests]
        self._opened: set[int] = set()

    def take(self, index: int, event: Event) -> list[Json]:
        """What is told once an event of a choice has come; often nothing."""
        self._ledger.note(index, event)
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
            choice["logprobs"] = self._shape.logprobs(self._scorers[index].score(event))
        if self._asked.token_ids:
            choice["token_ids"] = list(event.token_ids)
        return [self._chunk(choice)]

    def _finished(self, index: int, event: Finished) -> list[Json]:
        ledger = self._ledger
        last = self._chunk(
            {
                "index": index,
                **self._shape.closing(),
                "logprobs": None,
                **_end(event.finish_reason),
            }
        )
        if not ledger.is_whole:
            return [last]
        if not self._asked.usage_at_end:
            return [last | {"metrics": ledger.metrics}]
        totals = {"usage": ledger.usage, "metrics": ledger.metrics}
        return [last, ledger.envelope(self._shape.chunk, []) | totals]

    def _chunk(self, choice: Json) -> Json:
        chunk = self._ledger.envelope(self._shape.chunk, [choice])
        if self._asked.usage_always:
            chunk["usage"] = self._ledger.usage
        elif self._asked.usage_at_end:
            chunk["usage"] = None
        return chunk


def _end(reason: FinishReason | None) -> Json:
    """How a choice says that it has ended, or not yet."""
    if reason in _CUT_OFF:
        return {"finish_reason": "length", "stop_reason": str(reason)}
    return {"finish_reason": None if reason is None else str(reason), "stop_reason": None}
