"""The executor's thread."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_an_emulated_step_takes_its_stated_time_with_its_own_work() -> None:
    executor = ThreadExecutor("test-step", lambda: 0.2)
    try:
        start = time.perf_counter()
        asyncio.run(executor.run(lambda: time.sleep(0.15)))
        assert 0.2 <= time.perf_counter() - start < 0.3
    finally:
        executor.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has timer slack")
def test_only_emulated_steps_ask_for_exact_sleeps() -> None:
    def slack() -> str:
        return Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text().strip()

    for is_timed in (True, False):
        executor = ThreadExecutor("test-step", lambda: 0.0, is_timed=is_timed)
        try:
            assert (executor.call(slack) == "1") == is_timed
        finally:
            executor.close()


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
