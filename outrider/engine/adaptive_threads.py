"""How many threads the next step of few tokens has, while other processes may want its cores.

Where a step's threads need every core and another process takes one of them, all threads wait for
the one that is not running at the end of each operator: a step of 13 ms then takes 100 and more.
Fewer threads, which leave a core free, hardly notice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Final

import torch

from outrider.engine.thread_binding import start_workers

_log = logging.getLogger(__name__)

SLOW: Final = 3.0
"""A step that takes so many times as long as usual is slow; ..."""
SLOW_STEPS: Final = 2
"""... so many in a row start a trial, ..."""
TRIAL_STEPS: Final = 3
"""... in which so many steps have fewer threads, and as many between them all."""
GAIN: Final = 2.0
"""Where fewer threads are so many times as quick, they are kept ..."""
RETREAT_S: Final = 30.0
"""... for so long."""
_WEIGHT: Final = 1 / 16
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
