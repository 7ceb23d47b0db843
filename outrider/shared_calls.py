"""Calls on threads of their own, each made once for all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SharedCalls(Generic[Key, Result]):
    """What nobody waits for any more is not begun. For the event loop's thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        """So many are made at the same time; others wait their turn."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._running: dict[Key, _Running[Result]] = {}

    def __len__(self) -> int:
        """How many are waited for."""
        return len(self._running)

    def __contains__(self, key: Key) -> bool:
        return key in self._running

    async def result(self, key: Key, call: Callable[[], Result]) -> Result:
        """What the call returns, or raises; where one of that key is waited for, what that does."""
        running = self._running.get(key)
        if running is None:
            loop = asyncio.get_running_loop()
            running = _Running(loop.run_in_executor(self._threads, call))
            self._running[key] = running
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.result)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting:
                del self._running[key]
                running.result.cancel()  # If it has not begun, it need not.

    def close(self) -> None:
        """Begins no more; what has begun is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Running(Generic[Result]):
    """A call that is waited for."""

    def __init__(self, result: asyncio.Future[Result]) -> None:
        self.result = result
        self.num_waiting = 0
