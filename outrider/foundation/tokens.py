"""A sequence of token ids with a 64-bit digest of each prefix."""

from collections.abc import Iterable, Sequence
from typing import overload

from outrider.errors import check

_MASK = 2**64 - 1
EMPTY_DIGEST = 0


def extend_digest(digest: int, token_id: int) -> int:
    """Returns the digest of a prefix and one more token: SplitMix64's finaliser (Steele et al.
    2014) of digest + c * (token_id + 1), with an odd constant c. Different digests show that two
    processes hold different tokens. Digests do not protect against forged tokens."""
    z = (digest + (token_id + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def digest_after(digest: int, token_ids: Iterable[int]) -> int:
    """Returns the digest of a prefix with this `digest` and the tokens `token_ids` after it."""
    for token_id in token_ids:
        digest = extend_digest(digest, token_id)
    return digest


class TokenSequence:
    """Token ids with the digest of every prefix."""

    __slots__ = ("_digests", "_ids")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._digests: list[int] = [EMPTY_DIGEST]
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        """The list itself, not a copy. Callers must not change it."""
        return self._ids

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends token ids."""
        digest = self._digests[-1]
        for token_id in token_ids:
            digest = extend_digest(digest, token_id)
            self._ids.append(token_id)
            self._digests.append(digest)

    def copy(self) -> "TokenSequence":
        """Returns an independent copy."""
        copy = TokenSequence()
        copy._ids, copy._digests = self._ids.copy(), self._digests.copy()
        return copy

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        check(0 <= length <= len(self), f"cannot keep {length} of {len(self)} tokens")
        del self._ids[length:]
        del self._digests[length + 1 :]

    def digest(self, length: int | None = None) -> int:
        """Returns the digest of the first `length` tokens, by default of all tokens."""
        return self._digests[len(self) if length is None else length]

    def since(self, start: int, stop: int | None = None) -> tuple[int, ...]:
        """Returns the ids from `start` to before `stop`, by default to the end."""
        return tuple(self._ids[start:stop])

    def holds(self, length: int, digest: int) -> bool:
        """Whether there are at least `length` tokens, and the first `length` have this digest."""
        return 0 <= length <= len(self) and self._digests[length] == digest


class ContinuedTokens(Sequence[int]):
    """The first tokens of a sequence, and more tokens after them. Not a copy, so it is valid only
    until the sequence changes."""

    def __init__(self, sequence: Sequence[int], length: int, more: Sequence[int]) -> None:
        """Takes `length` tokens of `sequence`, which must have as many."""
        self._sequence, self._length, self._more = sequence, length, more

    def __len__(self) -> int:
        return self._length + len(self._more)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            check(step == 1, "the tokens can only be read one after the other")
            own, length = self._sequence, self._length
            after = self._more[max(0, start - length) : max(0, stop - length)]
            return [*own[min(start, length) : min(stop, length)], *after]
        place = range(len(self))[index]
        return self[place : place + 1][0]
