"""A proxy for all connections between the processes of a deployment, which can break or hold them.

gRPC connects through an HTTP proxy named in the environment (`grpc_proxy`; the CONNECT method, RFC
9110 section 9.3.6), so every link of every process passes here. Redis is reached by a port that
leads to its socket."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from typing import Final

CHUNK_BYTES: Final = 65_536
_REFUSED: Final = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"


class FaultProxy:
    """All connections, by the address to which they lead."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._ends: dict[str, set[StreamWriter]] = {}
        self._held: dict[str, asyncio.Event] = {}
        """Set while data may pass."""
        self._is_closed = False

    async def start(self) -> str:
        return f"http://127.0.0.1:{await self._listen(self._connect)}"

    async def forward(self, place: str) -> str:
        """A HOST:PORT that leads to a Unix socket or to another HOST:PORT. `cut` and `hold` take
        the same name."""
        name = ""

        async def lead(reader: StreamReader, writer: StreamWriter) -> None:
            await self._join(name, place, reader, writer, b"")

        name = f"127.0.0.1:{await self._listen(lead)}"
        return name

    def cut(self, address: str) -> None:
        """Breaks all connections to an address, as a restart of its machine would."""
        for end in list(self._ends.get(address, ())):
            end.transport.abort()

    def hold(self, address: str) -> None:
        """Stops all data in both directions. Connections stay open; new connections wait."""
        self._held[address] = asyncio.Event()

    def release(self, address: str) -> None:
        self._held.pop(address).set()

    def close(self) -> None:
        self._is_closed = True
        for server in self._servers:
            server.close()
        for address in list(self._held):
            self.release(address)
        for address in list(self._ends):
            self.cut(address)

    async def _listen(self, lead: Callable[[StreamReader, StreamWriter], Awaitable[None]]) -> int:
        async def closing(reader: StreamReader, writer: StreamWriter) -> None:
            try:
                await lead(reader, writer)
            finally:
                writer.close()

        server = await asyncio.start_server(closing, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (EOFError, OSError, asyncio.LimitOverrunError):
            return
        method, address, *_ = head.decode("latin-1").split()
        if method == "CONNECT":
            await self._join(address, address, reader, writer, b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            writer.write(_REFUSED)

    async def _join(
        self, name: str, place: str, reader: StreamReader, writer: StreamWriter, answer: bytes
    ) -> None:
        """Connects the other side once the address is not held, answers the caller, and forwards
        data until either side ends."""
        ends = self._ends.setdefault(name, set())
        ends.add(writer)
        try:
            await self._passes(name)
            far_reader, far_writer = await _reach(place)
        except OSError:
            writer.write(_REFUSED if answer else b"")
            return
        finally:
            ends.discard(writer)
        ends |= {writer, far_writer}
        if self._is_closed:  # The address may be held since a moment ago.
            self.cut(name)
        writer.write(answer)
        pumps = [
            asyncio.ensure_future(self._pump(name, *pair))
            for pair in ((reader, far_writer), (far_reader, writer))
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            ends -= {writer, far_writer}
            far_writer.close()

    async def _pump(self, name: str, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._passes(name)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        await self._passes(name)  # The end of a stream is held back, too.

    async def _passes(self, name: str) -> None:
        while name in self._held:
            await self._held[name].wait()


async def _reach(place: str) -> tuple[StreamReader, StreamWriter]:
    """Connects to a HOST:PORT, or to a Unix socket."""
    host, _, port = place.rpartition(":")
    if host:
        return await asyncio.open_connection(host, int(port))
    return await asyncio.open_unix_connection(place)
