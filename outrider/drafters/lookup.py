"""Prompt lookup, and the base of all look-up drafters: guesses with scores, and indexed texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import mul
from typing import Any

from outrider.drafters.drafter import DraftRequest
from outrider.foundation.bounded_dict import BoundedDict
from outrider.foundation.tokens import EMPTY_DIGEST, TokenSequence, extend_digest
from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.speculation.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that followed an earlier occurrence of the text's last tokens."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0  # expected number of accepted tokens

    def proposal(self, request: DraftRequest) -> Proposal:
        """The guess as a proposal in which the draft gives each token the probability 1."""
        return Proposal(self.token_ids, (None,) * len(self.token_ids) * request.rule.needs_q)


NO_GUESS = Guess()


def chance_of(num: int, num_all: int, match_length: int, num_drafted: int) -> float:
    """Estimates the chance that the token after `num_drafted` draft tokens is accepted, if these
    are accepted. The token followed `num` of `num_all` occurrences of the match and the draft
    tokens. A few short matches are weak evidence, but accepted draft tokens confirm the match. The
    estimate fits the demo's answers to the built-in prompts of the benchmarks."""
    return num / (num_all + 2 / (match_length + 2 * num_drafted))


class LookupDrafter:
    """A drafter without a model. Keeps the indexed texts of `SEQUENCES_PER_REPLICA_MAX` sessions,
    and builds the text of any other session again when the session needs a guess."""

    def __init__(self, begin: Callable[[DraftRequest], Any]) -> None:
        """`begin` makes an empty text for a request's session."""
        self._begin = begin
        self._texts: BoundedDict[str, Any] = BoundedDict(SEQUENCES_PER_REPLICA_MAX)

    def guess(self, request: DraftRequest) -> Guess:
        """Returns a guess. The session's grammar may forbid the guessed tokens."""
        if request.num_draft_tokens == 0:
            return NO_GUESS
        text = self._text(request)
        self._extend(text, request)
        return self._guess(request, text)

    def guess_soon(self, request: DraftRequest, index_max: int) -> Guess | None:
        """Returns a guess; None if more than `index_max` tokens of the text are not indexed."""
        text = self._text(request)
        if len(request.token_ids) - len(text) > index_max:
            return None
        self._extend(text, request)
        return self._guess(request, text) if request.num_draft_tokens else NO_GUESS

    def index(self, request: DraftRequest, index_max: int) -> None:
        """Indexes at most `index_max` new tokens of the session's text."""
        text = self._text(request)
        self._extend(text, request, len(text) + index_max)

    def _text(self, request: DraftRequest) -> Any:
        """Returns the indexed beginning of the session's text."""
        text = self._texts.pop(request.session_id, None)
        if text is None or not text.begins(request.token_ids, request.digests):
            text = self._begin(request)
        self._texts[request.session_id] = text
        return text

    def _extend(self, text: Any, request: DraftRequest, stop: int | None = None) -> None:
        start = len(text)
        text.extend(request.token_ids[start:stop])

    def length(self, session_id: str) -> int:
        """Returns the number of the session's tokens that are indexed."""
        text = self._texts.get(session_id)
        return 0 if text is None else len(text)

    def release(self, session_id: str) -> None:
        """Forgets the text of a session that has ended."""
        self.forget(session_id)

    def forget(self, session_id: str) -> None:
        """Forgets the session's text, and learns nothing from it."""
        self._texts.pop(session_id, None)

    def end(self, session_id: str, token_ids: Sequence[int]) -> Iterator[int]:
        """Ends a session that has these committed tokens. Returns an iterator that learns its
        output piece by piece, and yields the number of tokens of each piece."""
        self.forget(session_id)
        return iter(())

    def _guess(self, request: DraftRequest, text: Any) -> Guess:
        """`text` has exactly the request's committed tokens."""
        raise NotImplementedError


class TextIndex:
    """A text of tokens, with an index of the n-grams in it. The text grows at its end, and may be
    cut at its beginning. Appending or cutting a token takes O(1). A token takes about 200 bytes.

    A *place* is a position between two tokens. Its number counts all tokens before the place, also
    those that were cut off. The index links each place to the previous place that follows the same
    n-gram."""

    def __init__(self, gram_length: int) -> None:
        self._gram_length = gram_length
        self._ids: list[int] = []
        self._num_cut = 0
        self._digest = EMPTY_DIGEST
        self._last: dict[tuple[int, ...], int] = {}
        """The place after the last occurrence of each n-gram."""
        self._previous: list[int] = []  # the link of the place after each kept token; 0 = none

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def end(self) -> int:
        return self._num_cut + len(self._ids)

    def begins(self, token_ids: Sequence[int], digests: TokenSequence | None = None) -> bool:
        """Whether `token_ids` starts with this whole text. Do not call this after `cut`. `digests`
        has the first tokens of `token_ids`. If it has at least `len(self)`, this takes O(1)."""
        if digests is not None and len(self._ids) <= len(digests):
            return digests.holds(len(self._ids), self._digest)
        return list(token_ids[: len(self._ids)]) == self._ids

    def extend(self, token_ids: Sequence[int]) -> None:
        n = self._gram_length
        ids, last, previous = self._ids, self._last, self._previous
        for token_id in token_ids:
            ids.append(token_id)
            self._digest = extend_digest(self._digest, token_id)
            place = 0
            if len(ids) >= n:
                gram = tuple(ids[-n:])
                place = last.get(gram, 0)
                last[gram] = self._num_cut + len(ids)
            previous.append(place)

    def cut(self, num_tokens: int) -> None:
        n = self._gram_length
        first = self._num_cut + num_tokens + n
        for start in range(min(num_tokens, len(self._ids) - n + 1)):
            gram = tuple(self._ids[start : start + n])
            if self._last.get(gram, first) < first:
                del self._last[gram]
        del self._ids[:num_tokens], self._previous[:num_tokens]
        self._num_cut += num_tokens

    def slice(self, start: int, stop: int) -> list[int]:
        """The tokens between two places, without those that were cut off."""
        return self._ids[max(0, start - self._num_cut) : max(0, stop - self._num_cut)]

    def token(self, place: int) -> int:
        return self._ids[place - self._num_cut]

    def occurrences(self, tail: Sequence[int]) -> Iterator[int]:
        """The places after occurrences of the last n-gram of `tail`, latest first."""
        place = self._last.get(tuple(tail[-self._gram_length :]), 0)
        while place >= self._num_cut + self._gram_length:
            yield place
            place = self._previous[place - self._num_cut - 1]

    def match_length(self, place: int, tail: Sequence[int]) -> int:
        """How many tokens before `place` equal the last tokens of `tail`. The n-gram before `place`
        must be the last n-gram of `tail`."""
        ids, end = self._ids, place - self._num_cut
        limit = min(end, len(tail))
        length = min(self._gram_length, limit)
        while length < limit and ids[end - 1 - length] == tail[-1 - length]:
            length += 1
        return length


OCCURRENCES_MAX = 256
"""Only this many of the latest occurrences are searched for the longest match."""
TOKENS_PER_MATCH = 3
"""A guess is at most this many times as long as its match: short matches predict few tokens."""


class NgramDrafter(LookupDrafter):
    """Prompt lookup: proposes the tokens that followed an earlier occurrence of the session's last
    tokens in the same session. A look-up takes at most O(OCCURRENCES_MAX * ngram_max)."""

    def __init__(self, ngram_min: int = 1, ngram_max: int = 16) -> None:
        """Ignores matches under `ngram_min` tokens. Ranks matches over `ngram_max` as equal."""
        super().__init__(lambda request: TextIndex(ngram_min))
        self._ngram_max = ngram_max

    def _guess(self, request: DraftRequest, text: TextIndex) -> Guess:
        """The tokens that followed the longest match (of equally long matches, the latest). If
        fewer tokens follow than are wanted, the guess repeats them."""
        start = match_length = 0
        tail = text.slice(text.end - self._ngram_max, text.end)
        for place in islice(text.occurrences(tail), 1, OCCURRENCES_MAX + 1):
            length = text.match_length(place, tail)
            if length > match_length:
                start, match_length = place, length
                if length >= self._ngram_max:
                    break
        num_tokens = min(request.num_draft_tokens, TOKENS_PER_MATCH * match_length)
        chances = [chance_of(1, 1, match_length, num_drafted) for num_drafted in range(num_tokens)]
        likely = [chance for chance in accumulate(chances, mul) if chance >= request.min_chance]
        copied = text.slice(start, start + len(likely))
        return Guess(tuple(copied[i % len(copied)] for i in range(len(likely))), sum(likely))
