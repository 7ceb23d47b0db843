"""Where every random number of a session lives: a place, a stream, a token id.

| rule           | draft's draw     | accept or not | correction n < K | correction K (bonus) |
| -------------- | ---------------- | ------------- | ---------------- | -------------------- |
| token, block   | DRAFT, index i   | ACCEPT, i     | RESIDUAL, n      | TARGET, K            |
| coupled        | TARGET, position | -             | TARGET, position | TARGET, position     |
| greedy         | -                | -             | -                | -                    |

A draft's draw under token and block takes number 0 of its place as a uniform, and number j for
sibling j. Every other draw is a race over the numbers of all tokens (`gumbel_max.py`), so that a
draft can guess corrections by running the same race. In a tree i is a draft token's depth, and its
rank among all of that depth tells its numbers from theirs. What follows a token that has children
is a RESIDUAL, and what follows one without them a TARGET draw, at its depth + 1.

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

from outrider.errors import check
from outrider.limits import SEED_MAX
from outrider.speculation.philox import RowKeys, WordArray, philox4x32, uniform
from outrider.speculation.sampling_params import Rule
from outrider.speculation.trees import DraftTree, draft_tree

WORD_MASK: Final = 0xFFFFFFFF
INDEX_TAG: Final = 0x80000000
"""Tells an index place from a position: no position has a high half this large."""
SIBLING_SHIFT: Final = 16
INDEX_MAX: Final = 2**16 - 1
SIBLING_MAX: Final = 2**15 - 1
NO_ACCEPT_NOISE: Final = 0.5
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
        check(0 <= self.committed_length <= WORD_MASK, "a committed length has 32 bits")

    def place(self, index: int, sibling: int = 0) -> Place:
        """The place of depth `index` (the bonus has index K) of branch `sibling`."""
        check(0 <= index <= INDEX_MAX, f"index {index} is not in 0..{INDEX_MAX}")
        check(0 <= sibling <= SIBLING_MAX, f"sibling {sibling} is not in 0..{SIBLING_MAX}")
        if self.rule.absolute_noise:
            position = self.committed_length + index
            return Place(position & WORD_MASK, position >> 32)
        return Place(self.committed_length, INDEX_TAG | sibling << SIBLING_SHIFT | index)

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
            return repeat(NO_ACCEPT_NOISE, num_draft_tokens)
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
        return row_keys(self.seed, places, streams)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request for `n` texts; choice 0 has the request's own."""
    check(0 <= choice <= WORD_MASK, f"choice {choice} is not a 32-bit number")
    if choice == 0:
        return seed
    low, high, _, _ = philox4x32((choice, 0, 0, int(Stream.CHOICE)), _key(seed))
    return high << 32 | low


def _key(seed: int) -> tuple[int, int]:
    return seed & WORD_MASK, seed >> 32


def row_keys(seed: int, places: Sequence[Place], streams: Sequence[Stream]) -> RowKeys:
    """Of one session: a row for each place, in the stream beside it."""

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
