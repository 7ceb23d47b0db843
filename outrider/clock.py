"""An event loop with a virtual clock, for simulation.

Outrider reads the time only from `asyncio.get_running_loop().time()` and waits with asyncio, so the
same code runs on either clock. When every task waits, the virtual clock jumps to the next timer.
Sockets are not awaited. Work for other threads runs on the loop's own thread and takes no virtual
time; otherwise the virtual time would depend on its real duration."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from outrider.errors import InvariantError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _VirtualSelector(selectors.DefaultSelector):
    """Moves the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Returns what is ready. Instead of waiting, moves the clock."""
        ready: list[Any] = super().select(0)
        if not ready:
            self.wait(timeout)
        return ready

    def wait(self, timeout: float | None) -> None:
        """Raises `InvariantError` if nothing can ever happen again."""
        if timeout is None:
            raise InvariantError("every task waits, and no timer is set: the program hangs")
        self.now += max(timeout, 0.0)


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and never waits."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        # asyncio runs timers early by up to its clock's resolution; a virtual clock is exact.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Calls `func` at once, on this thread."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller that awaits the future
            done.set_exception(error)
        return done


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a virtual clock, as `asyncio.run` does on the real one."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


async def cancelling_others(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main`, then cancels all other tasks, including those that start meanwhile."""
    try:
        return await main
    finally:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
