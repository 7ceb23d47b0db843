"""Processes on one event loop: each can be stopped, or die, with all its tasks.

A process is identified by the context of its tasks and timers. While it is stopped, the loop keeps
its callbacks, and runs them afterwards, in order: as after SIGSTOP and SIGCONT, the clock has
advanced. A dead process never runs again."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from unittest.mock import patch

from outrider.foundation.clock import VirtualClockLoop, cancelling_others

T = TypeVar("T")
_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    return _CURRENT.get()


EPOCH_S = 1.8e9
"""Wall clock at the start of a run, in seconds since 1970."""


def wall_clock_s(process: Process | None = None) -> float:
    """Wall clock of a process's host; of the running process by default."""
    process = process or current()
    return EPOCH_S + asyncio.get_running_loop().time() + (process.clock_jump_s if process else 0.0)


class Process:
    """A named process on a host of its own."""

    def __init__(self, name: str) -> None:
        """The name is also its address in the network."""
        self.name = name
        self.is_dead = False
        self.is_still = False
        self.clock_jump_s = 0.0
        """Offset of its host's wall clock."""
        self.context = copy_context()
        self.context.run(_CURRENT.set, self)
        self.held: list[asyncio.Handle] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, context=self.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stand_still(self) -> None:
        self.is_still = True

    def go_on(self) -> None:
        if not self.is_dead:
            self._run_on()

    def go_on_with_arrivals(self) -> None:
        """The same, in the order of an event loop that one callback has blocked: first what was
        ready before, then what has arrived at its sockets, and only then overdue timers."""
        self.held.sort(key=_order_after_a_stall)
        self.go_on()

    def die(self) -> None:
        self.is_still = self.is_dead = True

    def bury(self) -> None:
        """Dies, but lets its tasks be cancelled, which no longer has effects."""
        self.is_dead = True
        self._run_on()

    def _run_on(self) -> None:
        self.is_still = False
        held, self.held = self.held, []
        loop = asyncio.get_running_loop()
        loop._ready.extend(handle for handle in held if not handle.cancelled())  # type: ignore[attr-defined]


def deliver(message: Callable[[], object]) -> None:
    """Callback for arriving messages, which tells them from timers."""
    message()


def _order_after_a_stall(handle: asyncio.Handle) -> int:
    if not isinstance(handle, asyncio.TimerHandle):
        return 0
    return 1 if handle._callback is deliver else 2  # type: ignore[attr-defined]


class ProcessLoop(VirtualClockLoop):
    """An event loop on a virtual clock for several processes. Timers for the same time run in the
    order in which they were set."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap, by due time and number of earlier timers."""
        self._num_timers = 0

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        self._num_timers += 1
        return timer

    def _run_once(self) -> None:
        """As asyncio's loop, without sockets, other threads and debugging, for speed: a seed takes
        thousands of turns."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._virtual.wait(timers[0][0] - self.time() if timers else None)
        due = self.time() + self._clock_resolution
        while timers and timers[0][0] < due:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):  # Callbacks that these add wait for the next turn.
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_CURRENT)
            if process is not None and process.is_still:
                process.held.append(handle)
            else:
                handle._run()


def run_processes(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main`, which belongs to no process, on a virtual clock. `time` gives the wall clock of
    the running process's host."""
    clocks = patch.multiple(time, time=wall_clock_s, time_ns=lambda: int(wall_clock_s() * 1e9))
    with clocks, asyncio.Runner(loop_factory=ProcessLoop) as runner:
        return runner.run(cancelling_others(main))
