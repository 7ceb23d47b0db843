"""What an audit comes to; `audit.py` says what it is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditSums:
    """Over tokens of one session, or of many."""

    num_tokens: int = 0
    num_impossible: int = 0
    """Of them those with p = 0, which are not in the sums below."""
    num_unlikely: int = 0
    """Greedy ones that are not the likeliest token, and no near tie of it ..."""
    num_near_ties: int = 0
    """... and those that are one."""
    surprise: float = 0.0
    """Sum of -log p(x), nats ..."""
    entropy: float = 0.0
    """... and of what it is expected to be; both 0 of greedy tokens."""
    variance: float = 0.0
    """Sum of the variances of -log p(x) under p, nats squared."""
