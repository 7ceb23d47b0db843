"""The threads that torch runs an operator on: how many, and at which priority."""

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
    """Within the block torch uses `num` threads. Takes less than 1 us."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NICENESS = 5
"""Added to the niceness of a step's worker threads. When a step has a thread on every core, an
incoming message waits until the kernel preempts one of them. Measured on two cores (99th
percentile, medians of runs): from sending to the queue 3.7 ms instead of 4.7, from verdict to
receiver 2.6 instead of 4.4, with steps as fast as before. The step's own thread keeps its priority,
so that its results are sent at once."""
_log = logging.getLogger(__name__)
_THREADS = Path("/proc/self/task")
_ELEMENTS = 2**20
"""Large enough for torch to use all threads."""


def start_workers() -> list[int]:
    """Starts the calling thread's worker threads and lowers their priority; returns their ids. Does
    nothing except on Linux, as elsewhere threads have no priority of their own."""
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
"""Slow steps in a row that start a trial."""
TRIAL_STEPS = 3
"""Steps of a trial with fewer threads, and as many, alternating, with all threads."""
GAIN = 2.0
"""Fewer threads are kept if they are this many times as fast ..."""
RETREAT_S = 30.0
"""... for this long."""
_WEIGHT = 1 / 16
"""Weight of the newest step in the average."""


class ContendedThreads:
    """Chooses between all threads and fewer. All are faster unless other processes use the cores.
    Steps are only compared with others of their kind. `clock` counts seconds."""

    def __init__(
        self, fewer: int, every: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._fewer, self._every, self._clock = fewer, every, clock
        self._usual_s: dict[Hashable, float] = {}
        """Decayed average time of a step with all threads, by kind."""
        self._num_slow = 0
        """Slow steps in a row."""
        self._trial: Hashable = None
        """The kind of steps on trial; None = no trial runs."""
        self._all_s: list[float] = []
        """Times of the trial's steps with all threads ..."""
        self._fewer_s: list[float] = []
        """... and with fewer."""
        self._until = 0.0
        """When to return to all threads."""

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Runs a step. Steps of one kind take similar times; None = always on all threads."""
        start = self._clock()
        retreats = start < self._until
        has_fewer = kind is not None and (retreats or self._tries_fewer(kind))
        num_threads = self._fewer if has_fewer else self._every
        is_more = num_threads > torch.get_num_threads()
        torch.set_num_threads(num_threads)
        if is_more:
            start_workers()
        yield
        if kind is not None and not retreats:
            self._note(kind, has_fewer, self._clock() - start)

    def _tries_fewer(self, kind: Hashable) -> bool:
        return kind == self._trial and len(self._fewer_s) <= len(self._all_s)

    def _note(self, kind: Hashable, had_fewer: bool, seconds: float) -> None:
        if kind == self._trial:
            (self._fewer_s if had_fewer else self._all_s).append(seconds)
            if len(self._all_s) == TRIAL_STEPS:
                self._decide()
        elif seconds > SLOW * self._usual_s.get(kind, seconds):
            self._num_slow += 1
            if self._num_slow >= SLOW_STEPS:
                self._try(kind)
        else:
            self._num_slow = 0
            usual_s = self._usual_s.get(kind, seconds)
            self._usual_s[kind] = usual_s + (seconds - usual_s) * _WEIGHT

    def _try(self, kind: Hashable) -> None:
        """Starts a trial, or with None ends it."""
        self._trial, self._num_slow = kind, 0
        self._all_s.clear()
        self._fewer_s.clear()

    def _decide(self) -> None:
        all_s, fewer_s = median(self._all_s), median(self._fewer_s)
        if all_s >= GAIN * fewer_s:
            self._until = self._clock() + RETREAT_S
            _log.info(
                "other processes use the cores: short steps take %.0f ms on %d threads and %.0f ms "
                "on %d, which they use for %g s",
                all_s * 1e3, self._every, fewer_s * 1e3, self._fewer, RETREAT_S,
            )  # fmt: skip
        else:
            self._usual_s[self._trial] = all_s
        self._try(None)
