"""Calls whose result several callers share."""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SharedCalls(Generic[Key, Result]):
    """Runs at most one call of a key at a time, and gives the result to all callers that wait for
    it. If all these callers stop waiting, cancels the call. All methods must be called on the event
    loop's thread."""

    def __init__(self) -> None:
        self._running: dict[Key, asyncio.Future[Result]] = {}
        self._num_waiting: Counter[Key] = Counter()

    async def share(self, key: Key, begin: Callable[[], asyncio.Future[Result]]) -> Result:
        """Awaits the running call of this key. If there is none, `begin` starts the call and
        returns its future."""
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
