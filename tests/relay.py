"""A connection that can be cut: a relay between clients and a server."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65_536


class Relay:
    """Passes bytes on between whoever connects and one server, both ways, until it is cut."""

    def __init__(self, server: str) -> None:
        """`server` is HOST:PORT."""
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = self._listener.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        if self._listener is not None:
            await self._listener.wait_closed()

    def cut(self) -> None:
        """Both sides hear that the connection was reset; nobody can connect any more."""
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        there, back = await asyncio.open_connection(*self._server)
        self._writers.append(back)
        if self._listener is None or not self._listener.is_serving():
            self.cut()  # It was cut meanwhile.
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(_pump(source, sink))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(CHUNK_BYTES):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()
