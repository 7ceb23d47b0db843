"""How many threads a step has, and their priority."""

import asyncio
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from outrider.kernels.threads import (
    NICENESS,
    PROBE_STEPS,
    RETREAT_S,
    SHORT_PAUSE_S,
    SHORT_RATIO,
    SHORT_S,
    SHORT_TRIES,
    SLOW_STEPS,
    ContendedThreads,
    ShortSteps,
)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Machine:
    """Two cores. A step takes a stated time for its number of threads, and a step of another kind a
    fifth of it."""

    def __init__(self, one: float, two: float) -> None:
        self.times = {1: one, 2: two}
        self.now = 0.0
        self.threads = ContendedThreads(1, 2, lambda: self.now)

    def run(self, num_steps: int, kind: str = "whole") -> list[int]:
        """The number of threads of each step."""
        found = []
        for _ in range(num_steps):
            with self.threads.step(kind):
                found.append(torch.get_num_threads())
                self.now += self.times[found[-1]] / (1 if kind == "whole" else 5)
        return found


TRIAL = [1, 2] * PROBE_STEPS


def test_fewer_threads_run_while_others_use_the_cores() -> None:
    machine = Machine(one=0.013, two=0.010)
    machine.run(10)
    machine.times = {1: 0.02, 2: 0.2}
    begun = [2] * SLOW_STEPS + TRIAL
    assert machine.run(len(begun) + 50) == begun + [1] * 50
    machine.now += RETREAT_S
    assert machine.run(len(begun) + 5) == begun + [1] * 5
    machine.now += RETREAT_S
    machine.times = {1: 0.013, 2: 0.010}
    assert set(machine.run(20)) == {2}


class Steps:
    """Runs steps of any number of tokens. A step takes a time for each token, and on all threads a
    multiple of it."""

    def __init__(self, token_s: float, all_threads: float) -> None:
        self.token_s, self.all_threads = token_s, all_threads
        self.now = 0.0
        self.short = ShortSteps(lambda: self.now)

    def run(self, num_steps: int, num_tokens: int) -> int:
        """The number of steps that ran on one thread."""
        num_alone = 0
        for _ in range(num_steps):
            alone = self.short.includes(num_tokens)
            seconds = self.token_s * num_tokens * (1 if alone else self.all_threads)
            self.now += seconds
            self.short.note(seconds)
            num_alone += alone
        return num_alone


TRIES = 2 * SHORT_TRIES


@pytest.mark.parametrize(("all_threads", "on_one"), [(1 / SHORT_RATIO, 50), (0.7, 0)])
def test_steps_run_on_one_thread_if_more_threads_hardly_shorten_them(
    all_threads: float, on_one: int
) -> None:
    steps = Steps(1e-3, all_threads)
    assert steps.run(TRIES, 8) == SHORT_TRIES
    assert steps.run(50, 8) == on_one


def test_a_larger_size_is_tried_only_if_a_smaller_one_is_short() -> None:
    steps = Steps(SHORT_S / 1_024, 1.0)
    assert steps.run(5, 512) == 0
    assert steps.run(TRIES + 5, 1) == SHORT_TRIES + 5
    assert steps.run(1, 8) == 1  # Too few steps to decide about this size.
    assert steps.run(TRIES + 5, 512) == SHORT_TRIES + 5
    steps = Steps(SHORT_S / 1_024, 0.5)
    steps.run(TRIES, 1)
    assert steps.run(5, 512) == 0


def test_a_long_step_runs_on_one_thread_only_once_in_a_while() -> None:
    """On all threads, it would not even be faster."""
    steps = Steps(1.0, 1.0)
    assert steps.run(1_000, 1) == 2
    assert steps.run(1_000, 1) == 2


def test_short_steps_are_tried_again() -> None:
    """A late step, which waited for a core, changes nothing."""
    steps = Steps(1e-3, 1.0)
    steps.token_s = 9e-3
    steps.run(1, 1)
    steps.token_s = 1e-3
    steps.run(TRIES - 1, 1)
    assert steps.run(100, 1) == 100
    steps.all_threads = 0.5
    assert steps.run(10, 1) == 10
    steps.now += SHORT_PAUSE_S
    assert steps.run(TRIES + 10, 1) == SHORT_TRIES


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_helpers_of_a_step_are_nicer_than_its_own_thread() -> None:
    """The test has a process of its own, since the threads of a numeric library stay."""
    code = (
        "import os, threading, torch; torch.set_num_threads(3)\n"
        "from outrider.replica.drivers import ThreadDriver\n"
        "from outrider.kernels.threads import start_workers\n"
        "found = []\n"
        "driver = ThreadDriver('step', lambda: 0.0)\n"
        "driver.call(lambda: found.extend(start_workers()))\n"
        "own = driver.call(lambda: os.getpriority(os.PRIO_PROCESS, 0))\n"
        "print(own, *[os.getpriority(os.PRIO_PROCESS, t) for t in found])\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert output.decode().split() == [str(own), str(own + NICENESS), str(own + NICENESS)]
