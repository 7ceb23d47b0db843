"""What audits of a coordinator's sessions have come to, as counters.

From what they grow by in a time, follow the mean drift of a token, and a z value for the whole:
(surprise - entropy) / tokens, and (surprise - entropy) / sqrt(variance).
"""

from __future__ import annotations

from typing import get_args

from opentelemetry.metrics import Meter

from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.sampling_params import Rule
from outrider.telemetry.instruments import Counts
from outrider.telemetry.observer import AuditOutcome


class AuditMeters:
    """All but outcomes by rule."""

    def __init__(self, meter: Meter) -> None:
        rules = [rule.value for rule in Rule]
        self.outcomes = Counts(
            meter, "audits", "", "Sessions chosen for an audit, by what came of it.", "outcome",
            get_args(AuditOutcome),
        )  # fmt: skip
        self._tokens = Counts(meter, "audit_tokens", "", "Tokens audited.", "rule", rules)
        self._impossible = Counts(
            meter, "audit_impossible_tokens", "",
            "Of them those that the target gives no probability.", "rule", rules,
        )  # fmt: skip
        self._unlikely = Counts(
            meter, "audit_unlikely_tokens", "",
            "Greedy ones that are neither the likeliest token nor a near tie of it.", "rule",
            [Rule.GREEDY.value],
        )  # fmt: skip
        self._near_ties = Counts(
            meter, "audit_near_ties", "", "Greedy ones that are such a near tie.", "rule",
            [Rule.GREEDY.value],
        )  # fmt: skip
        self._surprise = Counts(
            meter, "audit_surprise_nats", "", "Sum of -log p of tokens that were drawn.", "rule",
            rules,
        )  # fmt: skip
        self._entropy = Counts(
            meter, "audit_entropy_nats", "", "What that sum is expected to be.", "rule", rules
        )
        self._variance = Counts(
            meter, "audit_variance_nats2", "", "Variance of that sum.", "rule", rules
        )

    def add(self, rule: str, sums: AuditSums) -> None:
        """Tokens of a session have been audited."""
        self._tokens.add(sums.num_tokens, rule)
        self._impossible.add(sums.num_impossible, rule)
        if rule == Rule.GREEDY.value:
            self._unlikely.add(sums.num_unlikely, rule)
            self._near_ties.add(sums.num_near_ties, rule)
        self._surprise.add(sums.surprise, rule)
        self._entropy.add(sums.entropy, rule)
        self._variance.add(sums.variance, rule)
