"""Averages of the lengths and the acceptance of proposals. Pure: learns from verified rounds only.

A sibling costs the target one more row and the draft almost nothing. If it is accepted in place of
a draft token, the next token comes from the target.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from outrider.limits import NUM_DRAFT_TOKENS_MAX

FIRST_ACCEPTED = 0.7
"""Assumed chance that a first draft token is accepted; high enough that drafting is tried."""
FIRST_TAKEN = 0.3
"""Assumed chance that one of a place's siblings is accepted if the draft token is refused."""
Array = npt.NDArray[np.float64]


class Prospects(NamedTuple):
    """What to expect of a proposal, by depth 1, 2, ..., K. [K] each."""

    committed: Array
    """Chance that a token of this depth is proposed, and it and all before it are accepted."""
    proposed: Array
    """Chance that a token of this depth is proposed."""
    refused: Array
    """Chance that it is proposed and refused, and all before it are accepted."""


def observed(num_asked: int, survival: Sequence[float]) -> Array:
    """What a round shows that asked for K = `num_asked` tokens and got `len(survival)`, [5, K].
    With `reached`, the chance that all earlier tokens were accepted, the rows are: `reached` if
    asked for; `reached` if proposed; `survival` (`outrider.speculation.accept_reject`); 1 if asked
    for and all before it proposed; 1 if proposed."""
    counts, num_proposed = np.zeros((5, num_asked)), min(num_asked, len(survival))
    reached = (1.0, *survival)[:num_asked]
    counts[0, : len(reached)] = reached
    counts[1, :num_proposed] = reached[:num_proposed]
    counts[2, :num_proposed] = survival[:num_proposed]
    counts[3, : len(reached)] = counts[4, :num_proposed] = 1.0
    return counts


class DepthAverages:
    """Acceptance and lengths of proposals by depth, of one session or of all: exponentially
    weighted sums of what was `observed`. Rates of rarely reached depths are drawn towards the
    prior, or without one towards the depth before."""

    def __init__(
        self, memory_rounds: float, prior_rounds: float, prior: Self | None = None
    ) -> None:
        """The weight of a round falls to 1/e over `memory_rounds` others. `prior`, the averages
        over more sessions, weighs as much as `prior_rounds` new rounds."""
        self._keep = 1.0 - 1.0 / memory_rounds
        self._pull = prior_rounds
        self._prior = prior
        self._sums = np.zeros((5, NUM_DRAFT_TOKENS_MAX))

    def note(self, counts: Array) -> None:
        """Counts a round with a draft, from `observed`."""
        self._sums *= self._keep
        self._sums[:, : counts.shape[1]] += counts

    def prospects(self, num_asked: int) -> Prospects:
        """What to expect of a proposal of up to `num_asked` tokens."""
        rates = np.array(self._rates(num_asked)).reshape(num_asked, 3)
        goes_on, accepted, proposed = rates.T
        committed = np.cumprod(goes_on * accepted)
        offered = np.concatenate(([1.0], committed[:-1]))[:num_asked] * goes_on
        return Prospects(committed, np.cumprod(proposed), offered - committed)

    def _rates(self, num_depths: int) -> list[tuple[float, float, float]]:
        """Three chances at each depth: that a proposal whose tokens were all accepted so far has
        another token, that this token is accepted, and that any proposal has another token."""
        pull, rate, before = self._pull, FIRST_ACCEPTED, 0.0
        prior = None if self._prior is None else self._prior._rates(num_depths)
        rates = []
        sums = self._sums[:, :num_depths].T.tolist()
        for depth, (asked, offered, accepted, wanted, proposed) in enumerate(sums):
            goes_on = goes_on_at_all = 1.0
            if prior is not None:
                goes_on, likely, goes_on_at_all = prior[depth]
                # The prior, times this session's ratio to it at the depth before.
                rate = min(1.0, rate * likely / before) if before > 0 else likely
                before = likely
            rate = (accepted + pull * rate) / (offered + pull)
            rates.append((
                (offered + pull * goes_on) / (asked + pull), rate,
                (proposed + pull * goes_on_at_all) / (wanted + pull),
            ))  # fmt: skip
        return rates


class SiblingAverage:
    """The chance that one of a place's siblings is accepted if the draft token is refused."""

    def __init__(self, memory_rounds: float, prior_rounds: float) -> None:
        self._keep = 1.0 - 1.0 / memory_rounds
        self._pull = prior_rounds
        self._refused = self._taken = 0.0

    def note(self, is_taken: bool) -> None:
        """Counts a round in which a draft token with siblings was refused."""
        self._refused = self._refused * self._keep + 1.0
        self._taken = self._taken * self._keep + is_taken

    @property
    def chance(self) -> float:
        return (self._taken + self._pull * FIRST_TAKEN) / (self._refused + self._pull)
