"""A bare HTTP/2 client for gRPC, whose frames obey nothing but the server's windows."""

import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from tests.attacks.victims import STRANGER
from tests.support.bare_http2 import call_frame, frame

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
MAX_STREAMS, INITIAL_WINDOW = 3, 4
FRAME_BYTES = 16384


class Connection:
    """`window` is the initial window of the client's streams: with 0 it takes no data."""

    def __init__(self, address: str, window: int = 2**31 - 1, source: str = STRANGER) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), 5, (source, 0))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending, self._news = threading.Lock(), threading.Condition()
        self._windows, self._initial = {0: 65535}, 65535
        self.closed, self.streams_max = False, 0
        self.frames = Counter[int]()
        self.ended: set[int] = set()
        """Streams that the server has reset, or ended by trailers."""
        self._next = 1
        settings = frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, window))
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        # Not earlier: the server closes a connection whose first frame is an answer.
        threading.Thread(target=self._read, daemon=True).start()
        with self._news:  # The server's settings, and its answer to the client's.
            self._news.wait_for(lambda: self.closed or self.frames[SETTINGS] > 1, 5)

    def call(self, method: str, key: str = "") -> int:
        """Opens a gRPC call and returns its stream."""
        stream, self._next = self._next, self._next + 2
        with self._news:
            self._windows[stream] = self._initial
        self._send(call_frame(stream, method, key))
        return stream

    def data(self, stream: int, data: bytes, *, end: bool = False, wait_s: float = 2.0) -> int:
        """Sends data as far as the windows let it, and returns how many bytes it sent."""
        sent = 0
        while sent < len(data):
            with self._news:

                def open_now() -> bool:
                    return self._is_over(stream) or min(self._windows[0], self._windows[stream]) > 0

                if not self._news.wait_for(open_now, wait_s) or self._is_over(stream):
                    return sent
                room = min(self._windows[0], self._windows[stream], FRAME_BYTES)
                part = data[sent : sent + room]
                self._windows[0] -= len(part)
                self._windows[stream] -= len(part)
            sent += len(part)
            self._send(frame(DATA, int(end and sent == len(data)), stream, part))
        return sent

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _is_over(self, stream: int) -> bool:
        return self.closed or stream in self.ended

    def _send(self, data: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            self.closed = True

    def _read(self) -> None:
        buffer = b""
        while True:
            try:
                received = self._socket.recv(65536)
            except OSError:
                received = b""
            if not received:
                with self._news:
                    self.closed = True
                    self._news.notify_all()
                return
            buffer += received
            while len(buffer) >= 9 and len(buffer) >= 9 + int.from_bytes(buffer[:3], "big"):
                end = 9 + int.from_bytes(buffer[:3], "big")
                stream = int.from_bytes(buffer[5:9], "big") & 0x7FFFFFFF
                self._take(buffer[3], buffer[4], stream, buffer[9:end])
                buffer = buffer[end:]

    def _take(self, kind: int, flags: int, stream: int, data: bytes) -> None:
        is_ack = bool(flags & 1)
        with self._news:
            self.frames[kind] += 1
            if kind == WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += int.from_bytes(data, "big") & 0x7FFFFFFF
            elif kind == SETTINGS and not is_ack:
                for name, value in struct.iter_unpack(">HI", data):
                    if name == INITIAL_WINDOW:
                        for one in self._windows:
                            self._windows[one] += value - self._initial if one else 0
                        self._initial = value
                    elif name == MAX_STREAMS:
                        self.streams_max = value
            elif kind == RST_STREAM or (kind == HEADERS and is_ack):
                self.ended.add(stream)
            elif kind == GOAWAY:
                self.closed = True
            self._news.notify_all()
        if kind in (SETTINGS, PING) and not is_ack:
            self._send(frame(kind, 1, 0, data if kind == PING else b""))


def connections(address: str, num_streams: int, num_max: int = 128) -> Iterator[Connection]:
    """Yields a connection for each of so many streams: always the same one if the server sets no
    limit, else a new one when the limit is reached or the old one is closed, at most `num_max`."""
    made, used = None, 0
    for _ in range(num_streams):
        if made is None or made.closed or (made.streams_max and used >= made.streams_max):
            if num_max == 0:
                return
            try:
                made, used, num_max = Connection(address), 0, num_max - 1
            except OSError:
                return
        used += 1
        yield made
