"""Bytes on the sockets of HTTP and gRPC that are not quite requests."""

import re
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from hypothesis import strategies as st

from tests.fuzz.hostile import broken
from tests.fuzz.ledger import Ledger
from tests.fuzz.started import Started

ANSWER_S: Final = 0.3
"""How long to wait for an answer after what may be half a request."""
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_JSON: Final = b'{"prompt":[1,2,3],"max_tokens":3}'
_LINES: Final = (
    b"POST /v1/completions HTTP/1.1", b"GET /health HTTP/1.1", b"GET /health HTTP/1.0",
    b"GET /health", b"GET http://elsewhere/health HTTP/1.1", b"CONNECT here:1 HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"PRI * HTTP/2.0", b"GET /health HTTP/9.9", b"G\0T /health HTTP/1.1",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET /%ff%00%zz HTTP/1.1", b"GET \xff\xfe HTTP/1.1",
    b"POST /v1/chat/completions HTTP/1.1", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
)  # fmt: skip
_HEADERS: Final = (
    b"Host: localhost", b"Host: localhost", b"Host:", b"Content-Length: 33", b"Content-Length: 33",
    b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 3, 4",
    b"Content-Length: 0x21", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity", b"Content-Type: application/json", b"Connection: close",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x", b"Expect: 100-continue",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
    b"X: " + b"y" * 100_000, b"X" * 1000 + b": y", b": empty", b"no colon", b"X : space",
    b" folded: line", b"X: \0", b"X: \xff", b"\r", *[b"A: b"] * 2,
)  # fmt: skip
_BODIES: Final = (
    b"", _JSON, _JSON * 2, b"21\r\n" + _JSON + b"\r\n0\r\n\r\n", b"21;x=" + b"y" * 5000,
    b"zz\r\n" + _JSON, b"ffffffffffffffffff\r\n" + _JSON, b"-1\r\n\r\n", b"0\r\nX: y\r\n\r\n",
    b"1\r\n{\r\n" * 200, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5,
)  # fmt: skip
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PLACES: Final = ("open_http", "locked_http", "coordinator", "target", "draft")


@dataclass(frozen=True)
class Bytes:
    """What is sent to a socket, in this many pieces."""

    place: str
    data: bytes
    num_pieces: int = 1
    pause_s: float = 0.0
    ending: str = "wait"


@st.composite
def _http(draw: st.DrawFn) -> bytes:
    headers = draw(st.lists(st.sampled_from(_HEADERS), max_size=5))
    lines = [draw(st.sampled_from(_LINES)), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + draw(st.sampled_from(_BODIES))


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    frames = [_PREFACE]
    for _ in range(draw(st.integers(0, 6))):
        payload = draw(st.binary(max_size=20))
        size = draw(st.sampled_from((len(payload), 0, 2**14, 2**24 - 1)))
        kind, flags = draw(st.integers(0, 12)), draw(st.integers(0, 255))
        stream = draw(st.sampled_from((0, 1, 3, 2, 2**31 - 1)))
        frames.append(size.to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload)
    return b"".join(frames)


@st.composite
def byte_strings(draw: st.DrawFn) -> Bytes:
    place = draw(st.sampled_from(_PLACES))
    kinds = _http() | broken(_http()) | st.binary(max_size=200)
    data = draw(kinds if place.endswith("http") else kinds | _frames() | broken(_frames()))
    return Bytes(
        place=place,
        data=data,
        num_pieces=draw(st.sampled_from((1, 1, 1, 2, 7))),
        pause_s=draw(st.sampled_from((0.0, 0.0, 0.01))),
        ending=draw(st.sampled_from(("wait", "wait", "half-close", "close", "reset"))),
    )


class SocketFeed:
    """Sends bytes and checks the answer."""

    def __init__(self, started: Started, ledger: Ledger) -> None:
        self._addresses = {place: started.addresses[place] for place in _PLACES}
        self._ledger = ledger

    def feed(self, again: str, given: Bytes) -> None:
        host, _, port = self._addresses[given.place].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            try:
                answer = _exchanged(connection, given)
            except OSError:
                answer = b""  # It was refused before it was read to its end.
        found = _STATUS.match(answer)
        self._ledger.count("raw", "none" if found is None else int(found[1]))
        if found is not None and found[1].startswith(b"5"):
            self._ledger.fail(again, f"{answer[:500]!r}", given)


def _exchanged(connection: socket.socket, given: Bytes) -> bytes:
    size = max(1, -(-len(given.data) // given.num_pieces))
    for start in range(0, len(given.data), size):
        connection.sendall(given.data[start : start + size])
        time.sleep(given.pause_s)
    if given.ending == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if given.ending in ("reset", "close"):
        return b""
    if given.ending == "half-close":
        connection.shutdown(socket.SHUT_WR)
    connection.settimeout(ANSWER_S)
    with suppress(TimeoutError):
        return connection.recv(65_536)
    return b""
