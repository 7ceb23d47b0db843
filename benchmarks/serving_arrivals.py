"""When requests come: all at once, or as a renewal process of a stated rate and burstiness."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

_BLOCK: Final = 1_024
"""Gaps that are drawn at a time: one draw costs as much as hundreds of them together."""


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning at which requests come, without end, ascending.

    Gaps are Gamma(shape `burstiness`, mean 1 / `rate`), as those of `vllm bench serve`: 1 is a
    Poisson process, less comes in bursts, more is more even, infinity is a metronome. The first
    request comes after a gap, too. An infinite rate: all at 0. Unlike vLLM's, the times are not
    stretched so that the last of them falls on its mean: N requests at rate R take N / R seconds on
    average, and sqrt(N / `burstiness`) / R more or less."""
    if math.isinf(rate):
        while True:
            yield 0.0
    generator = np.random.default_rng(seed)
    now = 0.0
    while True:
        for gap in _gaps(generator, rate, burstiness):
            now += gap
            yield now


def _gaps(generator: np.random.Generator, rate: float, burstiness: float) -> list[float]:
    if math.isinf(burstiness):
        return [1 / rate] * _BLOCK
    gaps: list[float] = generator.gamma(burstiness, 1 / (rate * burstiness), _BLOCK).tolist()
    return gaps
