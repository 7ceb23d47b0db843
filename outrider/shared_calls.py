"""Calls whose result several callers share."""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SharedCalls(Generic[Key, Result]):
    """Runs at most one call of a key at a time, and gives the result to all callers that wait for
    it. If all these callers stop waiting, cancels the call, unless it already runs on a thread. All
    methods must be called on the event loop's thread."""

    def __init__(self, num_threads: int = 1, name: str = "") -> None:
        """`result` runs at most `num_threads` calls at the same time. Further calls wait."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._running: dict[Key, asyncio.Future[Result]] = {}
        self._num_waiting: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: Key) -> bool:
        return key in self._running

    async def result(self, key: Key, call: Callable[[], Result]) -> Result:
        """Runs `call` on a thread, or awaits the running call of this key. Returns its result."""
        loop = asyncio.get_running_loop()
        return await self.share(key, lambda: loop.run_in_executor(self._threads, call))

    async def share(self, key: Key, begin: Callable[[], asyncio.Future[Result]]) -> Result:
        """Like `result`, but `begin` starts the call and returns its future."""
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
        """Starts no more calls. Does not wait for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
