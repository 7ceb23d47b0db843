"""How long proposals are, and how much of them is accepted, token by token of their depth.

Pure: told of rounds that were verified, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final

from outrider.limits import NUM_DRAFT_TOKENS_MAX, SIBLINGS_MAX
from outrider.speculation.proposal import DraftTree

FIRST_ACCEPTED: Final = 0.7
"""Chance that a first draft token is accepted where nothing is known: high enough that drafting is
tried, as only rounds with a draft teach anything."""
UNIT_MAX: Final = 1e100
"""Sums are made small again when a round weighs so much."""


@dataclass(frozen=True, slots=True)
class Prospects:
    """What to expect of a proposal, for depth 1, 2, ... of as many tokens as are asked for."""

    committed: tuple[float, ...]
    """Chance that a token of this depth is proposed, and it and all before it are accepted ..."""
    proposed: tuple[float, ...]
    """... and that it is proposed at all."""
    refused: tuple[float, ...]
    """Chance that it is proposed and refused where all before it are accepted."""


@dataclass(frozen=True, slots=True)
class _Rates:
    """Of each depth, given the depth before."""

    offered: tuple[float, ...]
    """Chance that a proposal goes on where all before was accepted ..."""
    accepted: tuple[float, ...]
    """... that its next token is accepted then ..."""
    proposed: tuple[float, ...]
    """... and that it goes on at all."""


class _Sums:
    """Of one depth, over rounds, each times its weight."""

    __slots__ = ("accepted", "asked", "offered", "proposed", "wanted")

    def __init__(self) -> None:
        self.asked = 0.0
        """Rounds that asked for it, each times the chance that all before it was accepted; ..."""
        self.offered = 0.0
        """... those in which it was proposed, likewise ..."""
        self.accepted = 0.0
        """... and those times the chance that it was accepted, too."""
        self.wanted = 0.0
        """Rounds that asked for it and proposed all before it ..."""
        self.proposed = 0.0
        """... and those in which it was proposed."""

    def shrink(self, by: float) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) / by)


class DepthAverages:
    """Exponentially weighted averages over rounds, of one session or of all.

    A depth that few rounds have reached is drawn towards what `prior` says of it: the averages over
    all sessions; without a prior, towards the depth before it. Averages of acceptance know
    only tokens that were proposed: how often none was is told apart.
    """

    def __init__(
        self, memory_rounds: float, prior_rounds: float, prior: DepthAverages | None = None
    ) -> None:
        """A round weighs 1 / e after `memory_rounds` others; the prior as much as `prior_rounds`
        new ones."""
        self._growth = 1.0 / (1.0 - 1.0 / memory_rounds)
        self._prior_rounds = prior_rounds
        self._prior = prior
        self.num_rounds = 0
        """Rounds noted."""
        self._unit = 1.0
        """Weight of a round now. It grows, so that what is old need not be made smaller."""
        self._depths = [_Sums() for _ in range(NUM_DRAFT_TOKENS_MAX)]

    def note(self, num_asked: int, survival: Sequence[float]) -> None:
        """A round asked for `num_asked` tokens and was proposed `len(survival)`; `survival` is as
        `outrider.speculation.accept_reject.survival` tells it."""
        self.fade(1)
        self.num_rounds += 1
        reached = unit = self._unit
        for depth in range(num_asked):
            sums = self._depths[depth]
            sums.asked += reached
            sums.wanted += unit
            if depth >= len(survival):
                break
            sums.offered += reached
            sums.proposed += unit
            reached = survival[depth] * unit
            sums.accepted += reached

    def fade(self, num_rounds: int) -> None:
        """So many rounds have passed."""
        self._unit *= self._growth**num_rounds
        if self._unit > UNIT_MAX:
            for sums in self._depths:
                sums.shrink(self._unit)
            self._unit = 1.0

    def prospects(self, num_asked: int) -> Prospects:
        """What to expect of a proposal for which so many tokens are asked."""
        rates = self._rates(num_asked)
        committed: list[float] = []
        proposed: list[float] = []
        refused: list[float] = []
        whole = begun = 1.0
        for depth in range(num_asked):
            offered = whole * rates.offered[depth]
            whole = offered * rates.accepted[depth]
            begun *= rates.proposed[depth]
            committed.append(whole)
            proposed.append(begun)
            refused.append(offered - whole)
        return Prospects(tuple(committed), tuple(proposed), tuple(refused))

    def _rates(self, num_depths: int) -> _Rates:
        prior = None if self._prior is None else self._prior._rates(num_depths)
        pull = self._prior_rounds * self._unit
        offered, accepted, proposed = [], [], []
        before = FIRST_ACCEPTED
        for depth, sums in enumerate(self._depths[:num_depths]):
            go_on = 1.0 if prior is None else prior.offered[depth]
            begin = 1.0 if prior is None else prior.proposed[depth]
            likely = before if prior is None else _carried(prior.accepted, depth, before)
            offered.append((sums.offered + pull * go_on) / (sums.asked + pull))
            proposed.append((sums.proposed + pull * begin) / (sums.wanted + pull))
            before = (sums.accepted + pull * likely) / (sums.offered + pull)
            accepted.append(before)
        return _Rates(tuple(offered), tuple(accepted), tuple(proposed))


def _carried(prior: Sequence[float], depth: int, before: float) -> float:
    """The prior's acceptance at a depth, as much higher or lower as the session's own is at the
    depth before."""
    if depth == 0 or prior[depth - 1] <= 0:
        return prior[depth]
    return min(1.0, before * prior[depth] / prior[depth - 1])


FIRST_TAKEN: Final = 0.25
"""Chance that a sibling is accepted where nothing is known and all before it are refused; of the
n-th one an n-th of that: high enough that some are tried where rows cost little."""
SIBLINGS_OF_A_ROUND_MAX: Final = 16
"""Siblings of one proposal, together."""


@dataclass(frozen=True, slots=True)
class SiblingChances:
    """What a round says of the n-th siblings of all its places, n = 1, 2, ...: sums over the places
    that had a draft token, each times the chance that the sibling had to be tried."""

    asked: tuple[float, ...]
    """Places for which one was asked ..."""
    offered: tuple[float, ...]
    """... those that had one ..."""
    taken: tuple[float, ...]
    """... and those in which it was accepted."""


NO_SIBLINGS: Final = SiblingChances((), (), ())


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
    wanted, offered, taken_ = (tuple(values) for values in sums)
    return SiblingChances(wanted, offered, taken_)


def fitting(siblings: tuple[int, ...], room: int) -> tuple[int, ...]:
    """As many of them, from the first place on, as there is room for."""
    kept: list[int] = []
    for num in siblings:
        kept.append(max(0, min(num, room)))
        room -= kept[-1]
    return tuple(kept) if any(kept) else ()


class SiblingAverages:
    """Exponentially weighted averages over rounds: of one session, drawn towards those of all."""

    def __init__(
        self, memory_rounds: float, prior_rounds: float, prior: SiblingAverages | None = None
    ) -> None:
        """A round weighs 1 / e after `memory_rounds` others; the prior as much as `prior_rounds`
        new ones."""
        self._growth = 1.0 / (1.0 - 1.0 / memory_rounds)
        self._prior_rounds = prior_rounds
        self._prior = prior
        self._unit = 1.0
        self._sums = [[0.0] * SIBLINGS_MAX for _ in range(3)]

    def note(self, found: SiblingChances) -> None:
        """A round was verified."""
        self._unit *= self._growth
        if self._unit > UNIT_MAX:
            self._sums = [[value / self._unit for value in values] for values in self._sums]
            self._unit = 1.0
        for sums, values in zip(self._sums, (found.asked, found.offered, found.taken), strict=True):
            for rank, value in enumerate(values):
                sums[rank] += value * self._unit

    def rates(self) -> list[tuple[float, float]]:
        """Of the first, second, ... sibling: how likely it is offered where it is asked for, and
        accepted where it is offered and all before it are refused."""
        pull = self._prior_rounds * self._unit
        before = (
            [(1.0, FIRST_TAKEN / (rank + 1)) for rank in range(SIBLINGS_MAX)]
            if self._prior is None
            else self._prior.rates()
        )
        return [
            ((offered + pull * likely) / (asked + pull), (taken + pull * good) / (offered + pull))
            for asked, offered, taken, (likely, good) in zip(*self._sums, before, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Shape:
    """Siblings for a proposal of some length, and what they add to it."""

    siblings: tuple[int, ...]
    """Place by place."""
    num_tokens: float
    """Expected, less those that other sessions lose."""
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
        """For a chain of so many tokens that promises this."""
        siblings = [0] * num_draft_tokens
        row = num_draft_tokens
        tokens, time = num_tokens, seconds
        for gain, likely, depth in self._gains:
            if depth >= num_draft_tokens:
                continue
            if row >= min(len(self._row_s), num_draft_tokens + SIBLINGS_OF_A_ROUND_MAX):
                break
            more = gain - likely * self._row_lost[row]
            cost = likely * self._row_s[row]
            if more * time <= tokens * cost:
                break
            tokens, time = tokens + more, time + cost
            siblings[depth] += 1
            row += 1
        return Shape(tuple(siblings) if any(siblings) else (), tokens - num_tokens, time - seconds)
