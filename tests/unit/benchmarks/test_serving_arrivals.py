"""When requests come, and in which order."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy as np
import pytest

from benchmarks.prompts import BenchPrompt
from benchmarks.serving import by_turns
from benchmarks.serving_arrivals import arrival_times

NUMBER = 20_000


def gaps(rate: float, burstiness: float, seed: int = 0) -> np.ndarray:
    times = [0.0, *islice(arrival_times(rate, burstiness, seed), NUMBER)]
    return np.array([after - before for before, after in pairwise(times)])


@pytest.mark.parametrize(("burstiness", "tail"), [(0.25, 24.0), (1.0, 6.0), (4.0, 1.5)])
def test_gaps_have_the_mean_and_the_variance_of_their_law(burstiness: float, tail: float) -> None:
    """Gamma of shape k and mean 1/R: the variance is 1 / (k R^2), its excess kurtosis 6 / k. Each
    of mean and variance is held to 5 standard errors, which a right one misses with probability
    6e-7 where the sum is normal; the seed is fixed."""
    rate = 8.0
    found = gaps(rate, burstiness)
    variance = 1 / (burstiness * rate**2)
    assert abs(found.mean() - 1 / rate) < 5 * math.sqrt(variance / NUMBER)
    assert abs(found.var() - variance) < 5 * variance * math.sqrt((tail + 2) / NUMBER)


def test_counts_of_a_poisson_process_vary_as_much_as_their_mean() -> None:
    """In windows of a second at 20 a second: the mean of 1,000 counts is 20 +- 5 * 0.14, and their
    variance over their mean 1 +- 5 * 0.045 (each fails wrongly with probability 6e-7)."""
    times = np.array(list(islice(arrival_times(20.0, 1.0, 3), 25_000)))
    counts = np.bincount(times[times < 1000].astype(int), minlength=1000)
    assert abs(counts.mean() - 20) < 0.71
    assert abs(counts.var() / counts.mean() - 1) < 0.23


def test_infinite_rates_and_shapes_have_no_chance_in_them() -> None:
    assert list(islice(arrival_times(math.inf, 1.0, 0), 3)) == [0.0, 0.0, 0.0]
    even = list(islice(arrival_times(4.0, math.inf, 0), 3))
    assert even == pytest.approx([0.25, 0.5, 0.75])


def test_a_seed_repeats_its_times() -> None:
    assert gaps(5.0, 1.0, seed=7).tolist() == gaps(5.0, 1.0, seed=7).tolist()
    assert gaps(5.0, 1.0, seed=7).tolist() != gaps(5.0, 1.0, seed=8).tolist()


def test_categories_take_turns() -> None:
    prompts = tuple(BenchPrompt(text, text[0]) for text in ("a1", "a2", "a3", "b1", "c1", "c2"))
    assert [prompt.text for prompt in by_turns(prompts)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
