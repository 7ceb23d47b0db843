"""The executor's thread."""

import asyncio
import time
from collections.abc import Callable

from outrider.replica.executors import ThreadExecutor

DEPTHS = range(300)  # more calls than fit into two of CPython's chunks of frames


def test_calls_cost_the_same_at_every_depth() -> None:
    executor = ThreadExecutor("test-step", lambda: 0.0)
    try:
        costs_s = asyncio.run(
            executor.run(lambda: [_at_depth(depth, _quickest_calls) for depth in DEPTHS])
        )
    finally:
        executor.close()
    assert max(costs_s) < 20 * sorted(costs_s)[len(costs_s) // 2]


def _at_depth(depth: int, task: Callable[[], float]) -> float:
    return task() if depth == 0 else _at_depth(depth - 1, task)


def _quickest_calls() -> float:
    """Time of 300 calls, in seconds: the shortest of several measurements."""
    times_s: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(300):
            _leaf(1, 2, 3)
        times_s.append(time.perf_counter() - start)
    return min(times_s)


def _leaf(first: int, second: int, third: int) -> int:
    return first + second + third
