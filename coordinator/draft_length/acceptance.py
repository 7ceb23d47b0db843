"""Averages the lengths and the acceptance of proposals over verified rounds."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from outrider.limits import NUM_DRAFT_TOKENS_MAX

FIRST_ACCEPTED = 0.7
"""Assumed chance that the first draft token of a round is accepted, before any measurement. With a
low value, drafting would not be tried."""
Array = npt.NDArray[np.float64]


class DepthChances(NamedTuple):
    """The chances of two events at each depth (position in a proposal), as arrays of shape [K]."""

    committed: Array
    """Chance that a token at this depth is proposed, and that all tokens up to it are accepted."""
    proposed: Array
    """Chance that a token at this depth is proposed."""


def depth_counts(num_asked: int, survival: Sequence[float]) -> Array:
    """Returns an array [5, K] for a round that asked for K = `num_asked` tokens, with a column for
    each depth d = 1..K. `survival` has s_d for each proposed token d: the chance that the tokens 1
    to d were accepted. s_0 is 1. Token d is *due* if the tokens 1 to d - 1 were proposed. The rows:

        0  s_{d-1} if token d was due, else 0
        1  s_{d-1} if token d was proposed, else 0
        2  s_d if token d was proposed, else 0
        3  1 if token d was due, else 0
        4  1 if token d was proposed, else 0
    """
    counts, num_proposed = np.zeros((5, num_asked)), min(num_asked, len(survival))
    reached = (1.0, *survival)[:num_asked]
    counts[0, : len(reached)] = reached
    counts[1, :num_proposed] = reached[:num_proposed]
    counts[2, :num_proposed] = survival[:num_proposed]
    counts[3, : len(reached)] = counts[4, :num_proposed] = 1.0
    return counts


class DepthAverages:
    """Estimates the acceptance and the length of proposals by depth, from exponentially weighted
    sums of the counts of `depth_counts`. At a rarely reached depth, the estimates are close to
    those of the prior. Without a prior, this depth's acceptance is close to the previous depth's.
    """

    def __init__(
        self, memory_rounds: float, prior_rounds: float, prior: Self | None = None
    ) -> None:
        """The weight of a round falls to 1/e after `memory_rounds` further rounds. The `prior`
        weighs as much as `prior_rounds` rounds."""
        self._keep = 1.0 - 1.0 / memory_rounds
        self._pull = prior_rounds
        self._prior = prior
        self._sums = np.zeros((5, NUM_DRAFT_TOKENS_MAX))

    def note(self, counts: Array) -> None:
        """Adds the counts of a round (see `depth_counts`)."""
        self._sums *= self._keep
        self._sums[:, : counts.shape[1]] += counts

    def chances(self, num_asked: int) -> DepthChances:
        goes_on, accepted, proposed = np.array(self._rates(num_asked)).reshape(num_asked, 3).T
        return DepthChances(np.cumprod(goes_on * accepted), np.cumprod(proposed))

    def _rates(self, num_depths: int) -> list[tuple[float, float, float]]:
        """Returns three chances for each depth: P(proposed | all earlier tokens accepted),
        P(accepted | proposed, all earlier tokens accepted), and
        P(proposed | all earlier tokens proposed)."""
        pull, rate, before = self._pull, FIRST_ACCEPTED, 0.0
        prior = None if self._prior is None else self._prior._rates(num_depths)
        rates = []
        sums = self._sums[:, :num_depths].T.tolist()
        for depth, (asked, offered, accepted, wanted, proposed) in enumerate(sums):
            goes_on = goes_on_at_all = 1.0
            if prior is not None:
                goes_on, likely, goes_on_at_all = prior[depth]
                # Assumes the same ratio of rate to prior as at the previous depth.
                rate = min(1.0, rate * likely / before) if before > 0 else likely
                before = likely
            rate = (accepted + pull * rate) / (offered + pull)
            rates.append(
                (
                    (offered + pull * goes_on) / (asked + pull),
                    rate,
                    (proposed + pull * goes_on_at_all) / (wanted + pull),
                )
            )
        return rates
