"""Where every random number of a session lives: a place, a stream, a token id.

| rule           | draft's draw     | accept or not | correction n < K | correction K (bonus) |
| -------------- | ---------------- | ------------- | ---------------- | -------------------- |
| token, block   | DRAFT, index i   | ACCEPT, i     | RESIDUAL, n      | TARGET, K            |
| coupled        | TARGET, position | -             | TARGET, position | TARGET, position     |
| greedy         | -                | -             | -                | -                    |

In a tree i is a draft token's depth, and its rank among all of that depth tells its numbers from
theirs. Siblings share the draw that puts them in order; what follows a token that has children is
a RESIDUAL, and what follows one without them a TARGET draw, at its depth + 1.

A position is absolute: committed length at the round's start + index. Index places hold that
committed length and the index apart. Token and block verification must not use positions: a slot
that was drafted and thrown away would share its noise with the next round's slot at the same place,
and what the thrown-away slot showed has already had its say (block looks at those slots; so does
whatever learns from them how much to draft next). Committed lengths never repeat, so index places
are fresh in every round; and coupled draws are the target's own, whoever looked at what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import Final

import numpy as np
import torch

from outrider.errors import check
from outrider.limits import SEED_MAX
from outrider.speculation.philox import (
    RowKeys,
    WordArray,
    philox4x32,
    row_uniforms,
    row_uniforms_at,
    uniform,
)
from outrider.speculation.sampling import Rule
from outrider.speculation.trees import DraftTree, draft_tree

_WORD_MASK: Final = 0xFFFFFFFF
_INDEX_TAG: Final = 0x80000000
"""Tells an index place from a position: no position has a high half this large."""
_SIBLING_SHIFT: Final = 16
INDEX_MAX: Final = 2**16 - 1
SIBLING_MAX: Final = 2**15 - 1
_NO_ACCEPT_NOISE: Final = 0.5
"""Under coupled and greedy an acceptance is 0 or 1, and any number in (0, 1) decides the same."""


class Stream(IntEnum):
    """What a number is used for; numbers of different streams are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    CHOICE = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Two 32-bit words: the two inner words of the counter."""

    a: int
    b: int


@dataclass(frozen=True, slots=True)
class RoundNoise:
    """The noise of one round of one session. `committed_length` is that at the round's start."""

    seed: int
    rule: Rule
    committed_length: int

    def __post_init__(self) -> None:
        check(0 <= self.seed <= SEED_MAX, f"seed {self.seed} is not in 0..2^64-1")
        check(0 <= self.committed_length <= _WORD_MASK, "a committed length has 32 bits")

    def place(self, index: int, sibling: int = 0) -> Place:
        """The place of depth `index` (the bonus has index K) of branch `sibling`."""
        check(0 <= index <= INDEX_MAX, f"index {index} is not in 0..{INDEX_MAX}")
        check(0 <= sibling <= SIBLING_MAX, f"sibling {sibling} is not in 0..{SIBLING_MAX}")
        if self.rule.absolute_noise:
            position = self.committed_length + index
            return Place(position & _WORD_MASK, position >> 32)
        return Place(self.committed_length, _INDEX_TAG | sibling << _SIBLING_SHIFT | index)

    @property
    def draft_stream(self) -> Stream:
        """The stream of the draft's own draws: the target's where both are coupled."""
        return Stream.TARGET if self.rule.absolute_noise else Stream.DRAFT

    @property
    def residual_stream(self) -> Stream:
        """The stream of the token after a refusal."""
        return Stream.TARGET if self.rule.absolute_noise else Stream.RESIDUAL

    def accept_uniforms(
        self, num_draft_tokens: int, parents: tuple[int, ...] = ()
    ) -> Iterator[float]:
        """u_i in (0, 1) of each draft token of a chain, or of the tree that `parents` say, made
        when it is asked for: token i passes iff u_i <= its acceptance probability."""
        if self.rule.absolute_noise:
            return repeat(_NO_ACCEPT_NOISE, num_draft_tokens)
        key = _key(self.seed)
        if parents:
            tree = draft_tree(parents, num_draft_tokens)
            places = map(self.place, tree.depths, tree.ranks)
        else:
            places = map(self.place, range(num_draft_tokens))
        counters = ((0, place.a, place.b, int(Stream.ACCEPT)) for place in places)
        return (uniform(philox4x32(counter, key)[0]) for counter in counters)

    def tree_keys(self, tree: DraftTree) -> RowKeys:
        """Of what follows the last committed token and each draft token of a tree: [N + 1] rows.
        One of them is used."""
        rows = [(0, 0), *((d + 1, rank) for d, rank in zip(tree.depths, tree.ranks, strict=True))]
        places = [self.place(depth, rank) for depth, rank in rows]
        streams = [
            self.residual_stream if children else Stream.TARGET for children in tree.children
        ]
        return _row_keys(self.seed, places, streams)


class NoiseBatch:
    """The noise of one round in each of B sessions that share a rule, for work on rows."""

    def __init__(self, seeds: WordArray, rule: Rule, committed_lengths: WordArray) -> None:
        self.seeds = seeds
        self.rule = rule
        self.committed_lengths = committed_lengths

    @classmethod
    def of(cls, noises: Sequence[RoundNoise]) -> NoiseBatch:
        """Puts rounds side by side; they must share their rule."""
        rules = {noise.rule for noise in noises}
        check(len(rules) == 1, "rounds of one batch share their rule")
        lengths = np.array([noise.committed_length for noise in noises], dtype=np.uint64)
        seeds = np.array([noise.seed for noise in noises], dtype=np.uint64)
        return cls(seeds, rules.pop(), lengths)

    def __len__(self) -> int:
        return len(self.seeds)

    def draft_keys(self, indices: Sequence[int] | WordArray, sibling: int = 0) -> RowKeys:
        """Of the draft's draw in session b at depth indices[b]: B rows."""
        stream = RoundNoise(0, self.rule, 0).draft_stream
        streams = np.full(len(self), int(stream), dtype=np.uint64)
        return self._keys(np.asarray(indices, dtype=np.uint64), streams, sibling)

    def correction_keys(self, num_draft_tokens: int) -> RowKeys:
        """Of the corrections n = 0..K of every session: B * (K + 1) rows, session by session."""
        width = num_draft_tokens + 1
        residual = RoundNoise(0, self.rule, 0).residual_stream
        streams = np.full((len(self), width), int(residual), dtype=np.uint64)
        streams[:, -1] = int(Stream.TARGET)
        indices = np.arange(width, dtype=np.uint64)[None].repeat(len(self), axis=0)
        return self._keys(indices, streams)

    def accept_uniforms(self, num_draft_tokens: int, sibling: int = 0) -> torch.Tensor:
        """`RoundNoise.accept_uniforms` of every session: [B, K], float64."""
        shape = (len(self), num_draft_tokens)
        if self.rule.absolute_noise or num_draft_tokens == 0:
            return torch.full(shape, _NO_ACCEPT_NOISE, dtype=torch.float64)
        indices = np.arange(num_draft_tokens, dtype=np.uint64)[None].repeat(len(self), axis=0)
        streams = np.full(shape, int(Stream.ACCEPT), dtype=np.uint64)
        return row_uniforms(self._keys(indices, streams, sibling), 1, "cpu").view(shape)

    def _keys(self, indices: WordArray, streams: WordArray, sibling: int = 0) -> RowKeys:
        """Keys of the places of `indices` ([B] or [B, N]) in every session, row-major."""
        spread = (len(self),) + (1,) * (indices.ndim - 1)
        lengths = self.committed_lengths.reshape(spread)
        a, b = self._places(lengths, indices, sibling)
        zeros = np.zeros(indices.shape, dtype=np.uint64)  # what is added to them gets their shape
        seeds = (zeros + self.seeds.reshape(spread)).ravel()
        return RowKeys(
            seed_low=seeds & np.uint64(_WORD_MASK),
            seed_high=seeds >> np.uint64(32),
            a=(zeros + a).ravel(),
            b=(zeros + b).ravel(),
            stream=streams.ravel(),
        )

    def _places(
        self, lengths: WordArray, indices: WordArray, sibling: int
    ) -> tuple[WordArray, WordArray]:
        """`RoundNoise.place` for many: (a, b)."""
        if self.rule.absolute_noise:
            positions = lengths + indices
            return positions & np.uint64(_WORD_MASK), positions >> np.uint64(32)
        return lengths, indices | np.uint64(_INDEX_TAG | sibling << _SIBLING_SHIFT)


def uniforms(
    seed: int,
    places: Sequence[Place],
    stream: Stream,
    num_tokens: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Numbers in (0, 1) of tokens 0..num_tokens-1 at every place: [len(places), num_tokens],
    float64."""
    return row_uniforms(_row_keys(seed, places, [stream] * len(places)), num_tokens, device)


def uniforms_at(seed: int, place: Place, stream: Stream, token_ids: Sequence[int]) -> torch.Tensor:
    """Numbers in (0, 1) of the listed tokens at one place: [len(token_ids)], float64."""
    ids = torch.tensor(token_ids, dtype=torch.int64)[None]
    return row_uniforms_at(_row_keys(seed, [place], [stream]), ids)[0]


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request for `n` texts; choice 0 has the request's own."""
    check(0 <= choice <= _WORD_MASK, f"choice {choice} is not a 32-bit number")
    if choice == 0:
        return seed
    low, high, _, _ = philox4x32((choice, 0, 0, int(Stream.CHOICE)), _key(seed))
    return high << 32 | low


def _key(seed: int) -> tuple[int, int]:
    return seed & _WORD_MASK, seed >> 32


def _row_keys(seed: int, places: Sequence[Place], streams: Sequence[Stream]) -> RowKeys:
    def column(words: Sequence[int]) -> WordArray:
        return np.array(words, dtype=np.uint64)

    low, high = _key(seed)
    return RowKeys(
        seed_low=column([low] * len(places)),
        seed_high=column([high] * len(places)),
        a=column([place.a for place in places]),
        b=column([place.b for place in places]),
        stream=column([int(stream) for stream in streams]),
    )
