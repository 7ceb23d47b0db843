"""How many threads a step has, and their priority."""

import asyncio
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from outrider.kernels.threads import NICENESS, PROBE_STEPS, RETREAT_S, SLOW_STEPS, ContendedThreads


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
