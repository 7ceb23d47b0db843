"""How long proposals are, and how much of them is accepted. Pure: told of verified rounds only.

A sibling costs the target a row and the draft next to nothing. It may be accepted where the token
beside it is refused; the token behind it is the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final, NamedTuple, Self

import numpy as np

from outrider.limits import NUM_DRAFT_TOKENS_MAX, SIBLINGS_MAX
from outrider.speculation.proposal import DraftTree

FIRST_ACCEPTED: Final = 0.7
"""Chance that a first draft token is accepted where nothing is known: high enough that drafting is
tried, as only rounds with a draft teach anything."""
FIRST_TAKEN: Final = 0.25
"""Chance that a sibling is accepted where nothing is known and all before it are refused; of the
n-th one an n-th of that: high enough that some are tried where rows cost little."""
SIBLINGS_OF_A_ROUND_MAX: Final = 16
"""Siblings of one proposal, together."""


class Prospects(NamedTuple):
    """What to expect of a proposal, for depth 1, 2, ... of as many tokens as are asked for."""

    committed: tuple[float, ...]
    """Chance that a token of this depth is proposed, and it and all before it are accepted ..."""
    proposed: tuple[float, ...]
    """... and that it is proposed at all."""
    refused: tuple[float, ...]
    """Chance that it is proposed and refused where all before it are accepted."""


class SiblingChances(NamedTuple):
    """What a round says of the n-th siblings of all its places, n = 1, 2, ...: sums over the places
    that had a draft token, each times the chance that the sibling had to be tried."""

    asked: tuple[float, ...]
    """Places for which one was asked ..."""
    offered: tuple[float, ...]
    """... those that had one ..."""
    taken: tuple[float, ...]
    """... and those in which it was accepted."""


NO_SIBLINGS: Final = SiblingChances((), (), ())


class _Averages:
    """Exponentially weighted sums over rounds, of one session or of all. What few rounds have
    reached is drawn towards what `prior` says of it: the averages over all sessions."""

    def __init__(
        self, memory_rounds: float, prior_rounds: float, prior: Self | None = None
    ) -> None:
        """A round weighs 1 / e after `memory_rounds` others; the prior as much as `prior_rounds`
        new ones."""
        self._keep = 1.0 - 1.0 / memory_rounds
        self._pull = prior_rounds
        self._prior = prior

    def fade(self) -> None:
        self._sums *= self._keep

    _sums: np.ndarray[tuple[int, int], np.dtype[np.float64]]


class DepthAverages(_Averages):
    """Of acceptance and of proposals' lengths, by depth. Without a prior a depth is drawn towards
    the one before it. Acceptance is that of tokens that were proposed."""

    def __init__(
        self, memory_rounds: float, prior_rounds: float, prior: DepthAverages | None = None
    ) -> None:
        super().__init__(memory_rounds, prior_rounds, prior)
        self.num_rounds = 0
        self._sums = np.zeros((5, NUM_DRAFT_TOKENS_MAX))
        """Rounds that asked for a depth, each times the chance that all before it was accepted; of
        them those that proposed it, and those times the chance that it was accepted, too; rounds
        that asked for it and proposed all before it, and those of them that proposed it."""

    def note(self, num_asked: int, survival: Sequence[float]) -> None:
        """A round asked for `num_asked` tokens and was proposed `len(survival)`; `survival` is as
        `outrider.speculation.accept_reject.survival` tells it."""
        self.fade()
        self.num_rounds += 1
        asked, offered, accepted, wanted, proposed = self._sums
        reached = (1.0, *survival)[:num_asked]
        num_proposed = min(num_asked, len(survival))
        asked[: len(reached)] += reached
        wanted[: len(reached)] += 1.0
        offered[:num_proposed] += reached[:num_proposed]
        accepted[:num_proposed] += survival[:num_proposed]
        proposed[:num_proposed] += 1.0

    def prospects(self, num_asked: int) -> Prospects:
        """What to expect of a proposal for which so many tokens are asked."""
        goes_on, accepted, proposed = self._rates(num_asked)
        committed = np.cumprod(goes_on * accepted)
        offered = np.concatenate(([1.0], committed[:-1]))[:num_asked] * goes_on
        parts = committed, np.cumprod(proposed), offered - committed
        return Prospects(*(tuple(part.tolist()) for part in parts))

    def _rates(self, num_depths: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Of each depth, given the depth before: the chance that a proposal goes on where all
        before was accepted, that its next token is accepted then, and that it goes on at all."""
        asked, offered, accepted, wanted, proposed = self._sums[:, :num_depths]
        pull, rates = self._pull, np.ones((3, num_depths))
        prior = None if self._prior is None else self._prior._rates(num_depths)
        likely = [] if prior is None else prior[1].tolist()
        if prior is not None:
            rates[:] = prior
        rates[0] = (offered + pull * rates[0]) / (asked + pull)
        rates[2] = (proposed + pull * rates[2]) / (wanted + pull)
        rate = FIRST_ACCEPTED
        for depth, (good, all_) in enumerate(zip(accepted.tolist(), offered.tolist(), strict=True)):
            if depth == 0 or (likely and likely[depth - 1] <= 0):
                rate = likely[depth] if likely else rate
            elif likely:  # As much higher or lower as the session's own is at the depth before.
                rate = min(1.0, rate * likely[depth] / likely[depth - 1])
            rates[1, depth] = rate = (good + pull * rate) / (all_ + pull)
        return rates


class SiblingAverages(_Averages):
    """Of the acceptance of siblings, by rank."""

    def __init__(
        self, memory_rounds: float, prior_rounds: float, prior: SiblingAverages | None = None
    ) -> None:
        super().__init__(memory_rounds, prior_rounds, prior)
        self._sums = np.zeros((3, SIBLINGS_MAX))

    def note(self, found: SiblingChances) -> None:
        self.fade()
        for sums, values in zip(self._sums, found, strict=True):
            sums[: len(values)] += values

    def rates(self) -> list[tuple[float, float]]:
        """Of the first, second, ... sibling: how likely it is offered where it is asked for, and
        accepted where it is offered and all before it are refused."""
        pull = self._pull
        prior = [(1.0, FIRST_TAKEN / (rank + 1)) for rank in range(SIBLINGS_MAX)]
        if self._prior is not None:
            prior = self._prior.rates()
        return [
            ((offered + pull * likely) / (asked + pull), (taken + pull * good) / (offered + pull))
            for (asked, offered, taken), (likely, good) in zip(
                self._sums.T.tolist(), prior, strict=True
            )
        ]


def sibling_chances(
    tree: DraftTree, accept_probability: Sequence[float], asked: Sequence[int]
) -> SiblingChances:
    """Of a verdict on a proposal for which `asked` siblings were asked, place by place."""
    sums = [[0.0] * max(asked, default=0) for _ in range(3)]
    reached = 1.0
    for token, num_asked in zip(tree.spine, asked, strict=False):
        group = tree.children[tree.parents[token] + 1]
        left = reached * (1.0 - accept_probability[token])
        for rank in range(num_asked):
            sums[0][rank] += left
            if rank + 1 < len(group):
                taken = left * accept_probability[group[rank + 1]]
                sums[1][rank] += left
                sums[2][rank] += taken
                left -= taken
        reached *= accept_probability[token]
    return SiblingChances(*map(tuple, sums))


def fitting(siblings: tuple[int, ...], room: int) -> tuple[int, ...]:
    """As many of them, from the first place on, as there is room for."""
    kept: list[int] = []
    for num in siblings:
        kept.append(max(0, min(num, room)))
        room -= kept[-1]
    return tuple(kept) if any(kept) else ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Siblings for a proposal of some length, place by place, and what they add to it: expected
    tokens, less those that other sessions lose, and time."""

    siblings: tuple[int, ...]
    num_tokens: float
    seconds: float


class Shaper:
    """Adds siblings to proposals of K tokens while they make rounds bring more a second."""

    def __init__(
        self,
        prospects: Prospects,
        rates: Sequence[tuple[float, float]],
        row_s: Sequence[float],
        row_lost: Sequence[float],
        siblings_max: int,
    ) -> None:
        """`row_s` and `row_lost` are what each further row of a verification costs, `siblings_max`
        bounds those beside one token."""
        self._row_s, self._row_lost = row_s, row_lost
        left = list(accumulate((1.0 - offered * good for offered, good in rates), mul, initial=1.0))
        gains: list[tuple[float, float, int]] = []
        """Tokens that a sibling adds, the chance that it has to be verified, and its place."""
        for depth, refused in enumerate(prospects.refused):
            best = 1.0
            for rank in range(siblings_max):
                offered, good = rates[rank]
                best = min(best, refused * left[rank] * offered * good)
                gains.append((best, prospects.proposed[depth] * offered, depth))
        self._gains = sorted(gains, key=lambda gain: -gain[0])

    def shape(self, num_draft_tokens: int, num_tokens: float, seconds: float) -> Shape:
        siblings = [0] * num_draft_tokens
        tokens, time, row = num_tokens, seconds, num_draft_tokens
        for gain, likely, depth in self._gains:
            if depth >= num_draft_tokens:
                continue
            if row >= min(len(self._row_s), num_draft_tokens + SIBLINGS_OF_A_ROUND_MAX):
                break
            more = gain - likely * self._row_lost[row]
            cost = likely * self._row_s[row]
            if more * time <= tokens * cost:
                break
            tokens, time, row = tokens + more, time + cost, row + 1
            siblings[depth] += 1
        return Shape(tuple(siblings) if any(siblings) else (), tokens - num_tokens, time - seconds)
