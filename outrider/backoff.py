"""Growing waits between retries, with jitter."""

from collections.abc import Callable

_DOUBLINGS_MAX = 32


def backoff(first: float, longest: float, attempt: int, random: Callable[[], float]) -> float:
    """Between half and all of a time that doubles with each attempt (the first is 0) up to
    `longest`, so that callers that failed together retry apart ("equal jitter", M. Brooker,
    Exponential Backoff And Jitter, 2015). `random` returns numbers in [0, 1)."""
    whole = min(longest, first * 2.0 ** min(attempt, _DOUBLINGS_MAX))
    return whole * (1 + random()) / 2
