"""Estimates acceptance from texts that the target wrote, without running rounds."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NUM_DEPTHS = 8
"""Depths for which acceptance is estimated."""


def conditional_acceptance(texts: Sequence[Sequence[float]]) -> tuple[float | None, ...]:
    """For draft tokens 1..`NUM_DEPTHS`, the probability that each is accepted if all before it
    were. `texts` has min(1, q(x) / p(x)) for each token x of texts that the target drew.

    The mean of prod_{i<=k} min(1, q_i / p_i) over windows of k tokens of such a text is the
    probability that the first k tokens of a chain are accepted. The probabilities for depths k and
    k - 1 use the same windows, those of at least k tokens, so that a text's end favours neither.
    """
    values = [np.asarray(ratios, dtype=np.float64) for ratios in texts]
    windows = [[ratios[depth:] for depth in range(NUM_DEPTHS)] for ratios in values]
    return acceptance_of_windows(windows, NUM_DEPTHS)


def acceptance_of_windows(
    texts: Sequence[Sequence[npt.NDArray[np.float64]]], num_depths: int
) -> tuple[float | None, ...]:
    """Like `conditional_acceptance`, for draft tokens 1..`num_depths` whose ratio depends on where
    the window begins: `texts[t][k][w]` is the ratio of draft token k + 1 in window w of text t.
    Windows that the end of a text cuts off come last. A text may have fewer depths."""
    found: list[float | None] = []
    for depth in range(num_depths):
        reached = accepted = 0.0
        for ratios in texts:
            if depth < len(ratios):
                last = ratios[depth]
                before = np.ones(len(last))
                for part in ratios[:depth]:
                    before *= part[: len(last)]
                reached += float(before.sum())
                accepted += float((before * last).sum())
        found.append(accepted / reached if reached > 0 else None)
    return tuple(found)
