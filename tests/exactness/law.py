"""The law of a completion's first tokens by enumeration, and Pearson's test of samples against a
law."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2, ncx2

from outrider.speculation.logits_processing import masked_logits, target_probabilities
from outrider.speculation.sampling_params import SamplingParams, TokenHistory

FALSE_ALARM = 1e-6
"""Probability that a test rejects an exact law."""
POOLED_BELOW = 10.0
"""Cells of smaller expected count are pooled, so that the chi-square law holds."""


def no_mask(prefix: tuple[int, ...]) -> None:
    """The mask of an unconstrained completion."""


def completion_law(
    module: Any, prompt: Sequence[int], length: int, params: SamplingParams,
    mask: Callable[[tuple[int, ...]], Any] = no_mask,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """Probability of every completion of `length` tokens: the model's dense forward pass over every
    prefix, then the `mask`, then the sampling transforms."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        ids = torch.tensor([[*prompt, *prefix] for prefix in law])
        with torch.inference_mode():
            rows = module(ids).logits[:, -1:].float()
        longer: dict[tuple[int, ...], float] = {}
        for row, (prefix, chance) in zip(rows, law.items(), strict=True):
            masked = masked_logits(row, [mask(prefix)])
            p = target_probabilities(masked, params, TokenHistory(prompt, prefix))[0]
            for token_id in p.nonzero()[:, 0].tolist():
                longer[(*prefix, token_id)] = chance * float(p[token_id])
        law = longer
    return law


@dataclass(frozen=True)
class Fit:
    """How well samples fit a law."""

    p_value: float
    num_samples: int
    degrees: int

    @property
    def rejects(self) -> bool:
        return self.p_value < FALSE_ALARM

    def power(self, tv: float) -> float:
        """A lower bound of the probability that a law at total variation `tv` is rejected. For a
        given distance, sum d^2 / p is smallest, 4 tv^2, where half of the mass moves evenly."""
        noncentrality = 4 * self.num_samples * tv**2
        return float(ncx2.sf(chi2.isf(FALSE_ALARM, self.degrees), self.degrees, noncentrality))


def chi_square(cells: np.ndarray, law: np.ndarray) -> Fit:
    """`cells`: the index of every sample in `law`; -1 if it has none."""
    law = law.ravel()
    observed = np.bincount(cells + 1, minlength=law.size + 1)
    if observed[0] or observed[1:][law == 0].any():
        return Fit(0.0, len(cells), law.size)
    seen, expected = observed[1:][law > 0], law[law > 0] * len(cells)
    rare = expected < POOLED_BELOW
    if rare.any():
        pooled = [np.append(each[~rare], each[rare].sum()) for each in (seen, expected)]
        large = pooled[1] >= POOLED_BELOW
        seen, expected = pooled[0][large], pooled[1][large]
    statistic = ((seen - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    return Fit(float(chi2.sf(statistic, degrees) if degrees else 1.0), len(cells), degrees)


def cells_of(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """The index of each sequence [N, T] in a law of shape [V] * T."""
    return np.ravel_multi_index(tuple(tokens.T), (vocab_size,) * tokens.shape[1])


def fit(samples: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> Fit:
    places = {cell: place for place, cell in enumerate(law)}
    cells = np.array([places.get(sample, -1) for sample in samples])
    return chi_square(cells, np.array(list(law.values())))
