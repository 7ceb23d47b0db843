"""What is kept of each request of `bench serve`, and the collector that a stream fills."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .prompts import BenchPrompt


class RequestFailed(Exception):
    """A request was refused, or its stream broke. One line, that says why."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Where the rounds of one request, or of many, spent their time; sums, ms."""

    num_rounds: int = 0
    num_hits: int = 0
    """Rounds whose proposal was there when they began (look-ahead)."""
    draft_ms: float = 0.0
    wire_ms: float = 0.0
    queue_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a server says that speculative decoding did for a request."""

    num_rounds: int
    """Steps of the target."""
    num_draft_tokens: int
    """Proposed in all."""
    num_accepted: int
    """Of these."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says at the end of a stream; None = it does not."""

    input_tokens: int | None
    output_tokens: int | None
    speculation: Speculation | None = None
    rounds: RoundTimes | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are seconds since the load began."""

    index: int
    """In the order of arrival."""
    category: str
    due_s: float
    """When it came."""
    started_s: float
    """When it was sent: later where `--max-concurrency` held it back, or this client was late."""
    chunk_s: Sequence[float]
    """When each chunk with tokens was read, ascending."""
    chunk_tokens: Sequence[int] | None
    """Tokens of each chunk; None where the server does not say, as by HTTP."""
    ended_s: float
    """When the last chunk was read; of a failed request, when that was known."""
    input_tokens: int | None
    output_tokens: int | None
    """None where the server does not say."""
    speculation: Speculation | None = None
    rounds: RoundTimes | None = None
    error: str = ""
    """Why it failed; empty if it did not."""

    @property
    def num_tokens(self) -> int:
        """Of the answer: as the server says, or else the number of its chunks."""
        return len(self.chunk_s) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token; of an answer without any, to its end."""
        return (self.chunk_s[0] if self.chunk_s else self.ended_s) - self.started_s

    @property
    def latency_s(self) -> float:
        """From sending to the last chunk."""
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks that follow each other."""
        times = self.chunk_s
        return [times[place] - times[place - 1] for place in range(1, len(times))]


class Heard:
    """What has come of one stream. Whoever reads the stream calls it at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.chunk_s = array("d")
        self.chunk_tokens: array[int] | None = array("l")
        self.ended_s: float | None = None

    def chunk(self, num_tokens: int | None) -> None:
        """A chunk with tokens; None = nobody says how many."""
        self.ended_s = self._clock()
        self.chunk_s.append(self.ended_s)
        if num_tokens is None:
            self.chunk_tokens = None
        elif self.chunk_tokens is not None:
            self.chunk_tokens.append(num_tokens)

    def end(self) -> None:
        """The server says that the answer is whole."""
        self.ended_s = self._clock()


class ServingClient(Protocol):
    """A server under load. One for all requests, on one event loop."""

    async def answer(self, prompt: BenchPrompt, max_tokens: int, heard: Heard) -> Answer:
        """One request, streamed into `heard`. Raises `RequestFailed`."""
        ...
