"""The number and the priority of the threads on which torch runs operators."""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from statistics import median

import torch

from outrider.errors import InvariantError


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


class _Started(threading.local):
    """What `start_workers` has started for a thread."""

    workers: tuple[int, ...] = ()


_started = _Started()


def start_workers() -> list[int]:
    """Starts torch's worker threads for the calling thread, lowers their priority, and returns
    their ids. Works only on Linux, where each thread has a priority. Elsewhere does nothing."""
    if sys.platform != "linux" or not _THREADS.is_dir():
        return []
    before = _thread_ids()
    torch.zeros(_ELEMENTS).add_(1.0)
    workers = sorted(_thread_ids() - before)
    _started.workers += tuple(workers)
    try:
        for worker in workers:
            os.setpriority(os.PRIO_PROCESS, worker, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    except OSError as error:
        _log.info("the worker threads keep their priority: %r", error)
    return workers


def _thread_ids() -> set[int]:
    return {int(entry.name) for entry in _THREADS.iterdir()}


class OwnCores:
    """While steps run on as many threads as the process has cores, each thread stays on a core of
    its own. Otherwise, when another process has used a core for a moment, Linux may leave two
    threads of a step on one core for some milliseconds, and the other core idle. With eight
    sessions of the demo target on two cores, this was so for 30 % of the time."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: the largest number of threads of a step; 0 = no thread is bound."""
        self._cores: list[int] = []
        """Core of the calling thread, and of each worker; empty = threads may run on all cores."""
        if sys.platform == "linux" and len(cores := os.sched_getaffinity(0)) == num_threads > 1:
            first = os.getpid() % num_threads  # Other targets should begin at other cores.
            self._cores = [*sorted(cores)[first:], *sorted(cores)[:first]]
        self._num_threads = 1  # of the last step

    def use(self, num_threads: int) -> None:
        """Must be called by the thread that runs steps, before each step. `num_threads` is the
        number of the step's threads. With fewer threads than cores, all may move, so that they can
        avoid a core that another process uses. Does nothing on threads that have not called
        `start_workers`."""
        if num_threads == self._num_threads or not (self._cores and _started.workers):
            return
        self._num_threads = num_threads
        threads = [0, *sorted(_thread_ids().intersection(_started.workers))]
        stays = num_threads == len(threads) == len(self._cores)
        try:
            for thread, core in zip(threads, self._cores, strict=False):
                os.sched_setaffinity(thread, {core} if stays else self._cores)
        except OSError as error:
            _log.info("the threads of steps may run on all cores: %r", error)
            for thread in threads:
                with suppress(OSError):
                    os.sched_setaffinity(thread, self._cores)
            self._cores = []


SHORT_S = 4e-3  # a step that takes longer on one thread is not short
SHORT_GAIN_S = 1e-3
"""A step is short if all threads make it at most this much faster than one thread. While other
processes use the cores, a step on several threads waits for the slowest of them. With a tiny model
on two busy cores, a step for 8 sessions took 12 ms on two threads, and 0.5 ms on one."""
SHORT_HELD_MAX = 16_384
"""A step whose sequences hold more tokens is not short, because attention takes too long. With two
layers of width 64, one thread reads 16,384 tokens in 2 ms."""
SHORT_TRIES = 5
"""Each measurement runs this many times. The shortest time counts, because other processes can only
make steps slower."""
_TRIED_S = 20e-3  # after a step that takes longer, no further size is tried


def find_short_tokens(
    counts: Sequence[int],
    run_step: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Returns the largest of `counts` whose steps are short, if those of all smaller counts are,
    too; 0 if there is none. `counts` are numbers of tokens, in ascending order. `run_step` runs a
    step of so many tokens on torch's current number of threads."""

    def seconds(num_threads: int, num_tokens: int) -> float:
        with on_threads(num_threads):
            began = clock()
            run_step(num_tokens)
            return clock() - began

    num_threads, short = torch.get_num_threads(), 0
    for num_tokens in counts:
        all_s = alone_s = math.inf
        run_step(num_tokens)  # Only to warm up.
        for _ in range(SHORT_TRIES):
            all_s = min(all_s, seconds(num_threads, num_tokens))
            if all_s > _TRIED_S:  # On one thread, it could take a second.
                return short
            alone_s = min(alone_s, seconds(1, num_tokens))
            if alone_s > _TRIED_S:
                return short
        if alone_s > min(SHORT_S, all_s + SHORT_GAIN_S):
            return short
        short = num_tokens
    return short


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


SMALL_STEP_TOKENS = 16
"""Only steps of fewer tokens run on fewer threads while other processes use the cores. The times of
larger steps vary too much for the comparison in `ContendedThreads`."""


class StepThreads:
    """Chooses the number of threads of each step of an engine."""

    def __init__(self, fewer: int | None, *, own_cores: bool = False) -> None:
        """`fewer`: see `ContendedThreads`; None = each step runs on all threads. `own_cores`:
        whether threads stay on cores of their own (see `OwnCores`)."""
        self._fewer, self._every = fewer, torch.get_num_threads()
        self._contended: ContendedThreads | None = None
        self._short_tokens = 0
        self._cores = OwnCores(self._every if own_cores else 0)

    @property
    def counts(self) -> list[int]:
        """All numbers of threads that steps may have, in ascending order."""
        return [self._every] if self._fewer is None else sorted({1, self._fewer, self._every})

    def use_fewer(self, short_tokens: int) -> None:
        """From now on, steps of up to `short_tokens` tokens run on one thread, and small steps on
        fewer threads while other processes use the cores."""
        if self._fewer is None:
            raise InvariantError("all steps of this engine run on all threads")
        self._contended = ContendedThreads(self._fewer, self._every)
        self._short_tokens = short_tokens

    @property
    def varies(self) -> bool:
        """Whether `use_fewer` was called. Until then, each step runs on all threads."""
        return self._contended is not None

    def use_all(self) -> None:
        """Must be called before each step that runs outside the context `step`."""
        self._cores.use(self._every)

    @contextmanager
    def step(self, num_tokens: int, num_held: int, whole: bool) -> Iterator[None]:
        """Sets the number of threads for a step, which runs the whole model or only a part. Its
        sequences hold `num_held` tokens, on which the new ones attend. Must be called after
        `use_fewer`."""
        is_short = num_tokens <= self._short_tokens and num_held <= SHORT_HELD_MAX
        with on_threads(1) if is_short else self._unless_contended(num_tokens, whole):
            self._cores.use(torch.get_num_threads())
            yield

    def _unless_contended(self, num_tokens: int, whole: bool) -> AbstractContextManager[None]:
        if self._contended is None:
            raise InvariantError("all steps of this engine run on all threads")
        is_small = num_tokens < SMALL_STEP_TOKENS
        return self._contended.step((whole, num_tokens.bit_length()) if is_small else None)
