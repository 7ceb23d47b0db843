"""The law of a completion's first tokens, by enumeration, and a test of samples against it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats

from outrider.speculation.logits_processing import TokenHistory, target_probabilities
from outrider.speculation.sampling_params import SamplingParams

FALSE_ALARM = 1e-6
POOLED_BELOW = 10.0
"""Cells of smaller expected count are pooled, so that the chi-square law holds."""


def completion_law(
    module: Any, prompt: Sequence[int], length: int, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of every completion of `length` tokens: the model's own dense forward pass over
    every prefix, then the sampling transforms."""
    vocab_size = module.config.vocab_size
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
        with torch.inference_mode():
            logits = module(ids).logits[:, -1].float()
        longer: dict[tuple[int, ...], float] = {}
        for row, prefix in enumerate(prefixes):
            history = TokenHistory(prompt, prefix)
            p = target_probabilities(logits[row : row + 1], params, history)[0].tolist()
            for token_id in range(vocab_size):
                if p[token_id] > 0:
                    longer[(*prefix, token_id)] = law[prefix] * p[token_id]
        law = longer
    return law


@dataclass(frozen=True)
class Fit:
    """How well samples fit a law."""

    p_value: float
    num_samples: int
    num_cells: int
    power: float
    """Probability to find a law at total variation `detects`."""


def fit(samples: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float], tv: float) -> Fit:
    """Pearson's chi-square. The power is that against the hardest law at total variation `tv`: for
    a given distance, sum d^2 / p is smallest, 4 tv^2, where half of the mass moves evenly."""
    num = len(samples)
    counts = Counter(samples)
    impossible = [cell for cell in counts if cell not in law]
    if impossible:
        return Fit(0.0, num, len(law), 1.0)
    pooled_seen = pooled_expected = statistic = 0.0
    cells = 0
    for cell, probability in law.items():
        expected = probability * num
        if expected < POOLED_BELOW:
            pooled_seen += counts[cell]
            pooled_expected += expected
        else:
            statistic += (counts[cell] - expected) ** 2 / expected
            cells += 1
    if pooled_expected >= POOLED_BELOW:
        statistic += (pooled_seen - pooled_expected) ** 2 / pooled_expected
        cells += 1
    degrees = cells - 1
    threshold = stats.chi2.isf(FALSE_ALARM, degrees)
    power = float(stats.ncx2.sf(threshold, degrees, 4 * tv**2 * num))
    return Fit(float(stats.chi2.sf(statistic, degrees)), num, cells, power)


def product(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations, for parametrised grids."""
    return list(itertools.product(*axes))
