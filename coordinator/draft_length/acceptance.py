"""How long proposals are, and how much of them is accepted. Pure: told of verified rounds only.

A sibling costs the target a row and the draft next to nothing. It may be accepted where the token
beside it is refused; the token behind it is the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.limits import NUM_DRAFT_TOKENS_MAX, SIBLINGS_MAX
from outrider.speculation.proposal import DraftTree

FIRST_ACCEPTED = 0.7
"""Chance that a first draft token is accepted where nothing is known: high enough that drafting is
tried, as only rounds with a draft teach anything."""
FIRST_TAKEN = 0.25
"""Chance that a sibling is accepted where nothing is known and all before it are refused; of the
n-th one an n-th of that: high enough that some are tried where rows cost little."""
Array = npt.NDArray[np.float64]


class Prospects(NamedTuple):
    """What to expect of a proposal, for depth 1, 2, ... of as many tokens as are asked for."""

    committed: Array
    """Chance that a token of this depth is proposed, and it and all before it are accepted ..."""
    proposed: Array
    """... and that it is proposed at all."""
    refused: Array
    """Chance that it is proposed and refused where all before it are accepted."""


NO_SIBLINGS: Array = np.zeros((2, 0))


def observed(num_asked: int, survival: Sequence[float]) -> Array:
    """What a round says that asked for `num_asked` tokens and was proposed `len(survival)`. By
    depth: asked for, times the chance that all before it was accepted; proposed, times the same;
    the chance that it was accepted, too; asked for with all before it proposed; and proposed.
    `survival` is as `outrider.speculation.accept_reject.survival` tells it."""
    counts, num_proposed = np.zeros((5, num_asked)), min(num_asked, len(survival))
    reached = (1.0, *survival)[:num_asked]
    counts[0, : len(reached)] = reached
    counts[1, :num_proposed] = reached[:num_proposed]
    counts[2, :num_proposed] = survival[:num_proposed]
    counts[3, : len(reached)] = counts[4, :num_proposed] = 1.0
    return counts


class _Averages:
    """Exponentially weighted sums over rounds, of one session or of all."""

    shape: tuple[int, int]

    def __init__(self, memory_rounds: float, prior_rounds: float, prior: Any = None) -> None:
        """A round weighs 1 / e after `memory_rounds` others; the prior, the averages over more
        sessions, as much as `prior_rounds` new ones."""
        self._keep = 1.0 - 1.0 / memory_rounds
        self._pull = prior_rounds
        self._prior = prior
        self.num_rounds = 0
        self._sums = np.zeros(self.shape)

    def fade(self) -> None:
        """A round without a draft."""
        self._sums *= self._keep

    def note(self, counts: Array) -> None:
        """A round with a draft."""
        self.fade()
        self.num_rounds += 1
        self._sums[:, : counts.shape[1]] += counts


class DepthAverages(_Averages):
    """Of acceptance and of proposals' lengths, by depth: sums of what was `observed`. What few
    rounds have reached is drawn towards what the prior says of it; without a prior a depth is drawn
    towards the one before it. Acceptance is that of tokens that were proposed."""

    shape = (5, NUM_DRAFT_TOKENS_MAX)

    def prospects(self, num_asked: int) -> Prospects:
        """What to expect of a proposal for which so many tokens are asked."""
        rates = np.array(self._rates(num_asked)).reshape(num_asked, 3)
        goes_on, accepted, proposed = rates.T
        committed = np.cumprod(goes_on * accepted)
        offered = np.concatenate(([1.0], committed[:-1]))[:num_asked] * goes_on
        return Prospects(committed, np.cumprod(proposed), offered - committed)

    def _rates(self, num_depths: int) -> list[tuple[float, float, float]]:
        """Of each depth, given the depth before, the chance that a proposal goes on where all
        before was accepted, that its next token is accepted then, and that it goes on at all."""
        pull, rate = self._pull, FIRST_ACCEPTED
        prior = None if self._prior is None else self._prior._rates(num_depths)
        rates = []
        sums = self._sums[:, :num_depths].T.tolist()
        for depth, (asked, offered, accepted, wanted, proposed) in enumerate(sums):
            goes_on = goes_on_at_all = 1.0
            if prior is not None:
                goes_on, rate, goes_on_at_all = prior[depth]
            rate = (accepted + pull * rate) / (offered + pull)
            rates.append((
                (offered + pull * goes_on) / (asked + pull), rate,
                (proposed + pull * goes_on_at_all) / (wanted + pull),
            ))  # fmt: skip
        return rates


class SiblingAverages(_Averages):
    """Of the acceptance of siblings, by rank: sums of `sibling_chances`."""

    shape = (2, SIBLINGS_MAX)

    def taken(self, siblings_max: int) -> list[float]:
        """How likely one of 0, 1, 2, ... siblings is accepted where their token is refused."""
        if siblings_max == 0:
            return [0.0]
        return [0.0, *(1.0 - np.cumprod(1.0 - self.rates()[:siblings_max])).tolist()]

    def rates(self) -> Array:
        """[`SIBLINGS_MAX`]: how likely the first, second, ... sibling is accepted where it is asked
        for and all before it are refused."""
        prior = FIRST_TAKEN / np.arange(1.0, SIBLINGS_MAX + 1.0)
        if self._prior is not None:
            prior = self._prior.rates()
        tried, taken = self._sums
        rates: Array = (taken + self._pull * prior) / (tried + self._pull)
        return rates


def sibling_chances(
    tree: DraftTree, accept_probability: Sequence[float], asked: Sequence[int]
) -> Array:
    """What a verdict says of the n-th siblings of all places, n = 1, 2, ..., where `asked` of them
    were asked for, place by place. Sums over the places that had a draft token: the chance that the
    sibling had to be tried, whether it was proposed or not; and that it was accepted."""
    chances = np.zeros((2, max(asked, default=0)))
    reached = 1.0
    for token, num_asked in zip(tree.spine, asked, strict=False):
        _, *group = tree.children[tree.parents[token] + 1]
        left = reached * (1.0 - accept_probability[token])
        for rank in range(num_asked):
            taken = left * accept_probability[group[rank]] if rank < len(group) else 0.0
            chances[:, rank] += left, taken
            left -= taken
        reached *= accept_probability[token]
    return chances


def fitting(siblings: tuple[int, ...], room: int) -> tuple[int, ...]:
    """As many of them, from the first place on, as there is room for."""
    kept: list[int] = []
    for num in siblings:
        kept.append(max(0, min(num, room)))
        room -= kept[-1]
    return tuple(kept) if any(kept) else ()
