"""A registry without Redis."""

import asyncio
from typing import Any

from outrider.errors import OutriderError
from outrider.redis.address import RedisAddress
from outrider.registry.redis_registry import RedisRegistry
from tests.simulation.redis_data import RedisData


class MemoryRegistry(RedisRegistry):
    """A registry whose commands run in this process, on the clock of the running event loop."""

    def __init__(self) -> None:
        super().__init__(RedisAddress(url="redis://nowhere"), "d")  # It never connects.
        self._data = RedisData(lambda: asyncio.get_running_loop().time() * 1e3)
        self.failure: OutriderError | None = None
        """Error that each call raises, while set."""
        self.requests: list[tuple[str, ...]] = []
        """The names of the commands of each request."""

    def forget(self) -> None:
        """Loses all data, as a server that restarts without its file."""
        self._data.restore(({}, {}))

    async def _run(self, *commands: tuple[str | int, ...]) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        self.requests.append(tuple(str(name) for name, *_ in commands))
        return [self._data.run([str(word).encode() for word in words]) for words in commands]

    async def close(self) -> None:
        """Nothing is open."""
