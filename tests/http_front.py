"""A stack's coordinator on HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stack import Stack

from coordinator.http_api.server import HttpOptions, HttpServer


@asynccontextmanager
async def http_front(stack: Stack, options: HttpOptions | None = None) -> AsyncIterator[str]:
    """The URL that it answers at."""
    server = HttpServer(stack.coordinator, options or HttpOptions())
    await server.start()
    try:
        yield f"http://{server.address}"
    finally:
        await server.stop()
