"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers, SC 2011), a counter-based
generator: a number is a pure function of a key and a counter, so a retry gives the same numbers.

    key      = (seed low, seed high)
    counter  = (0, a, b, stream)                 one for each place and stream
    uniform  = (word + 0.5) * 2^-32              in (0, 1): neither end is ever reached
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.errors import check

_MULTIPLIER_0: Final = 0xD2511F53
_MULTIPLIER_2: Final = 0xCD9E8D57
_KEY_STEP_LOW: Final = 0x9E3779B9
_KEY_STEP_HIGH: Final = 0xBB67AE85
_ROUNDS: Final = 10
_WORD_MASK: Final = 0xFFFFFFFF
_WORD_SCALE: Final = 2.0**-32
_FEW: Final = 16
"""Counters that are quicker one by one, as integers: a hundred operations on the smallest arrays
take longer."""

WordArray: TypeAlias = npt.NDArray[Any]
"""uint64 arrays of 32-bit words: the product of two keeps its high half."""
_Words = TypeVar("_Words", int, WordArray)


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Key and counter of R rows of noise: five arrays of words, [R] each."""

    seed_low: WordArray
    seed_high: WordArray
    a: WordArray
    b: WordArray
    stream: WordArray

    def __len__(self) -> int:
        return len(self.a)

    def of(self, rows: Sequence[int] | npt.NDArray[np.int64] | slice) -> RowKeys:
        """Those of the listed rows."""
        return RowKeys(
            seed_low=self.seed_low[rows],
            seed_high=self.seed_high[rows],
            a=self.a[rows],
            b=self.b[rows],
            stream=self.stream[rows],
        )

    @classmethod
    def joined(cls, parts: Sequence[RowKeys]) -> RowKeys:
        """The rows of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        names = ("seed_low", "seed_high", "a", "b", "stream")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def words(self) -> tuple[WordArray, ...]:
        """The four words of counter (0, a, b, stream) of each row: [R] each."""
        rows = (self.a, self.b, self.stream, self.seed_low, self.seed_high)
        if len(self) > _FEW:
            return rounds(np.zeros_like(self.a), *rows)
        drawn = [rounds(0, *row) for row in zip(*(word.tolist() for word in rows), strict=True)]
        return tuple(np.array(drawn, dtype=np.uint64).reshape(-1, 4).T)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """The four words of one counter under one key; all of them in 0..2^32-1."""
    check(all(0 <= word <= _WORD_MASK for word in (*counter, *key)), "a word is 32 bits")
    return rounds(*counter, *key)


def uniform(word: float) -> float:
    """The number in (0, 1) that a word stands for."""
    return (word + 0.5) * _WORD_SCALE


def rounds(
    c0: _Words, c1: _Words, c2: _Words, c3: _Words, key_low: _Words, key_high: _Words
) -> tuple[_Words, _Words, _Words, _Words]:
    """Ten rounds, on numbers or on arrays that broadcast against each other.

    The low half of a product is left unmasked: it is only ever xored into a word that is masked
    afterwards."""
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_2 = c2 * _MULTIPLIER_2
        c0 = ((product_2 >> 32) ^ c1 ^ key_low) & _WORD_MASK
        c2 = ((product_0 >> 32) ^ c3 ^ key_high) & _WORD_MASK
        c1, c3 = product_2, product_0
        key_low = (key_low + _KEY_STEP_LOW) & _WORD_MASK
        key_high = (key_high + _KEY_STEP_HIGH) & _WORD_MASK
    return c0, c1 & _WORD_MASK, c2, c3 & _WORD_MASK
