"""The connections of a Redis client."""

from __future__ import annotations

import redis.asyncio


class Pool(redis.asyncio.BlockingConnectionPool):
    """A bounded number of connections; callers wait for a free one."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Closes connections; idle ones alone without giving way to other tasks, which might take
        one that is half closed. The library would wait for each to be closed."""
        if inuse_connections:
            await super().disconnect()
            return
        for connection in self._available_connections:
            await connection.disconnect(nowait=True)
