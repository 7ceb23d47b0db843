"""An event loop with a virtual clock, for simulation.

Simulated code must read the time from `asyncio.get_running_loop().time()`, and must wait with
asyncio. When every task waits, the virtual clock jumps to the next timer. The loop never waits for
sockets. `run_in_executor` calls its function on the loop's thread, because another thread would
make the order of events random. The call takes no virtual time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from outrider.errors import InvariantError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _VirtualSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Returns the ready events. If there are none, advances the clock by `timeout`."""
        ready: list[Any] = super().select(0)
        if not ready:
            self.wait(timeout)
        return ready

    def wait(self, timeout: float | None) -> None:
        if timeout is None:
            raise InvariantError("every task waits, and no timer is set: the program hangs")
        self.now += max(timeout, 0.0)


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and never waits."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        # asyncio may run a timer early, by up to this time. The virtual clock needs no tolerance.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 (raised where the future is awaited)
            done.set_exception(error)
        return done


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` like `asyncio.run`, but on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


async def cancelling_others(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main`, and then cancels all other tasks of the loop."""
    try:
        return await main
    finally:
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
