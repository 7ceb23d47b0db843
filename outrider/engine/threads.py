"""The threads among which torch shares an operator: how many, and at which priority."""

from __future__ import annotations

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
    """Operators of this process have so many threads within the block. Takes less than 1 us."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NICENESS = 5
"""Of the threads that help a step. Where a step has a thread on every core, a message must wait
until the kernel takes one of them off. Measured on two cores, medians of runs: from sending to
queue 3.7 ms in 99 of 100 cases instead of 4.7, from verdict to receiver 2.6 instead of 4.4, and
steps as quick as before. The step's own thread keeps its priority: what it has found out is to be
told at once."""
_log = logging.getLogger(__name__)
_THREADS = Path("/proc/self/task")
_ELEMENTS = 2**20
"""Of an operator that is worth sharing."""


def start_workers() -> list[int]:
    """Starts the threads that will help the thread that calls, and lowers their priority; their
    ids. Elsewhere than on Linux threads have no priority of their own, and nothing is done."""
    if sys.platform != "linux" or not _THREADS.is_dir():
        return []
    before = _thread_ids()
    torch.zeros(_ELEMENTS).add_(1.0)
    workers = sorted(_thread_ids() - before)
    try:
        for worker in workers:
            os.setpriority(os.PRIO_PROCESS, worker, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    except OSError as error:
        _log.info("the helpers of a step keep their priority: %r", error)
    return workers


def _thread_ids() -> set[int]:
    return {int(entry.name) for entry in _THREADS.iterdir()}


SLOW = 3.0
"""A step that takes so many times as long as usual is slow; ..."""
SLOW_STEPS = 2
"""... so many in a row start a trial, ..."""
TRIAL_STEPS = 3
"""... in which so many steps have fewer threads, and as many between them all."""
GAIN = 2.0
"""Where fewer threads are so many times as quick, they are kept ..."""
RETREAT_S = 30.0
"""... for so long."""
_WEIGHT = 1 / 16
"""Of the newest step in the usual time."""


class ContendedThreads:
    """Chooses between all threads, which are quicker as long as nothing else uses the cores, and
    fewer. Steps are compared with others of their kind alone. `clock` counts seconds."""

    def __init__(
        self, fewer: int, every: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._fewer, self._every, self._clock = fewer, every, clock
        self._usual_s: dict[Hashable, float] = {}
        """What a step with all threads takes, by kind: a decayed average."""
        self._num_slow = 0
        """Of the last steps."""
        self._trial: Hashable = None
        """The kind of steps that are tried; None = no trial runs."""
        self._all_s: list[float] = []
        """Times of the trial's steps with all threads ..."""
        self._fewer_s: list[float] = []
        """... and with fewer."""
        self._until = 0.0
        """Fewer threads are kept so long."""

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Runs a step of torch. Steps of one kind take about as long; None = one that has all
        threads in any case."""
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
                "steps of few tokens take %.0f ms with %d threads, as others use the cores, and "
                "%.0f ms with %d, which they have for %g s",
                all_s * 1e3, self._every, fewer_s * 1e3, self._fewer, RETREAT_S,
            )  # fmt: skip
        else:
            self._usual_s[self._trial] = all_s  # Whatever threads they have.
        self._try(None)
