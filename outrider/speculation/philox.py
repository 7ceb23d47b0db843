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
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from outrider.errors import check

_MULTIPLIER_0: Final = 0xD2511F53
_MULTIPLIER_2: Final = 0xCD9E8D57
_KEY_STEP_LOW: Final = 0x9E3779B9
_KEY_STEP_HIGH: Final = 0xBB67AE85
_ROUNDS: Final = 10
_WORD_MASK: Final = 0xFFFFFFFF
_WORD_SCALE: Final = 2.0**-32
COUNTER_TOKENS: Final = 4
"""Tokens that take their number from one counter."""
_BLOCK: Final = 16_384
"""Counters worked on at a time on a CPU: the ten or so arrays of a block then stay in its cache."""
_FEW: Final = 16
"""Counters that are quicker one by one, as integers: a hundred operations on the smallest arrays
take longer."""

WordArray: TypeAlias = npt.NDArray[Any]
"""uint64 arrays of 32-bit words: the product of two keeps its high half."""
_Words = TypeVar("_Words", int, WordArray, torch.Tensor)


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
        """(a, b, stream, seed_low, seed_high) of each row, as `_rounds` takes them."""
        words = (self.a, self.b, self.stream, self.seed_low, self.seed_high)
        return zip(*(word.tolist() for word in words), strict=True)

    def columns(self) -> tuple[WordArray, ...]:
        """(seed_low, seed_high, a, b, stream), each as a column [R, 1]."""
        words = (self.seed_low, self.seed_high, self.a, self.b, self.stream)
        return tuple(word[:, None] for word in words)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """The four words of one counter under one key; all of them in 0..2^32-1."""
    check(all(0 <= word <= _WORD_MASK for word in (*counter, *key)), "a word is 32 bits")
    return _rounds(*counter, *key)


def uniform(word: int) -> float:
    """The number in (0, 1) that a word stands for."""
    return (word + 0.5) * _WORD_SCALE


def row_uniforms(keys: RowKeys, num_tokens: int, device: torch.device | str) -> torch.Tensor:
    """Numbers of the tokens 0..num_tokens-1 in every row: [R, num_tokens], float64."""
    if torch.device(device).type != "cpu":
        return all_uniforms_on_device(_to_torch(keys, device), num_tokens)
    num_counters = (num_tokens + 3) // 4
    if len(keys) * num_counters <= _FEW:
        words = [_rounds(n, *row) for row in keys.counters() for n in range(num_counters)]
        few = np.array(words, dtype=np.uint32).reshape(len(keys), num_counters * 4)
        return _as_uniforms(few[:, :num_tokens])
    drawn = np.empty((len(keys), num_counters, 4), dtype=np.uint32)
    all_columns = keys.columns()
    block_rows = max(1, _BLOCK // max(1, num_counters))
    for row in range(0, len(keys), block_rows):
        block = tuple(column[row : row + block_rows] for column in all_columns)
        for first in range(0, num_counters, _BLOCK):
            last = min(first + _BLOCK, num_counters)
            counter = np.arange(first, last, dtype=np.uint64)[None]
            for word, values in enumerate(_rounds_of_rows(counter, block)):
                drawn[row : row + block_rows, first:last, word] = values
    return _as_uniforms(drawn.reshape(len(keys), num_counters * 4)[:, :num_tokens])


def row_uniforms_at(keys: RowKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Numbers of the listed tokens, [R, M] (int64, >= 0): [R, M], float64, on the same device.

    Equal to picking them out of `row_uniforms`; worth it where few tokens are listed."""
    if token_ids.device.type != "cpu":
        return uniforms_on_device(_to_torch(keys, token_ids.device), token_ids)
    ids = token_ids.numpy().astype(np.uint64)
    four = _rounds_of_rows(ids >> 2, keys.columns())
    chosen = np.choose((ids & 3).astype(np.intp), four)
    return _as_uniforms(chosen.astype(np.uint32))


def flat_uniforms(
    keys: RowKeys, sizes: Sequence[int], token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Numbers of the tokens listed in each of R rows, row after row: `sizes` [R] says how many each
    lists, `token_ids` [N] (>= 0) which. [N], equal to picking them out of `row_uniforms`, on the
    CPU. A token costs as much as `COUNTER_TOKENS` of a full row.

    Words that all rows share stay one number: with a session's seed for all, nothing but the words
    of the counter is of full length after two rounds."""
    if len(token_ids) <= _FEW:
        spread_rows = chain.from_iterable(map(repeat, keys.counters(), sizes))
        listed = zip(token_ids.tolist(), spread_rows, strict=True)
        return np.array([uniform(_rounds(token >> 2, *row)[token & 3]) for token, row in listed])

    def spread(words: WordArray) -> WordArray:
        return words[:1] if (words == words[0]).all() else words.repeat(sizes)

    words = (keys.seed_low, keys.seed_high, keys.a, keys.b, keys.stream)
    columns: tuple[WordArray, ...] = tuple(spread(word) for word in words)
    ids = token_ids.astype(np.uint64)
    four = _rounds_of_rows(ids >> 2, columns)
    chosen = np.choose((ids & 3).astype(np.intp), four)
    numbers: npt.NDArray[np.float64] = np.add(chosen, 0.5, dtype=np.float64)
    numbers *= _WORD_SCALE
    return numbers


def uniforms_on_device(columns: tuple[torch.Tensor, ...], token_ids: torch.Tensor) -> torch.Tensor:
    """As `row_uniforms_at`, of keys that are on the device: `columns` are those of
    `RowKeys.columns`, int64. Waits for nothing."""
    words = torch.stack(_rounds_of_rows(token_ids >> 2, columns), dim=-1)
    drawn = words.gather(-1, (token_ids & 3)[..., None])[..., 0].double()
    return drawn.add_(0.5).mul_(_WORD_SCALE)


def all_uniforms_on_device(columns: tuple[torch.Tensor, ...], num_tokens: int) -> torch.Tensor:
    """As `row_uniforms`, of keys that are on the device. Waits for nothing."""
    counters = torch.arange((num_tokens + 3) // 4, device=columns[0].device)[None]
    words = torch.stack(_rounds_of_rows(counters, columns), dim=-1)
    drawn = words.view(len(columns[0]), -1)[:, :num_tokens].double()
    return drawn.add_(0.5).mul_(_WORD_SCALE)


def _as_uniforms(words: npt.NDArray[np.uint32]) -> torch.Tensor:
    numbers = np.add(words, 0.5, dtype=np.float64)
    numbers *= _WORD_SCALE
    return torch.from_numpy(numbers)


def _to_torch(keys: RowKeys, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """`keys.columns()` as int64 on `device`; a word fits into the positive half."""
    stacked = np.stack(keys.columns()).astype(np.int64)
    return tuple(torch.from_numpy(stacked).to(device))


def _rounds_of_rows(counters: _Words, columns: tuple[_Words, ...]) -> tuple[_Words, ...]:
    seed_low, seed_high, a, b, stream = columns
    return _rounds(counters, a, b, stream, seed_low, seed_high)


def _rounds(
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
