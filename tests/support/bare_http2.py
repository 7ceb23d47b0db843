"""A bare HTTP/2 client for gRPC servers without TLS. It may leave messages incomplete, and takes no
data beyond the window that it grants."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_INITIAL_WINDOW = 4
_FRAME_BYTES = 2**14


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data


def _field(name: str, value: str) -> bytes:
    """A header that no table of HPACK has."""
    return b"".join((b"\0", *(bytes([len(one)]) + one.encode() for one in (name, value))))


def call_frame(stream: int, path: str, key: str = "") -> bytes:
    """The frame that begins a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if key:
        fields["authorization"] = f"Bearer {key}"
    block = b"".join(_field(*one) for one in fields.items())
    return frame(_HEADERS, _END_HEADERS, stream, block)


class BareConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next = 1
        self._initial, self._windows = 65_535, {0: 65_535}
        self.ended: set[int] = set()
        """Calls that the server has ended or reset."""

    def call(self, path: str, key: str = "") -> int:
        """Begins a call, and returns its stream."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        self._writer.write(call_frame(stream, path, key))
        return stream

    def send(self, stream: int, message: bytes, *, claimed: int | None = None) -> None:
        """Sends a message of less than 16 KiB. If `claimed` is given, the message is incomplete: it
        claims to have this number of bytes."""
        number = len(message) if claimed is None else claimed
        flags = _END_STREAM if claimed is None else 0
        data = struct.pack(">BI", 0, number) + message
        self._writer.write(frame(_DATA, flags, stream, data))

    async def fill(self, stream: int, claimed: int, seconds: float) -> int:
        """Sends the beginning of a message of `claimed` bytes, until the server has granted no more
        room for `seconds`. Returns the number of bytes sent."""
        data, sent = struct.pack(">BI", 0, claimed) + bytes(claimed - 1), 0
        with suppress(TimeoutError):
            while sent < len(data):
                async with asyncio.timeout(seconds):
                    while not (room := min(self._windows[0], self._windows[stream])) > 0:
                        await asyncio.sleep(0.005)
                part = data[sent : sent + min(room, _FRAME_BYTES)]
                for one in (0, stream):
                    self._windows[one] -= len(part)
                sent += len(part)
                self._writer.write(frame(_DATA, 0, stream, part))
        return sent

    def take(self, stream: int, number: int) -> None:
        """Lets the server send `number` more bytes."""
        for one in (0, stream):
            self._writer.write(frame(_WINDOW_UPDATE, 0, one, struct.pack(">I", number)))

    async def until_ended(self, stream: int, seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while stream not in self.ended:
                await asyncio.sleep(0.01)

    async def read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            data = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            if kind == _WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += int.from_bytes(data, "big")
            elif kind == _SETTINGS and not flags & _ACK:
                self._use(dict(struct.iter_unpack(">HI", data)).get(_INITIAL_WINDOW))
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                answer = data if kind == _PING else b""
                self._writer.write(frame(kind, _ACK, 0, answer))
            elif kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM):
                self.ended.add(stream)

    def _use(self, initial: int | None) -> None:
        if initial is not None:
            for stream in self._windows.keys() - {0}:
                self._windows[stream] += initial - self._initial
            self._initial = initial


@asynccontextmanager
async def bare_connection(address: str, window: int = 2**16) -> AsyncIterator[BareConnection]:
    """Connects. `window` is the number of bytes that the client takes in each call."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    settings = struct.pack(">HI", _INITIAL_WINDOW, window)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0, settings))
    made = BareConnection(reader, writer)
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            await reading
        writer.transport.abort()
