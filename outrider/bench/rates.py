"""The ratio of two rates, and its confidence interval over interleaved repetitions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
REPETITIONS_MIN = 8
"""Fewer repetitions get no interval, because it would be much too narrow if they are unequal."""
ANGLES = 10_001
"""Points of the integral in `student_quantile`. Its error is below 2e-5."""


class Work(NamedTuple):
    """What one side did in one repetition."""

    num_tokens: int
    seconds: float


class Ratio(NamedTuple):
    value: float
    interval: tuple[float, float] | None
    """With confidence `LEVEL`; None for fewer than `REPETITIONS_MIN` repetitions."""


def ratio_of_rates(fast: Sequence[Work], slow: Sequence[Work]) -> Ratio:
    """Divides the rate of `fast` by the rate of `slow`. A rate is the number of all tokens, divided
    by all seconds. Repetition i of both sides did the same work, one directly after the other.

    The interval is that of Taylor linearisation, as for ratio estimators (W. G. Cochran, Sampling
    Techniques, chapter 6), on a logarithmic scale. To first order, the logarithm of the ratio is a
    constant plus the mean over the n repetitions of d = f/F - s/S - g/G + t/T. Here f and s are the
    tokens and seconds of `fast` in a repetition, g and t those of `slow`, and capitals are means.
    So the interval has the factor exp(+-q sd(d) / sqrt(n)), where q is the quantile of Student's t
    distribution with n - 1 degrees of freedom.

    The interval is approximate for few unequal repetitions: where a fifth of the repetitions has
    the ratio 4 and the others 0.9, it holds the true ratio in 83 % of the cases for n = 8, and in
    93 % for n = 12 (simulated, with noise of 5 %)."""
    sides = [np.array(side, dtype=float) for side in (fast, slow)]
    (tokens, seconds), (slow_tokens, slow_seconds) = (side.sum(axis=0) for side in sides)
    value = float(tokens / seconds / (slow_tokens / slow_seconds))
    if (num := len(fast)) < REPETITIONS_MIN:
        return Ratio(value, None)
    relative = [side / side.mean(axis=0) @ (1, -1) for side in sides]
    error = (relative[0] - relative[1]).std(ddof=1) / math.sqrt(num)
    factor = math.exp(student_quantile(num - 1) * error)
    return Ratio(value, (value / factor, value * factor))


def student_quantile(freedom: int) -> float:
    """The number t with P(|T| <= t) = `LEVEL`, for Student's t distribution with `freedom` degrees
    of freedom. If T = sqrt(freedom) tan(a), the density of the angle a is proportional to
    cos(a) ** (freedom - 1), which this function integrates."""
    angles = np.linspace(0.0, math.pi / 2, ANGLES)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return math.sqrt(freedom) * math.tan(np.interp(LEVEL, mass / mass[-1], angles))
