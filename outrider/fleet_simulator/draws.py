"""What is left to chance, from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

BLOCK: Final = 2**14
"""Numbers that are drawn at a time."""
ENDLESS: Final = 2**62
"""Tokens of an answer that does not end."""


class Draws:
    """Random numbers of one purpose."""

    def __init__(self, draw: np.random.Generator, survival: Sequence[float]) -> None:
        """`survival` [K] is that of `Drafting`."""
        self._draw = draw
        self._falling = -np.array(survival, dtype=np.float64)
        self._accepted: list[int] = []

    def accepted(self, num: int) -> list[int]:
        """Accepted draft tokens of so many rounds."""
        while len(self._accepted) < num:
            uniforms = self._draw.random(BLOCK)
            # n tokens or more where u < survival[n - 1], which falls.
            self._accepted += np.searchsorted(self._falling, -uniforms, side="left").tolist()
        taken = self._accepted[-num:]
        del self._accepted[-num:]
        return taken

    def is_hit(self, rate: float) -> bool:
        """Whether a round is one of so large a share."""
        return float(self._draw.random()) < rate

    def answer_tokens(self, mean: float) -> int:
        """The length of an answer, at least 1."""
        return ENDLESS if math.isinf(mean) else int(self._draw.geometric(1.0 / mean))

    def gap_s(self, rate: float) -> float:
        """Between two requests, of so many a second."""
        return float(self._draw.exponential(1.0 / rate))
