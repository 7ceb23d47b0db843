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
    """In this context torch uses `num` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NICENESS = 5
"""Added to the niceness of a step's worker threads, so that the operating system preempts them
earlier for an incoming message. On two cores, the time from sending a message to queueing it fell
from 4.7 to 3.7 ms (99th percentile), and steps were not slower. The thread that calls the engine
keeps its priority, so that results are sent at once."""
_log = logging.getLogger(__name__)
_THREADS = Path("/proc/self/task")
_ELEMENTS = 2**20  # torch uses all threads for an operator on a tensor of this size


def start_workers() -> list[int]:
    """Starts torch's worker threads for the calling thread, lowers their priority, and returns
    their ids. Works only on Linux, where each thread has a priority. Elsewhere does nothing."""
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


SLOW = 3.0  # a step is slow if it takes this many times its usual time
SLOW_STEPS = 2  # this many slow steps in a row start a probe
PROBE_STEPS = 3  # a probe has this many steps on fewer threads, and as many on all, alternately
GAIN = 2.0
"""If fewer threads make a probe's steps at least this many times as fast, steps run on fewer
threads for the next `RETREAT_S` seconds."""
RETREAT_S = 30.0
_WEIGHT = 1 / 16  # the weight of the newest time in the moving average of times


class ContendedThreads:
    """Chooses whether a step runs on all threads or on fewer threads. Fewer threads are faster only
    while other processes use the cores. Only times of steps of the same kind are compared."""

    def __init__(
        self, fewer: int, every: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._fewer, self._every, self._clock = fewer, every, clock
        self._usual_s: dict[Hashable, float] = {}
        """The usual time on all threads, a moving average, for each kind of step."""
        self._num_slow = 0
        self._until = 0.0
        self._probed: Hashable = None  # the kind of the probe's steps; None = no probe runs
        self._times: list[float] = []  # of a probe's steps: on fewer threads, on all, on fewer, ...

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Sets the number of threads for a step. Steps of one kind take similar times. Steps of
        kind None always run on all threads."""
        start, num_threads = self._clock(), self._every
        retreats, is_tried = start < self._until, kind == self._probed
        if kind is not None and (retreats or (is_tried and len(self._times) % 2 == 0)):
            num_threads = self._fewer
        is_more = num_threads > torch.get_num_threads()
        torch.set_num_threads(num_threads)
        if is_more:
            start_workers()
        yield
        if kind is None or retreats:
            return
        seconds = self._clock() - start
        if not is_tried:
            self._note(kind, seconds)
            return
        self._times.append(seconds)
        if len(self._times) == 2 * PROBE_STEPS:
            self._decide(median(self._times[::2]), median(self._times[1::2]))

    def _note(self, kind: Hashable, seconds: float) -> None:
        usual_s = self._usual_s.setdefault(kind, seconds)
        if seconds <= SLOW * usual_s:
            self._num_slow = 0
            self._usual_s[kind] = usual_s + (seconds - usual_s) * _WEIGHT
            return
        self._num_slow += 1
        if self._num_slow >= SLOW_STEPS:
            self._num_slow, self._probed, self._times = 0, kind, []

    def _decide(self, fewer_s: float, all_s: float) -> None:
        if all_s >= GAIN * fewer_s:
            self._until = self._clock() + RETREAT_S
            _log.info(
                "other processes use the cores: short steps take %.0f ms on %d threads and %.0f ms "
                "on %d. Short steps run on %d threads for the next %g s",
                all_s * 1e3,
                self._every,
                fewer_s * 1e3,
                self._fewer,
                self._fewer,
                RETREAT_S,
            )
        else:
            self._usual_s[self._probed] = all_s
        self._probed = None
