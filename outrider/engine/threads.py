"""The number and the priority of the threads on which torch runs operators."""

import logging
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch


@contextmanager
def on_threads(num: int) -> Iterator[None]:
    """In this context torch uses `num` threads. Changing the number takes less than 1 us."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NICENESS = 5
"""This number is added to the niceness of a step's worker threads. If a step has a thread on every
core, an incoming message waits until the operating system preempts one of these threads. Threads
with a higher niceness are preempted earlier. On two cores, the value 5 shortened the time from the
sending of a message to its queuing from 4.7 to 3.7 ms (99th percentile), and did not slow down
steps. The thread that calls the engine keeps its priority, so that results are sent at once."""
_log = logging.getLogger(__name__)
_THREADS = Path("/proc/self/task")
_ELEMENTS = 2**20
"""If a tensor has this many elements, torch uses all threads for an operator on the tensor."""


def start_workers() -> list[int]:
    """Starts torch's worker threads for the calling thread, and lowers their priority. Returns the
    workers' ids. Does nothing on systems other than Linux, because their threads have no priority
    of their own."""
    if sys.platform != "linux" or not _THREADS.is_dir():
        return []
    before = _thread_ids()
    torch.zeros(_ELEMENTS).add_(1.0)
    workers = sorted(_thread_ids() - before)
    try:
        for worker in workers:
            os.setpriority(os.PRIO_PROCESS, worker, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    except OSError as error:
        _log.info("the worker threads keep their priority: %r", error)
    return workers


def _thread_ids() -> set[int]:
    return {int(entry.name) for entry in _THREADS.iterdir()}


SLOW = 3.0
"""A step is slow if it takes this many times its usual time."""
SLOW_STEPS = 2
"""This many slow steps in a row start a trial."""
TRIAL_STEPS = 3
"""A trial alternates between fewer and all threads, with this many steps of each."""
GAIN = 2.0
"""If the trial's steps are at least this many times as fast with fewer threads, steps run on fewer
threads for `RETREAT_S` seconds."""
RETREAT_S = 30.0
_WEIGHT = 1 / 16
"""The weight of the newest step in the average time of steps."""


class ContendedThreads:
    """Chooses whether a step runs on all threads or on fewer threads. Fewer threads are faster only
    while other processes use the cores. Only times of steps of the same kind are compared."""

    def __init__(
        self, fewer: int, every: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._fewer, self._every, self._clock = fewer, every, clock
        self._usual_s: dict[Hashable, float] = {}
        """Maps each kind of step to the exponential moving average of the step's time with all
        threads."""
        self._num_slow = 0
        self._until = 0.0
        self._begin_trial(None)

    def _begin_trial(self, kind: Hashable) -> None:
        self._trial = kind
        """The kind of the trial's steps. None = no trial runs."""
        self._times: dict[int, list[float]] = {self._fewer: [], self._every: []}
        """The times of the trial's steps, by number of threads."""

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Sets the number of threads for a step that runs in this context. Steps of one kind take
        similar times. Steps of kind None always run on all threads."""
        start, num_threads = self._clock(), self._every
        retreats = start < self._until
        num_fewer, num_every = map(len, self._times.values())
        is_tried = kind == self._trial and num_fewer <= num_every
        if kind is not None and (retreats or is_tried):
            num_threads = self._fewer
        is_more = num_threads > torch.get_num_threads()
        torch.set_num_threads(num_threads)
        if is_more:
            start_workers()
        yield
        if kind is not None and not retreats:
            self._note(kind, num_threads, self._clock() - start)

    def _note(self, kind: Hashable, num_threads: int, seconds: float) -> None:
        if kind == self._trial:
            self._times[num_threads].append(seconds)
            if len(self._times[self._every]) == TRIAL_STEPS:
                self._decide()
            return
        usual_s = self._usual_s.setdefault(kind, seconds)
        if seconds <= SLOW * usual_s:
            self._num_slow = 0
            self._usual_s[kind] = usual_s + (seconds - usual_s) * _WEIGHT
            return
        self._num_slow += 1
        if self._num_slow >= SLOW_STEPS:
            self._num_slow = 0
            self._begin_trial(kind)

    def _decide(self) -> None:
        fewer_s, all_s = map(median, self._times.values())
        if all_s >= GAIN * fewer_s:
            self._until = self._clock() + RETREAT_S
            _log.info(
                "other processes use the cores: short steps take %.0f ms on %d threads and %.0f ms "
                "on %d. Short steps run on %d threads for the next %g s",
                all_s * 1e3, self._every, fewer_s * 1e3, self._fewer, self._fewer, RETREAT_S,
            )  # fmt: skip
        else:
            self._usual_s[self._trial] = all_s
        self._begin_trial(None)
