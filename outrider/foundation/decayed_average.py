"""Exponentially decayed sums of amounts that are added at irregular times."""

import math
from collections.abc import Mapping


class DecayedSums:
    """Named sums. An added amount decays to 1/e of its value after `seconds`."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._since = self._at = now
        self._sums: dict[str, float] = {}
        self._added_at: dict[str, float] = {}

    def add(self, now: float, amounts: Mapping[str, float]) -> None:
        """Adds each amount to the sum of the same name. `now`, in seconds, must never decrease."""
        if now - self._at > self._seconds:
            self._fade(now)
        # `_sums` holds the sums as of the time `_at`. Scaling the new amounts up is faster than
        # decaying all sums to `now`.
        weight = math.exp((now - self._at) / self._seconds)
        for name, amount in amounts.items():
            if amount:
                self._sums[name] = self._sums.get(name, 0.0) + weight * amount
                self._added_at[name] = now

    def mean(self, now: float, name: str, of: str) -> float | None:
        """Sum `name` divided by sum `of`; None if nothing was added to `of` for `seconds`."""
        if now - self._added_at.get(of, -math.inf) > self._seconds:
            return None
        self._fade(now)
        whole = self._sums.get(of, 0.0)
        return self._sums.get(name, 0.0) / whole if whole > _NOTHING else None

    def rate(self, now: float, name: str) -> float:
        """Returns the average amount of `name` per second, in which recent seconds weigh more. It
        is s / (T * (1 - exp(-t / T))): s = decayed sum, T = `seconds`, t = time since the start."""
        self._fade(now)
        lasted = self._seconds * -math.expm1(-(now - self._since) / self._seconds)
        return self._sums.get(name, 0.0) / lasted if lasted > _NOTHING else 0.0

    def _fade(self, now: float) -> None:
        if now <= self._at:
            return
        kept = math.exp(-(now - self._at) / self._seconds)
        self._at = now
        for name in self._sums:
            self._sums[name] *= kept


_NOTHING = 1e-3
