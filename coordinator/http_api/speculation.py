"""What speculation did for a request, under the names that vLLM's answers have for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from outrider.request import Metrics, RoundReport


class SpeculationReport:
    """Adds up the sessions of one request.

    A step is a round; one without a proposal accepts nothing. So `mean_acceptance_length` is the
    tokens that a round brought, on average, before an answer's end cut it short."""

    def __init__(self, num_draft_tokens: int) -> None:
        """The most that a round may propose."""
        self._num_draft_tokens = num_draft_tokens
        self._num_rounds = self._num_proposed = self._num_accepted = 0
        self._rounds: Counter[tuple[int, int]] = Counter()
        """By tokens proposed and accepted."""

    def add_round(self, report: RoundReport) -> None:
        """One round, where rounds are told."""
        self._rounds[len(report.proposed_token_ids), report.num_accepted] += 1

    def add_session(self, metrics: Metrics) -> None:
        """One session that has ended."""
        self._num_rounds += metrics.num_rounds
        self._num_proposed += metrics.num_draft_tokens
        self._num_accepted += metrics.num_accepted_draft_tokens

    def told(self, *, histograms: bool) -> dict[str, Any]:
        """The report; of `histograms` the second is by the tokens that were proposed."""
        accepted, proposed = self._num_accepted, self._num_proposed
        told: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / max(1, self._num_rounds),
            "draft_acceptance_rate": accepted / proposed if proposed else 0.0,
            "num_spec_steps": self._num_rounds,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": proposed,
            "num_spec_tokens": self._num_draft_tokens,
        }
        if histograms:
            told["acceptance_histogram"] = self._histogram(self._num_draft_tokens, None)
            told["acceptance_histogram_by_draft_length"] = {
                str(length): self._histogram(length, length)
                for length in sorted({length for length, _ in self._rounds})
            }
        return told

    def _histogram(self, most: int, length: int | None) -> list[int]:
        """Rounds (that proposed so many tokens) by the tokens that they accepted: 0..`most`."""
        counts = [0] * (most + 1)
        for (proposed, accepted), count in self._rounds.items():
            if length in (None, proposed):
                counts[accepted] += count
        return counts
