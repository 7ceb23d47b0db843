"""What a simulation came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.registry.registry import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFigures:
    """The replicas of one role."""

    replicas: int
    busy: float
    """Share of the time that they were in a step, mean ..."""
    busiest: float
    """... and of the one that most was."""
    sessions_per_step: float
    """Mean; 0 without a step."""
    sessions_least: int
    """That one of them had in the end ..."""
    sessions_most: int
    """... and that another had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFigures:
    """What the loss of a replica cost."""

    role: Role
    at_s: float
    back_s: float | None
    """None = it stays away."""
    tokens_per_second_before: float | None
    """None where that is no whole second ..."""
    tokens_per_second_after: float | None
    """... and from the end of the pause on, while it is away."""
    tokens_in_worst_second: float
    num_paused: int
    """Sessions that had no token between the loss and their move, and then had one ..."""
    pause_ms_p50: float
    """... and what lay between their tokens before and after it."""
    pause_ms_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """What was measured. Times of requests are None where none of them was."""

    tokens_per_second: float
    rounds_per_second: float
    tokens_per_round: float
    sessions: float
    """At a time, mean."""
    num_requests: int
    """That ended."""
    num_refused: int
    """Requests that found no coordinator with room."""
    tpot_ms_p50: float | None
    """Time per token: half of the tokens are of requests that took no longer for one ..."""
    tpot_ms_p99: float | None
    ttft_ms_p50: float | None
    """Time to the first token."""
    ttft_ms_p99: float | None
    draft_ms: float
    """What a round with a draft waited for its proposal, mean ..."""
    draft_share: float
    """... as a share of the time of all rounds."""
    rounds_queued: float
    """Share of these rounds whose draft had others to serve when they came."""
    hit_rate: float
    """Share of these rounds whose proposal was there before they began."""
    targets: RoleFigures
    drafts: RoleFigures
    coordinators: RoleFigures
    tokens_by_second: tuple[int, ...]
    losses: tuple[LossFigures, ...]


def weighted_percentile(weights: Mapping[float, float], share: float) -> float | None:
    """The least value that so large a share of the weight does not exceed; None without any."""
    total = sum(weights.values())
    if total <= 0:
        return None
    passed, value = 0.0, 0.0
    for value in sorted(weights):
        passed += weights[value]
        if passed >= share * total * (1 - 1e-12):
            break
    return value


def rate_between(by_second: Sequence[int], start_s: float, end_s: float) -> float | None:
    """Events a second over the whole seconds between these times; None where there is none."""
    first, last = math.ceil(start_s), math.floor(min(end_s, len(by_second)))
    return sum(by_second[first:last]) / (last - first) if last > first else None
