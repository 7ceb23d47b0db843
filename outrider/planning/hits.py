"""How often a draft that looks ahead has worked out what a round comes to.

A correction is guessed by the race that the target runs, over the draft's own q with the noise that
both know (`outrider.speculation.outcome_prediction`). Given the token x that the target wrote, the
arrivals of its race are known in law: the winner's time M is exponential of rate 1 and independent
of who wins, and every other token's comes so much later as a fresh exponential says. So one draw
at each place
of a text tells which guess would have been the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from outrider.errors import check
from outrider.limits import LOOK_AHEAD_MAX
from outrider.speculation.outcome_prediction import RANKS_MAX

Mass = npt.NDArray[np.float64]


def race_rank(
    p: Mass, q: Mass, winner: int, generator: np.random.Generator, refused: int | None = None
) -> int | None:
    """Which guess of the winner of a race over `p` is right, from 0: its place in the race over `q`
    with the same noise, `refused` left out. Both [N] are over the same tokens, of which those that
    are not drafted may be missing: with them p sums to 1. None where it is not drafted."""
    check(p[winner] > 0, "the winner of a race takes part in it")
    if q[winner] <= 0:
        return None
    first = generator.exponential()
    noise = p * first + generator.exponential(size=len(p))
    noise[winner] = p[winner] * first
    with np.errstate(divide="ignore"):
        arrival = np.where(q > 0, noise / q, np.inf)
    earlier = arrival < arrival[winner]
    if refused is not None:
        earlier[refused] = False
    return int(earlier.sum())


class RankShares:
    """How often each guess of a correction was right, by weight."""

    def __init__(self) -> None:
        self._hits = [0.0] * RANKS_MAX
        self._weight = 0.0

    def note(self, rank: int | None, weight: float = 1.0) -> None:
        """A correction that was guess number `rank`, None = none of them."""
        self._weight += weight
        if rank is not None and rank < RANKS_MAX:
            self._hits[rank] += weight

    def shares(self) -> tuple[float, ...]:
        """[RANKS_MAX]; 0 where nothing was noted."""
        return tuple(hit / self._weight if self._weight > 0 else 0.0 for hit in self._hits)


@dataclass(frozen=True, slots=True)
class Guessing:
    """How well corrections are guessed under one rule."""

    recovery: RankShares = field(default_factory=RankShares)
    """After a refusal."""
    bonus: RankShares = field(default_factory=RankShares)
    """Where all draft tokens were accepted."""

    def hit_rates(self, accepted: Sequence[float]) -> tuple[float, ...]:
        """The chance that an outcome is among the 1, 2, ... `LOOK_AHEAD_MAX` likeliest ones, for
        rounds whose draft tokens have these chances [K], each given those before it. What a draft
        tells of a single round from its own q (`FanOut`) is left out."""
        recovery, bonus = self.recovery.shares(), self.bonus.shares()
        reached, chances = 1.0, list[float]()
        for chance in accepted:
            chances += [reached * (1 - chance) * share for share in recovery]
            reached *= chance
        chances += [reached * share for share in bonus]
        return tuple(accumulate(sorted(chances, reverse=True)[:LOOK_AHEAD_MAX]))
