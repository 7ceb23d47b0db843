"""How long to wait between tries: longer and longer, and never in step with others."""

from __future__ import annotations

from collections.abc import Callable

_DOUBLINGS_MAX = 32


def spread(wait: float, over: float, random: Callable[[], float]) -> float:
    """A wait after which many would try at the same moment: between it and `over` more. `random`
    gives numbers in [0, 1)."""
    return wait + over * random()


def backoff(first: float, longest: float, attempt: int, random: Callable[[], float]) -> float:
    """Between half and all of a time that doubles with each attempt (the first is 0) up to a
    longest one: those whose tries failed together try again apart ("equal jitter", M. Brooker,
    Exponential Backoff And Jitter, 2015). `random` gives numbers in [0, 1)."""
    whole = min(longest, first * 2.0 ** min(attempt, _DOUBLINGS_MAX))
    return whole * (1 + random()) / 2
