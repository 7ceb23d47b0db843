"""Prompt lookup: drafts by continuing an earlier occurrence of the last tokens.

Saxena, "Prompt Lookup Decoding" (2023), with an index instead of a search, the longest match in
place of a fixed length, and copies that may run into what they have just written.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import NO_GUESS, Guess, LookupDrafter, SessionTexts, share_of
from outrider.drafters.text_index import TextIndex
from outrider.errors import SettingError
from outrider.limits import SEQUENCES_PER_REPLICA_MAX


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """How an earlier occurrence is looked for, and how far it is trusted.

    Defaults: best over texts of a 135M chat model, rewriting (5.0 times as fast by a cost model of
    26 ms + 0.62 ms a token) and chatting (1.7 at temperature 0, 1.2 at 0.7, 1.06 at 1), at K = 8
    and 16. A fixed limit of 16 tokens is no faster where it helps, and slower where it does not.
    """

    ngram_min: int = 1
    """Tokens that an occurrence must share with the end of the text, at least."""
    ngram_max: int = 16
    """Tokens beyond which a longer match is no better; then the most recent one wins."""
    occurrences_max: int = 256
    """Occurrences of the last `ngram_min` tokens that are looked at, most recent first."""
    tokens_per_match: int = 3
    """Draft tokens for each token of the match, at most: a short match is soon wrong."""

    def __post_init__(self) -> None:
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise SettingError(
                "ngram_min", f"{self.ngram_min} given; 1..ngram_max ({self.ngram_max}) is allowed"
            )
        for name in ("occurrences_max", "tokens_per_match"):
            if getattr(self, name) < 1:
                raise SettingError(name, f"{getattr(self, name)} given; at least 1 is needed")


class NgramIndex(TextIndex):
    """The text of a session, continued as its end was continued before.

    A look-up costs O(occurrences_max * ngram_max) at worst, whatever the length of the text.
    """

    def __init__(self, config: NgramConfig) -> None:
        super().__init__(config.ngram_min)
        self._config = config

    def continuation(self, num_tokens: int) -> Guess:
        """Up to `num_tokens` tokens that followed the best earlier occurrence of the text's end,
        none where there is no such. Reaching the end of the text, it goes on with its own tokens,
        so that a repetition is continued."""
        start, match_length = self._best_match()
        num_tokens = min(num_tokens, self._config.tokens_per_match * match_length)
        if num_tokens == 0:
            return NO_GUESS
        copied = self._ids[start : start + num_tokens]
        share = share_of(1, 1, match_length)
        return Guess(
            tuple(copied[i % len(copied)] for i in range(num_tokens)),
            sum(share**depth for depth in range(1, num_tokens + 1)),
        )

    def _best_match(self) -> tuple[int, int]:
        """The end and the length of the longest match, the most recent of equals; 0, 0 = none."""
        best_end, best_length = 0, 0
        for end in islice(self.earlier(), self._config.occurrences_max):
            length = self.match_length(end, self._ids, self._config.ngram_max)
            if length > best_length:
                best_end, best_length = end, length
                if length >= self._config.ngram_max:
                    break
        return best_end, best_length


class NgramDrafter(LookupDrafter):
    """Prompt lookup in each session's own text. Keeps at most `sequences_max` indices."""

    def __init__(
        self,
        config: NgramConfig | None = None,
        sequences_max: int = SEQUENCES_PER_REPLICA_MAX,
    ) -> None:
        chosen = config or NgramConfig()
        self._indices: SessionTexts[NgramIndex] = SessionTexts(
            lambda request: NgramIndex(chosen), sequences_max
        )

    def guess(self, request: DraftRequest) -> Guess:
        """See `LookupDrafter.guess`."""
        if request.num_draft_tokens == 0:
            return NO_GUESS
        return self._indices.of(request).continuation(request.num_draft_tokens)

    def release(self, session_id: str) -> None:
        """Forgets the session's index."""
        self._indices.release(session_id)
