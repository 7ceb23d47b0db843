"""What a toy pair (`outrider.engine.emulated`) accepts, told from its law without running it.

After every prefix p is the same Zipf law on other ids, and log q - log p is fresh Gaussian noise.
So acceptance is the same at every position of a draft and independent of the positions before, and
K draft tokens bring 1 + a + ... + a^K tokens a round. What has no closed form is a mean over
`NUM_PREFIXES` prefixes, always the same ones.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.errors import check
from outrider.speculation.sampling_params import Rule

NUM_PREFIXES: Final = 8_192
"""A prefix's overlap has a standard deviation of 0.1 about 0.8, so its mean has one of 0.001."""
SAMPLE_SEED: Final = 0
"""Of the prefixes' noise."""
DEVIATION_MAX: Final = 8.0
DEVIATION_DIGITS: Final = 4
"""Decimals of a solved deviation: it is to be printed as it is used."""
_HALVINGS: Final = 24

Laws: TypeAlias = npt.NDArray[np.float64]


class PairLaw:
    """The laws of a toy pair for any deviation of its draft."""

    def __init__(self, support: int, exponent: float) -> None:
        """Of `EmulatedSpec`."""
        self._log_p = -exponent * np.log(np.arange(1, support + 1, dtype=np.float64))
        self._log_p -= np.log(np.exp(self._log_p).sum())
        generator = np.random.default_rng(SAMPLE_SEED)
        self._gaussians = generator.standard_normal((NUM_PREFIXES, support))

    @property
    def entropy(self) -> float:
        """Of p, nats."""
        return float(-(np.exp(self._log_p) * self._log_p).sum())

    def acceptance(self, deviation: float, rule: Rule) -> float:
        """The chance that a draft token is accepted whose predecessors were, under token or
        coupled."""
        if rule is Rule.COUPLED:
            return self._matched(deviation)
        check(rule is Rule.TOKEN, f"rule {rule.value} accepts otherwise")
        return self._overlap(deviation)

    def solve_deviation(self, acceptance: float) -> float:
        """The deviation at which E[sum min(p, q)] is `acceptance`, which falls as it grows."""
        low, high = 0.0, DEVIATION_MAX
        check(
            self._overlap(high) < acceptance <= 1.0,
            f"no deviation of 0..{high:g} gives an acceptance of {acceptance:g}",
        )
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._overlap(middle) < acceptance:
                high = middle
            else:
                low = middle
        return round((low + high) / 2, DEVIATION_DIGITS)

    def _draft(self, deviation: float) -> Laws:
        """q after each prefix, [NUM_PREFIXES, support]."""
        weights = np.exp(self._log_p + deviation * self._gaussians)
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    def _overlap(self, deviation: float) -> float:
        """E[sum min(p, q)]."""
        return float(np.minimum(np.exp(self._log_p), self._draft(deviation)).sum(axis=1).mean())

    def _matched(self, deviation: float) -> float:
        """E[P(argmax(log q + g) = argmax(log p + g))] for Gumbel noise g: the sum over tokens i of
        1 / sum_j max(p_j / p_i, q_j / q_i)."""
        p, q = np.exp(self._log_p), self._draft(deviation)
        matched = np.zeros(NUM_PREFIXES)
        for index, own in enumerate(p):
            matched += 1.0 / np.maximum(p / own, q / q[:, index : index + 1]).sum(axis=1)
        return float(matched.mean())


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens that a round of K draft tokens commits, K = 0 included, where each is accepted with
    this chance if those before it were."""
    return sum(acceptance**depth for depth in range(num_draft_tokens + 1))
