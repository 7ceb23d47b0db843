"""Turns decided tokens into text, and finds the end of a completion."""

from collections.abc import Sequence
from typing import Protocol

from coordinator.requests.validation import GenerationParameters
from outrider.foundation.values import value
from outrider.sessions.store import FinishReason


class TextStream(Protocol):
    """Turns the tokens of one completion into text, token by token."""

    def push(self, token_id: int) -> str:
        """Adds a token. Returns new text that later tokens cannot change, in whole characters."""
        ...

    def finish(self) -> str: ...


@value(frozen=True, slots=True)
class Piece:
    num_tokens: int
    """Number of tokens that this call of `push` added to the completion."""
    text: str
    finish_reason: FinishReason | None


class Completion:
    """The answer of one session. EOS, a stop token, a stop string or `max_tokens` ends the answer.

    Text that may be the start of a stop string is held back. EOS, stop tokens and the tokens of
    stop strings count as tokens of the answer, but their text is not shown. Within the first
    `min_tokens` tokens, only `max_tokens` can end the answer, and stop strings are shown."""

    def __init__(
        self,
        parameters: GenerationParameters,
        eos_token_ids: Sequence[int],
        stream: TextStream | None,
    ) -> None:
        self._max_tokens = parameters.max_tokens
        self._min_tokens = parameters.sampling.min_tokens
        self._stop = parameters.stop
        self._eos = frozenset(() if parameters.ignore_eos else eos_token_ids)
        self._ends = self._eos.union(parameters.sampling.stop_token_ids)
        self._stream = stream
        self._held = ""
        self.num_tokens = 0
        self.stop_string: str | None = None
        self.stop_token_id: int | None = None
        """Id of the stop token that ended the answer. EOS is not a stop token."""

    @property
    def remaining(self) -> int:
        return self._max_tokens - self.num_tokens

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Adds the tokens of a round, up to the token that ends the completion. If `max_tokens` is
        0, a call without tokens ends the completion."""
        pieces: list[str] = []
        reason = None if self._max_tokens else FinishReason.LENGTH
        before = self.num_tokens
        for token_id in token_ids:
            self.num_tokens += 1
            if token_id in self._ends and self.num_tokens > self._min_tokens:
                self.stop_token_id = None if token_id in self._eos else token_id
                pieces.append(self.finish())
                reason = FinishReason.STOP
                break
            text, stopped = self._add(self._stream.push(token_id) if self._stream else "")
            pieces.append(text)
            if not (stopped or self.remaining):
                text, stopped = self._end()
                pieces.append(text)
                reason = FinishReason.LENGTH
            if stopped:
                reason = FinishReason.STOP
            if reason is not None:
                break
        return Piece(self.num_tokens - before, "".join(pieces), reason)

    def finish(self) -> str:
        """Ends the completion. Returns the text that was held back."""
        return self._end()[0]

    def _end(self) -> tuple[str, bool]:
        tail, stopped = self._add(self._stream.finish() if self._stream else "")
        held, self._held = self._held, ""
        return tail + held, stopped

    def _add(self, text: str) -> tuple[str, bool]:
        """Adds text. Returns the text that may be shown, and whether a stop string is complete."""
        if not text:
            return "", False
        num_before, text = len(self._held), self._held + text
        matches = [
            (start, stop)
            for stop in self._stop
            if (start := text.find(stop, max(0, num_before + 1 - len(stop)))) >= 0
        ]
        if matches and self.num_tokens > self._min_tokens:
            self._held = ""
            first, self.stop_string = min(matches)
            return text[:first], True
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest proper prefix of `stop` that is a suffix of `text`."""
    start = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
