"""Estimates acceptance from texts that the target wrote, without running rounds."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NUM_DEPTHS = 8


def conditional_acceptance(texts: Sequence[Sequence[float]]) -> tuple[float | None, ...]:
    """For draft tokens 1..`NUM_DEPTHS`, the probability that each is accepted, given that all draft
    tokens before it are accepted. None = unknown. `texts` has the ratio min(1, q(x) / p(x)) of each
    token x of texts that the target drew. The mean ratio is the probability of acceptance.

    A *window* is k consecutive tokens of a text, with the ratios r_1, ..., r_k. E is the mean over
    all windows. Then E[r_1 ... r_k] is the probability that k tokens in a row are accepted. The
    result for draft token k is E[r_1 ... r_k] / E[r_1 ... r_(k-1)]."""
    values = [np.asarray(ratios, dtype=np.float64) for ratios in texts]
    windows = [[ratios[depth:] for depth in range(NUM_DEPTHS)] for ratios in values]
    return acceptance_of_windows(windows, NUM_DEPTHS)


def acceptance_of_windows(
    texts: Sequence[Sequence[npt.NDArray[np.float64]]], num_depths: int
) -> tuple[float | None, ...]:
    """Like `conditional_acceptance`, but a token's ratio may differ between windows.
    `texts[t][k][w]` is the ratio of draft token k + 1 in window w of text t. Windows that the end
    of the text cuts short come last. `texts[t]` may have fewer than `num_depths` elements."""
    acceptance: list[float | None] = []
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
        acceptance.append(accepted / reached if reached > 0 else None)
    return tuple(acceptance)
