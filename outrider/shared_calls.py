"""Calls that are made once for all who wait for them, on threads of their own or as tasks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SharedCalls(Generic[Key, Result]):
    """What nobody waits for any more is cancelled: a thread does not begin it. For the event loop's
    thread."""

    def __init__(self, num_threads: int = 1, name: str = "") -> None:
        """So many of `result` are made at the same time; others wait their turn."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._running: dict[Key, asyncio.Future[Result]] = {}
        self._num_waiting: Counter[Key] = Counter()

    def __len__(self) -> int:
        """How many are waited for."""
        return len(self._running)

    def __contains__(self, key: Key) -> bool:
        return key in self._running

    async def result(self, key: Key, call: Callable[[], Result]) -> Result:
        """What the call returns, or raises; where one of that key is waited for, what that does."""
        loop = asyncio.get_running_loop()
        return await self.share(key, lambda: loop.run_in_executor(self._threads, call))

    async def share(self, key: Key, begin: Callable[[], asyncio.Future[Result]]) -> Result:
        """The same of what `begin` begins."""
        if key not in self._running:
            self._running[key] = begin()
        running = self._running[key]
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(running)
        finally:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._running[key], self._num_waiting[key]
                running.cancel()

    def close(self) -> None:
        """Begins no more; what has begun is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
