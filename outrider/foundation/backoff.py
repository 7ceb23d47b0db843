"""Growing waits between retries, with jitter."""

from collections.abc import Callable

_DOUBLINGS_MAX = 32


def backoff(first: float, longest: float, attempt: int, random: Callable[[], float]) -> float:
    """Returns the wait before retry number `attempt`, counted from 0. The wait is uniform in
    [w/2, w), with w = min(longest, first * 2^attempt). `random` returns numbers in [0, 1). Source:
    "equal jitter", M. Brooker, Exponential Backoff And Jitter, 2015."""
    whole = min(longest, first * 2.0 ** min(attempt, _DOUBLINGS_MAX))
    return whole * (1 + random()) / 2
