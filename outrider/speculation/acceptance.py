"""Acceptance told from a text that the target wrote, without playing a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

NUM_DEPTHS: Final = 8
"""Depths that acceptance is told for."""


def conditional_acceptance(texts: Sequence[Sequence[float]]) -> tuple[float | None, ...]:
    """The chance, for draft token 1..`NUM_DEPTHS`, that it is accepted given that those before it
    were, from min(1, q(x) / p(x)) along texts that the target drew.

    For such a text the mean of prod_{i<=k} min(1, q_i / p_i) over windows of k tokens is the chance
    that the first k of a chain are accepted. Chances at depth k and k - 1 are taken over the same
    windows, those of at least k tokens, so that a text's end favours neither."""
    found: list[float | None] = []
    for depth in range(1, NUM_DEPTHS + 1):
        reached = accepted = 0.0
        for ratios in texts:
            values = np.asarray(ratios, dtype=np.float64)
            if len(values) >= depth:
                windows = np.lib.stride_tricks.sliding_window_view(values, depth)
                reached += float(windows[:, :-1].prod(axis=1).sum())
                accepted += float(windows.prod(axis=1).sum())
        found.append(accepted / reached if reached > 0 else None)
    return tuple(found)
