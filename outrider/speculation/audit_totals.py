"""The sums of `audit.py`. Coordinators import this module, so it must not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditSums:
    """Sums over the tokens of one or more sessions."""

    num_tokens: int = 0
    num_impossible: int = 0
    """Tokens with p = 0. Surprise, entropy and variance leave these tokens out."""
    num_unlikely: int = 0
    """Greedy tokens that are clearly less likely than the likeliest token."""
    num_near_ties: int = 0
    """Greedy tokens that are only slightly less likely than the likeliest (`audit.NEAR_TIE`)."""
    surprise: float = 0.0  # sum of -log p(x), in nats, without greedy tokens
    entropy: float = 0.0  # expected value of `surprise`
    variance: float = 0.0
    """Variance of `surprise`, in nats squared."""
