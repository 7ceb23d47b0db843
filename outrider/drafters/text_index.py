"""A text in which earlier occurrences of its end, or of another text's end, are found at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.tokens import EMPTY_DIGEST, TokenSequence, extend_digest

_NO_PLACE = 0


class TextIndex:
    """A text that grows at its end and may be cut at its beginning, and for each place in it the
    previous one that ends with the same n-gram.

    A place is the number of tokens before it, those that were cut off included. Appending and
    cutting cost O(1) a token; memory is some 200 bytes a token.
    """

    def __init__(self, gram_length: int) -> None:
        self._gram_length = gram_length
        self._ids: list[int] = []
        self._num_cut = 0
        self._digest = EMPTY_DIGEST
        self._last: dict[tuple[int, ...], int] = {}
        """n-gram -> the place after its last occurrence."""
        self._previous: list[int] = []
        """By place - 1, less what was cut off: that after the occurrence before."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def end(self) -> int:
        """The place after the last token."""
        return self._num_cut + len(self._ids)

    def begins(self, token_ids: Sequence[int], digests: TokenSequence | None = None) -> bool:
        """Whether `token_ids` starts with the whole text, of which nothing was cut off. Costs O(1)
        where that much of `token_ids` is in `digests`."""
        if digests is not None and len(self._ids) <= len(digests):
            return digests.holds(len(self._ids), self._digest)
        return list(token_ids[: len(self._ids)]) == self._ids

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        n = self._gram_length
        ids, last, previous = self._ids, self._last, self._previous
        for token_id in token_ids:
            ids.append(token_id)
            self._digest = extend_digest(self._digest, token_id)
            place = _NO_PLACE
            if len(ids) >= n:
                gram = tuple(ids[-n:])
                place = last.get(gram, _NO_PLACE)
                last[gram] = self._num_cut + len(ids)
            previous.append(place)

    def cut(self, num_tokens: int) -> None:
        """Cuts the first tokens off."""
        n = self._gram_length
        first = self._num_cut + num_tokens + n
        for start in range(min(num_tokens, len(self._ids) - n + 1)):
            gram = tuple(self._ids[start : start + n])
            if self._last.get(gram, first) < first:
                del self._last[gram]
        del self._ids[:num_tokens], self._previous[:num_tokens]
        self._num_cut += num_tokens

    def slice(self, start: int, stop: int) -> list[int]:
        """The tokens between two places, as far as they are there."""
        return self._ids[max(0, start - self._num_cut) : max(0, stop - self._num_cut)]

    def token(self, place: int) -> int | None:
        """The token after a place; None at the end."""
        index = place - self._num_cut
        return self._ids[index] if index < len(self._ids) else None

    def earlier(self) -> Iterator[int]:
        """The places before the end that end with the text's last n-gram, the latest first."""
        return self._chain(self._previous[-1] if self._previous else _NO_PLACE)

    def occurrences(self, tail: Sequence[int]) -> Iterator[int]:
        """The places that end with the last n-gram of `tail`, the latest first."""
        return self._chain(self._last.get(tuple(tail[-self._gram_length :]), _NO_PLACE))

    def match_length(self, place: int, tail: Sequence[int], length_max: int) -> int:
        """Tokens before `place`, one of those that end like `tail`, that equal the last ones of
        `tail`; at most `length_max`."""
        ids, end = self._ids, place - self._num_cut
        limit = min(length_max, end, len(tail))
        length = min(self._gram_length, limit)  # these are equal by the index
        while length < limit and ids[end - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    def _chain(self, place: int) -> Iterator[int]:
        while place >= self._num_cut + self._gram_length:
            yield place
            place = self._previous[place - self._num_cut - 1]
