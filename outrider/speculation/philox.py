"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers, SC 2011), a counter-based
generator: a number is a pure function of a key and a counter, so a retry gives the same numbers.

    key      = (seed low, seed high)
    counter  = (token id // 4, a, b, stream)     token v takes word v % 4
    uniform  = (word + 0.5) * 2^-32              in (0, 1): neither end is ever reached
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.errors import check

if TYPE_CHECKING:
    import torch

_MULTIPLIER_0: Final = 0xD2511F53
_MULTIPLIER_2: Final = 0xCD9E8D57
_KEY_STEP_LOW: Final = 0x9E3779B9
_KEY_STEP_HIGH: Final = 0xBB67AE85
_ROUNDS: Final = 10
_WORD_MASK: Final = 0xFFFFFFFF
WORD_SCALE: Final = 2.0**-32
COUNTER_TOKENS: Final = 4
"""Tokens that take their number from one counter."""
FEW: Final = 16
"""Counters that are quicker one by one, as integers: a hundred operations on the smallest arrays
take longer."""

WordArray: TypeAlias = npt.NDArray[Any]
"""uint64 arrays of 32-bit words: the product of two keeps its high half."""
_Words = TypeVar("_Words", int, WordArray, "torch.Tensor")


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

    def counters(self) -> Iterator[tuple[int, ...]]:
        """(a, b, stream, seed_low, seed_high) of each row, as `rounds` takes them."""
        words = (self.a, self.b, self.stream, self.seed_low, self.seed_high)
        return zip(*(word.tolist() for word in words), strict=True)

    def columns(self) -> tuple[WordArray, ...]:
        """(seed_low, seed_high, a, b, stream), each as a column [R, 1]."""
        words = (self.seed_low, self.seed_high, self.a, self.b, self.stream)
        return tuple(word[:, None] for word in words)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """The four words of one counter under one key; all of them in 0..2^32-1."""
    check(all(0 <= word <= _WORD_MASK for word in (*counter, *key)), "a word is 32 bits")
    return rounds(*counter, *key)


def uniform(word: int) -> float:
    """The number in (0, 1) that a word stands for."""
    return (word + 0.5) * WORD_SCALE


def flat_uniforms(
    keys: RowKeys, sizes: Sequence[int], token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Numbers of the tokens listed in each of R rows, row after row: `sizes` [R] says how many each
    lists, `token_ids` [N] (>= 0) which. [N], equal to picking them out of `row_uniforms`, on the
    CPU. A token costs as much as `COUNTER_TOKENS` of a full row.

    Words that all rows share stay one number: with a session's seed for all, nothing but the words
    of the counter is of full length after two rounds."""
    if len(token_ids) <= FEW:
        spread_rows = chain.from_iterable(map(repeat, keys.counters(), sizes))
        listed = zip(token_ids.tolist(), spread_rows, strict=True)
        return np.array([uniform(rounds(token >> 2, *row)[token & 3]) for token, row in listed])

    def spread(words: WordArray) -> WordArray:
        return words[:1] if (words == words[0]).all() else words.repeat(sizes)

    words = (keys.seed_low, keys.seed_high, keys.a, keys.b, keys.stream)
    columns: tuple[WordArray, ...] = tuple(spread(word) for word in words)
    ids = token_ids.astype(np.uint64)
    four = rounds_of_rows(ids >> 2, columns)
    chosen = np.choose((ids & 3).astype(np.intp), four)
    numbers: npt.NDArray[np.float64] = np.add(chosen, 0.5, dtype=np.float64)
    numbers *= WORD_SCALE
    return numbers


def rounds_of_rows(counters: _Words, columns: tuple[_Words, ...]) -> tuple[_Words, ...]:
    """The four words of counters (c, a, b, stream); `columns` as of `RowKeys.columns`."""
    seed_low, seed_high, a, b, stream = columns
    return rounds(counters, a, b, stream, seed_low, seed_high)


def rounds(
    c0: _Words, c1: _Words, c2: _Words, c3: _Words, key_low: _Words, key_high: _Words
) -> tuple[_Words, _Words, _Words, _Words]:
    """Ten rounds, on numbers or on arrays that broadcast against each other.

    The low half of a product is left unmasked: it is only ever xored into a word that is masked
    afterwards. That mask also clears the sign bits that a shift of int64 brings in. From the third
    round on every word has the full shape, so that arrays can be changed in place."""
    for number in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_2 = c2 * _MULTIPLIER_2
        high_0 = product_0 >> 32
        high_2 = product_2 >> 32
        if number < 2:
            c0 = (high_2 ^ c1 ^ key_low) & _WORD_MASK
            c2 = (high_0 ^ c3 ^ key_high) & _WORD_MASK
        else:
            high_2 ^= c1
            high_2 ^= key_low
            high_2 &= _WORD_MASK
            high_0 ^= c3
            high_0 ^= key_high
            high_0 &= _WORD_MASK
            c0, c2 = high_2, high_0
        c1, c3 = product_2, product_0
        key_low = (key_low + _KEY_STEP_LOW) & _WORD_MASK
        key_high = (key_high + _KEY_STEP_HIGH) & _WORD_MASK
    return c0, c1 & _WORD_MASK, c2, c3 & _WORD_MASK
