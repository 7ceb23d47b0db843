"""What a coordinator's rounds have lately come to, for whoever scales its deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from coordinator.routing.drafts import Drafted
from outrider.decayed_average import DecayedSums
from outrider.registry.registry import WINDOW_S, Figures

WAITED: Final = 1.0
"""A proposal waited for its turn if it did longer than computing it took: longer than for a step
that had begun when it was asked for."""


class RoundMeter:
    """Hears of every round."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` counts seconds; None = the running loop's."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._sums: DecayedSums | None = None

    def decided(self, drafted: Drafted, num_accepted: int, num_tokens: int) -> None:
        """A round has brought so many tokens, of which so many had been drafted."""
        now = self._clock()
        if self._sums is None:
            self._sums = DecayedSums(WINDOW_S, now)
        amounts: dict[str, float] = {"tokens": num_tokens}
        if drafted.by_replica:
            amounts |= {"drafted": len(drafted.proposal), "accepted": num_accepted}
        if drafted.is_remote:
            waited = not drafted.ahead and drafted.queue_ms > WAITED * drafted.compute_ms
            amounts |= {
                "proposals": 1.0, "waited": float(waited), "ahead": float(drafted.ahead)
            }  # fmt: skip
        self._sums.add(now, amounts)

    @property
    def figures(self) -> Figures:
        """What that comes to."""
        sums, now = self._sums, self._clock()
        if sums is None:
            return Figures(tokens_per_second=0.0)
        return Figures(
            draft_waits=sums.mean(now, "waited", "proposals"),
            acceptance=sums.mean(now, "accepted", "drafted"),
            look_ahead_hits=sums.mean(now, "ahead", "proposals"),
            tokens_per_second=sums.rate(now, "tokens"),
        )
