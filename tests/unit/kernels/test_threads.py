"""How many threads a step has, and their priority."""

import asyncio
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from outrider.kernels.threads import (
    NICENESS,
    PROBE_STEPS,
    RETREAT_S,
    SHORT_GAIN_S,
    SHORT_HELD_MAX,
    SHORT_S,
    SLOW_STEPS,
    ContendedThreads,
    OwnCores,
    StepThreads,
    find_short_tokens,
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


class Engine:
    """Steps take a time for each token. On two threads, they take a share of it."""

    def __init__(self, token_s: float, two: float, late: Sequence[float] = (0.0,)) -> None:
        self.token_s, self.two, self._late = token_s, two, cycle(late)
        self.now = 0.0
        self.alone: list[int] = []
        """Sizes of the steps that ran on one thread."""

    def run(self, num_tokens: int) -> None:
        self.now += self.token_s * num_tokens * (self.two if torch.get_num_threads() == 2 else 1)
        self.now += next(self._late)
        if torch.get_num_threads() == 1:
            self.alone.append(num_tokens)

    def short(self) -> int:
        torch.set_num_threads(2)
        short = find_short_tokens((1, 2, 4, 8, 16), self.run, lambda: self.now)
        assert torch.get_num_threads() == 2
        return short


def test_steps_are_short_while_more_threads_save_little() -> None:
    assert Engine(SHORT_GAIN_S / 5, two=0.5).short() == 8
    assert Engine(SHORT_GAIN_S / 3, two=0.5).short() == 4


def test_steps_are_short_up_to_a_time() -> None:
    assert Engine(SHORT_S / 5, two=1.0).short() == 4
    assert Engine(SHORT_S * 2, two=1.0).short() == 0


def test_late_steps_change_nothing() -> None:
    """They waited for a core. On two threads nearly all do."""
    assert Engine(SHORT_S / 20, 1.0, (0.0, 0.0, 0.012, 0.012)).short() == 16


def test_no_long_step_is_tried_on_one_thread() -> None:
    engine = Engine(1.0, two=1.0)
    assert engine.short() == 0
    assert not engine.alone


def test_a_step_that_is_long_on_one_thread_is_tried_once() -> None:
    engine = Engine(0.1, two=0.1)
    assert engine.short() == 0
    assert engine.alone == [1]


def test_a_step_with_long_contexts_is_not_short() -> None:
    torch.set_num_threads(2)
    threads = StepThreads(1)
    threads.use_fewer(8)
    for num_tokens, num_held, expected in (
        (8, SHORT_HELD_MAX, 1),
        (9, SHORT_HELD_MAX, 2),
        (8, SHORT_HELD_MAX + 1, 2),
    ):
        with threads.step(num_tokens, num_held, whole=True):
            assert torch.get_num_threads() == expected


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


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores on Linux"
)
async def test_a_step_on_all_cores_keeps_each_thread_on_its_core() -> None:
    """On fewer threads, all may move. The test has a process of its own, because its threads stay
    where they are."""
    code = (
        "import os, torch\n"
        "cores = os.sched_getaffinity(0)\n"
        "torch.set_num_threads(len(cores))\n"
        "from outrider.replica.drivers import ThreadDriver\n"
        "from outrider.kernels.threads import StepThreads, start_workers\n"
        "driver, workers = ThreadDriver('step', lambda: 0.0), []\n"
        "threads = StepThreads(1, own_cores=True)\n"
        "threads.use_fewer(1)\n"
        "def step(num_tokens):\n"
        "    with threads.step(num_tokens, 1, whole=True):\n"
        "        return [os.sched_getaffinity(thread) for thread in (0, *workers)]\n"
        "assert step(99) == [cores]  # This is not the thread of a replica's steps.\n"
        "driver.call(lambda: workers.extend(start_workers()))\n"
        "bound = driver.call(lambda: step(99))\n"
        "assert sorted(map(tuple, bound)) == [(core,) for core in sorted(cores)], bound\n"
        "assert driver.call(lambda: step(1)) == [cores] * len(bound)\n"
        "assert driver.call(lambda: step(99)) == bound\n"
        "assert os.sched_getaffinity(os.getpid()) == cores\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


class Kernel:
    """The cores of each thread; 0 is the caller, and 11, 12, ... are its workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_cores: int) -> None:
        self.all = set(range(num_cores))
        self.cores = {0: self.all} | {10 + number: self.all for number in range(1, num_cores)}
        self.refuses = -1  # this thread keeps its cores
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr("os.sched_getaffinity", lambda _: self.all, raising=False)
        monkeypatch.setattr("os.sched_setaffinity", self.set, raising=False)
        monkeypatch.setattr("outrider.kernels.threads._thread_ids", lambda: {1, *self.cores})
        monkeypatch.setattr(
            "outrider.kernels.threads._started", SimpleNamespace(workers=(*self.cores,)[1:])
        )

    def set(self, thread: int, cores: Iterable[int]) -> None:
        if thread == self.refuses:
            raise PermissionError("not this thread")
        self.cores[thread] = set(cores)

    @property
    def is_bound(self) -> bool:
        return sorted(map(tuple, self.cores.values())) == [(core,) for core in sorted(self.all)]

    @property
    def is_free(self) -> bool:
        return all(cores == self.all for cores in self.cores.values())


def test_threads_move_when_a_step_leaves_a_core_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A team of two of three threads can avoid any core. Its third thread ends, and is started
    anew later."""
    kernel = Kernel(monkeypatch, 3)
    cores = OwnCores(3)
    cores.use(3)
    assert kernel.is_bound
    cores.use(2)
    assert kernel.is_free
    del kernel.cores[12]
    cores.use(3)
    assert kernel.is_free  # A thread is missing.
    cores.use(1)
    kernel.cores[13] = kernel.all
    monkeypatch.setattr("outrider.kernels.threads._started", SimpleNamespace(workers=(11, 12, 13)))
    cores.use(3)
    assert kernel.is_bound


@pytest.mark.parametrize("own_cores", [True, False])
def test_threads_may_have_own_cores_where_all_steps_run_on_all(
    own_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch, 3)
    torch.set_num_threads(3)
    threads = StepThreads(None, own_cores=own_cores)
    threads.use_all()
    assert (kernel.is_bound, kernel.is_free) == (own_cores, not own_cores)


def test_all_threads_move_if_one_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 3)
    kernel.refuses = 12
    cores = OwnCores(3)
    cores.use(3)
    assert kernel.is_free
    kernel.refuses = -1
    cores.use(1)
    cores.use(3)
    assert kernel.is_free


def test_threads_of_a_part_of_the_cores_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 3)
    OwnCores(2).use(2)
    assert kernel.is_free
