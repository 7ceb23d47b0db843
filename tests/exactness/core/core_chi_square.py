"""Pearson's test, with its false-alarm probability and its power stated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2, ncx2

FALSE_ALARM = 1e-6
"""Probability that one test rejects what is exact."""


@dataclass(frozen=True)
class ChiSquare:
    """A statistic and what it may not exceed."""

    statistic: float
    degrees: int
    impossible: int
    """Observations in cells of probability 0: one is enough to reject."""

    @property
    def threshold(self) -> float:
        return float(chi2.isf(FALSE_ALARM, self.degrees)) if self.degrees else 0.0

    @property
    def rejects(self) -> bool:
        return self.impossible > 0 or self.statistic > self.threshold


def chi_square(cells: np.ndarray, law: np.ndarray) -> ChiSquare:
    """`cells`: the observed cell of every sample; `law`: the probability of each cell."""
    law = law.ravel()
    observed = np.bincount(cells, minlength=law.size)
    possible = law > 0
    expected = law[possible] * len(cells)
    assert expected.min() > 5, "too few samples for Pearson's approximation"
    statistic = ((observed[possible] - expected) ** 2 / expected).sum()
    return ChiSquare(float(statistic), int(possible.sum()) - 1, int(observed[~possible].sum()))


def power(total_variation: float, num_samples: int, degrees: int) -> float:
    """A lower bound of the probability that a law this far from the stated one is rejected: by
    Cauchy-Schwarz the noncentrality is at least 4 n TV^2."""
    noncentrality = 4 * num_samples * total_variation**2
    return float(ncx2.sf(chi2.isf(FALSE_ALARM, degrees), degrees, noncentrality))
