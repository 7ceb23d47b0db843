"""Processes on one event loop: each may stand still, or die, with all that it does.

A process is known by the context that its tasks and timers run in. While it stands still the loop
keeps what would run, and runs it afterwards, in order: as after SIGSTOP and SIGCONT, the clock has
gone on. Of a process that is dead nothing ever runs again.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from outrider.clock import VirtualClockLoop, cancelling_others

T = TypeVar("T")
_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    return _CURRENT.get()


EPOCH_S = 1.8e9
"""What wall clocks show when a run begins, in seconds since 1970."""


def wall_clock_s(process: Process | None = None) -> float:
    """What the wall clock of a process's host shows; of the one that runs if none is given."""
    process = process or current()
    return EPOCH_S + asyncio.get_running_loop().time() + (process.clock_jump_s if process else 0.0)


@contextmanager
def virtual_wall_clocks() -> Iterator[None]:
    """`time.time` and `time.time_ns` show each process the clock of its own host."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time, time.time_ns = wall_clock_s, lambda: int(wall_clock_s() * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = seconds, nanoseconds


class Process:
    """What runs under one name, on a host of its own."""

    def __init__(self, name: str) -> None:
        """The name is its address in the network, too."""
        self.name = name
        self.is_dead = False
        self.is_still = False
        self.clock_jump_s = 0.0
        """How far the wall clock of its host is ahead of those of others."""
        self.context = copy_context()
        self.context.run(_CURRENT.set, self)
        self._held: list[asyncio.Handle] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, context=self.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def hold(self, handle: asyncio.Handle) -> None:
        self._held.append(handle)

    def stand_still(self) -> None:
        self.is_still = True

    def go_on(self) -> None:
        if not self.is_dead:
            self._run_on()

    def go_on_with_arrivals(self) -> None:
        """The same, as an event loop does that one callback has held up: after what was ready
        before comes what has arrived at its sockets, and only then all timers that have run out."""
        self._held.sort(key=_order_after_a_stall)
        self.go_on()

    def die(self) -> None:
        self.is_still = self.is_dead = True

    def bury(self) -> None:
        """Dies, and lets its tasks be cancelled: nothing they do matters any more."""
        self.is_dead = True
        self._run_on()

    def _run_on(self) -> None:
        self.is_still = False
        held, self._held = self._held, []
        loop = asyncio.get_running_loop()
        loop._ready.extend(handle for handle in held if not handle.cancelled())  # type: ignore[attr-defined]


def deliver(message: Callable[[], object]) -> None:
    """What the loop runs when a message arrives: by this it knows one from other timers."""
    message()


def _order_after_a_stall(handle: asyncio.Handle) -> int:
    if not isinstance(handle, asyncio.TimerHandle):
        return 0
    return 1 if handle._callback is deliver else 2  # type: ignore[attr-defined]


class ProcessLoop(VirtualClockLoop):
    """An event loop on a virtual clock, of several processes. Of timers that are due at one time
    the one that was set first runs first."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap, by when they are due and how many were set before."""
        self._num_timers = 0

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        self._num_timers += 1
        return timer

    def _run_once(self) -> None:
        """What asyncio's loop does, without sockets, other threads and its debugging: a seed is
        thousands of turns."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self.wait(timers[0][0] - self.time() if timers else None)
        due = self.time() + self._clock_resolution
        while timers and timers[0][0] < due:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):  # What these add waits for the next turn.
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_CURRENT)
            if process is not None and process.is_still:
                process.hold(handle)
            else:
                handle._run()


def run_processes(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main`, which is of no process, on a virtual clock."""
    with virtual_wall_clocks(), asyncio.Runner(loop_factory=ProcessLoop) as runner:
        return runner.run(cancelling_others(main))
