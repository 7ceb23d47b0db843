"""Log-probabilities with the text of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.requests.tokenization import Text
from outrider.errors import check
from outrider.request import Tokens

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
        """From a token's bytes."""
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


class Verifier:
    """Spells the log-probabilities of one choice."""

    def __init__(self, text: Text | None) -> None:
        """Without a tokenizer a token is written as its id."""
        self._text = text
        self._stream = None if text is None else text.stream()
        self._offset = 0

    def score(self, event: Tokens) -> list[ScoredToken]:
        """The tokens of an event, which must come in order."""
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
    """The number that JSON is given."""
    return max(logprob, IMPOSSIBLE)
