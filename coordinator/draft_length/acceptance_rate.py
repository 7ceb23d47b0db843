"""How long proposals are, and how much of them is accepted, token by token of their depth.

Pure: told of rounds that were verified, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.limits import NUM_DRAFT_TOKENS_MAX

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
