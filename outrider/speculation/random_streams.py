"""The keys of every random number of a session: its seed, a place, a stream and a token id.

| rule           | draft's draw     | accept or not | correction n < K | correction K (bonus) |
| -------------- | ---------------- | ------------- | ---------------- | -------------------- |
| token, block   | DRAFT, index i   | ACCEPT, i     | RESIDUAL, n      | TARGET, K            |
| coupled        | TARGET, position | -             | TARGET, position | TARGET, position     |
| greedy         | -                | -             | -                | -                    |

Under the rules token and block, a draft's draw uses one number of its row: the number whose index
is the digest of the round's committed tokens. Look-ahead drafts the next round for several outcomes
of this round, and only one of them comes true. With the digest, each outcome has its own numbers,
so the draws of the other outcomes say nothing of the draws of this one. Every other draw is a
Gumbel-max draw, which uses a number for each token id (`gumbel_max.py`).

A *position* is absolute: the committed length at the round's start plus the index. An *index place*
keeps the committed length and the index apart, so every round of a session has new index places.

The rules token and block must not use positions. After a rejection, the next round would draw new
tokens with the noise of the draft tokens that were dropped at the same positions. This would bias
the draws, because block verification and the choice of K may depend on the dropped tokens. Coupled
may use positions, because its draw is the target's own draw, whatever was drafted there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import repeat
from struct import pack, unpack
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.errors import check
from outrider.foundation.values import value
from outrider.limits import SEED_MAX
from outrider.speculation.sampling_params import Rule

WORD_MASK = 0xFFFFFFFF
INDEX_TAG = 0x80000000
"""This bit is set in the second word of every index place, and of no position."""
INDEX_MAX = 2**16 - 1


class Stream(IntEnum):
    """The purpose of a number. Numbers of different streams are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    CHOICE = 4


class Place(NamedTuple):
    """Where in the session a number is used, as two 32-bit words of a Philox counter."""

    a: int
    b: int


@value(frozen=True, slots=True)
class RoundNoise:
    """The noise of one round, which begins after `committed_length` committed tokens."""

    seed: int
    rule: Rule
    committed_length: int
    prefix_digest: int = 0
    """Digest of the committed tokens (`tokens.extend_digest`). Only draws of a draft read it."""

    def __post_init__(self) -> None:
        check(0 <= self.seed <= SEED_MAX, "the seed is not a 64-bit number")
        check(0 <= self.committed_length <= WORD_MASK, "the committed length exceeds 32 bits")

    def place(self, index: int) -> Place:
        """The place of the round's token `index`."""
        check(0 <= index <= INDEX_MAX, "the index is not a 16-bit number")
        if self.rule.absolute_noise:
            position = self.committed_length + index
            return Place(position & WORD_MASK, position >> 32)
        return Place(self.committed_length, INDEX_TAG | index)

    @property
    def draft_stream(self) -> Stream:
        return Stream.TARGET if self.rule.absolute_noise else Stream.DRAFT

    @property
    def residual_stream(self) -> Stream:
        return Stream.TARGET if self.rule.absolute_noise else Stream.RESIDUAL

    def accept_uniforms(self, num_draft_tokens: int) -> Iterator[float]:
        """u_i in (0, 1) for each draft token i, which decides whether the token is accepted."""
        if self.rule.absolute_noise or not num_draft_tokens:
            return repeat(0.5, num_draft_tokens)  # Acceptance probabilities are 0 or 1.
        ones, num = _joined([1] * num_draft_tokens), num_draft_tokens
        places = INDEX_TAG * ones | _joined(range(num))
        low, high = _key(self.seed)
        counter = 0, self.committed_length * ones, places, Stream.ACCEPT * ones
        words, *_ = rounds(*counter, low * ones, high * ones, ones)
        return map(uniform, _split(words, num))


def verdict_keys(noises: Sequence[RoundNoise], sizes: Sequence[int]) -> RowKeys:
    """The keys for the rows of each round's verdict, one round after another. `sizes` has K + 1 for
    each round. Row n draws the token after n draft tokens."""
    ends = np.cumsum(sizes, dtype=np.uint64).repeat(sizes)
    num_left = ends - np.arange(len(ends), dtype=np.uint64)  # the rows from this one on
    given = [
        (each.seed, each.committed_length, each.residual_stream, each.rule.absolute_noise, num)
        for each, num in zip(noises, sizes, strict=True)
    ]
    rows = np.array(given, dtype=np.uint64).repeat(sizes, axis=0)
    seed, committed, residual, is_absolute, num = rows.T
    index, absolute = num - num_left, is_absolute.astype(np.bool_)
    position, mask, half = committed + index, np.uint64(WORD_MASK), np.uint64(32)
    a = np.where(absolute, position & mask, committed)
    b = np.where(absolute, position >> half, np.uint64(INDEX_TAG) | index)
    stream = np.where(num_left > 1, residual, np.uint64(Stream.TARGET))
    return np.stack([a, b, stream, seed & mask, seed >> half], axis=1)


def draft_keys(noises: Sequence[RoundNoise], indices: Sequence[int]) -> RowKeys:
    """Row i is the key with which round i draws its draft token with index `indices[i]`."""
    rows = [
        (*noise.place(index), noise.draft_stream, *_key(noise.seed))
        for noise, index in zip(noises, indices, strict=True)
    ]
    return np.array(rows, dtype=np.uint64)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's choices. Choice 0 has the request's own seed."""
    check(0 <= choice <= WORD_MASK, f"choice {choice} is not a 32-bit number")
    if choice == 0:
        return seed
    low, high, _, _ = rounds(choice, 0, 0, int(Stream.CHOICE), *_key(seed))
    return high << 32 | low


def _key(seed: int) -> tuple[int, int]:
    return seed & WORD_MASK, seed >> 32


_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_2 = 0xCD9E8D57
_KEY_STEP_LOW = 0x9E3779B9
_KEY_STEP_HIGH = 0xBB67AE85
_ROUNDS = 10
_WORD_SCALE = 2.0**-32
RowKeys: TypeAlias = npt.NDArray[np.uint64]
"""[R, 5]: `Place.a`, `Place.b`, the stream, and the low and the high word of the seed."""


def row_words(keys: RowKeys) -> npt.NDArray[np.uint64]:
    """The four random words of each row, [4, R], for the counter (0, a, b, stream)."""
    num = len(keys)
    ones = _joined([1] * num)
    a, b, stream, low, high = map(_joined, keys.T.tolist())
    drawn = rounds(0, a, b, stream, low, high, ones)
    return np.array([_split(words, num) for words in drawn], dtype=np.uint64)


def _joined(values: Sequence[int]) -> int:
    """One integer with these values in 64-bit fields."""
    return int.from_bytes(pack(f"<{len(values)}Q", *values), "little")


def _split(fields: int, num: int) -> tuple[int, ...]:
    return unpack(f"<{num}Q", fields.to_bytes(8 * num, "little"))


def uniform(word: int) -> float:
    return (word + 0.5) * _WORD_SCALE


def rounds(
    c0: int, c1: int, c2: int, c3: int, low: int, high: int, ones: int = 1
) -> tuple[int, int, int, int]:
    """Philox4x32-10: turns the four 32-bit words of a counter, and the two words of a seed, into
    four random words. An argument may also hold words of several counters or seeds in 64-bit
    fields; `ones` then has a 1 in each field. Eight counters take little longer than one."""
    mask = WORD_MASK * ones
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_2 = c2 * _MULTIPLIER_2
        c0 = ((product_2 >> 32) ^ c1 ^ low) & mask
        c2 = ((product_0 >> 32) ^ c3 ^ high) & mask
        c1, c3 = product_2, product_0  # The next iteration or the return masks both.
        low = (low + _KEY_STEP_LOW * ones) & mask
        high = (high + _KEY_STEP_HIGH * ones) & mask
    return c0, c1 & mask, c2, c3 & mask
