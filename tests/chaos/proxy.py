"""What stands between the processes of a deployment: connections go through it, and it can break
them, or let nothing pass.

gRPC takes the way through an HTTP proxy that its environment names (`grpc_proxy`; the CONNECT
method, RFC 9110 section 9.3.6), so every link of every process comes by here without knowing it.
Redis is reached by a port that leads to its socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

HEAD_BYTES_MAX: Final = 8192
_END_OF_HEAD: Final = b"\r\n\r\n"
_CONNECTED: Final = b"HTTP/1.1 200 OK\r\n\r\n"
_REFUSED: Final = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"


class FaultProxy:
    """All connections by the address that they lead to."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._ends: dict[str, set[_End]] = {}
        """Both ends of each connection."""
        self._held: dict[str, asyncio.Event] = {}
        """Set once what was held passes again."""
        self._is_closed = False

    async def start(self) -> str:
        """Where `grpc_proxy` should point."""
        return f"http://127.0.0.1:{await self._listen(lambda: _End(self._connect))}"

    async def forward(self, place: str) -> str:
        """A HOST:PORT that leads to a Unix socket, or to another HOST:PORT; also its name for `cut`
        and `hold`."""
        name = ""

        async def lead(end: _End) -> None:
            await self._join(end, name, lambda far: _reach(place, far), b"")

        name = f"127.0.0.1:{await self._listen(lambda: _End(lead, is_bare=True))}"
        return name

    def cut(self, address: str) -> None:
        """Breaks all connections that lead there, as a machine does that is started anew."""
        for end in list(self._ends.get(address, ())):
            end.abort()

    def hold(self, address: str) -> None:
        """Nothing passes, either way, and nothing is broken; new connections wait."""
        self._held[address] = asyncio.Event()
        for end in self._ends.get(address, ()):
            end.pause()

    def release(self, address: str) -> None:
        """Everything that was held passes."""
        self._held.pop(address).set()
        for end in self._ends.get(address, ()):
            end.resume()

    def close(self) -> None:
        """Breaks everything, and nothing connects any more."""
        self._is_closed = True
        for server in self._servers:
            server.close()
        for address in list(self._ends):
            self.cut(address)

    async def _listen(self, make: Callable[[], _End]) -> int:
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _connect(self, end: _End) -> None:
        """What a CONNECT asks for."""
        method, address, *_ = end.head.decode("latin-1").split()
        if method != "CONNECT":
            end.write(_REFUSED)
            end.abort()
            return
        await self._join(end, address, lambda far: _reach(address, far), _CONNECTED)

    async def _join(
        self, end: _End, address: str, connect: Callable[[_End], Awaitable[object]], answer: bytes
    ) -> None:
        """Connects the other side, once nothing is held, and answers the caller."""
        far = _End(None)
        while address in self._held:
            await self._held[address].wait()
        try:
            await connect(far)
        except OSError:
            if answer:
                end.write(_REFUSED)
            end.abort()
            return
        both = self._ends.setdefault(address, set())
        for one, other in ((end, far), (far, end)):
            both.add(one)
            one.join(other, both.discard)
        end.write(answer + far.rest)
        far.write(end.rest)
        if far.transport.is_closing():  # It was left before it could tell.
            end.transport.close()
        if self._is_closed:  # Since a moment ago, as below.
            self.cut(address)
        if address in self._held:
            for one in (end, far):
                one.pause()


async def _reach(place: str, far: _End) -> None:
    """Connects to a HOST:PORT, or to a Unix socket."""
    loop = asyncio.get_running_loop()
    host, _, port = place.rpartition(":")
    if host:
        await loop.create_connection(lambda: far, host, int(port))
    else:
        await loop.create_unix_connection(lambda: far, place)


class _End(asyncio.Protocol):
    """One end of a connection: what comes is written to the other."""

    transport: asyncio.Transport

    def __init__(
        self, lead: Callable[[_End], Awaitable[None]] | None, *, is_bare: bool = False
    ) -> None:
        """`lead` joins it to another end, once its head is there (at once where it has none)."""
        self._lead = lead
        self._is_bare = is_bare
        self._other: _End | None = None
        self._forget: Callable[[_End], None] = lambda _: None
        self._leading: asyncio.Task[None] | None = None
        self._is_held = self._is_full = False
        self.head = self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._is_bare:
            self._begin()

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)
        elif self._lead is None or self._leading is not None:
            self.rest += data  # Until they are joined.
        else:
            self.head, end, self.rest = (self.head + data).partition(_END_OF_HEAD)
            if end or len(self.head) > HEAD_BYTES_MAX:
                self._begin()

    def _begin(self) -> None:
        assert self._lead is not None
        self._leading = asyncio.ensure_future(self._lead(self))

    def join(self, other: _End, forget: Callable[[_End], None]) -> None:
        self._other, self._forget = other, forget

    def write(self, data: bytes) -> None:
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def abort(self) -> None:
        self.transport.abort()

    def pause(self) -> None:
        self._is_held = True
        self._flow()

    def resume(self) -> None:
        self._is_held = False
        self._flow()

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.fill(is_full=True)

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.fill(is_full=False)

    def fill(self, *, is_full: bool) -> None:
        """Whether the other end takes no more for now."""
        self._is_full = is_full
        self._flow()

    def _flow(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_held or self._is_full:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget(self)
        if self._leading is not None:
            self._leading.cancel()
        if self._other is not None:
            self._other.transport.close()
