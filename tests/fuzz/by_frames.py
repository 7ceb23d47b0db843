"""Opens connections that no client library would open: calls whose message never ends, streams
whose answers nobody takes, and bodies that arrive in part. Nothing is checked here: the control
caller must get its answers meanwhile, and nothing may be left at the end."""

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import strategies as st

from tests.attacks.http2 import Connection
from tests.fuzz.by_grpc import METHODS
from tests.fuzz.hostile import messages, mutated
from tests.fuzz.ledger import Ledger
from tests.fuzz.started import Started
from tests.fuzz.valid import VALID

HELD_MAX: Final = 64
"""Connections that are kept open. The oldest is closed first."""
STALLED: Final = 0
"""A window of a caller that takes no data."""
CHUNK_S: Final = 0.05
CONNECT_S: Final = 5.0
_GRPC_PLACES: Final = frozenset({"coordinator", "locked_coordinator", "target", "draft"})
_HTTP_PLACES: Final = ("open_http", "locked_http", "gateway_http")
_PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/health", "/nothing")


@dataclass(frozen=True)
class Frames:
    """A message that is sent in part, on one connection."""

    place: str
    path: str
    data: bytes
    """What is sent; for gRPC, of the message with its prefix, and for HTTP, of the body."""
    announced: int
    """Length of the body that the HTTP headers announce."""
    key: str
    window: int
    """Bytes of each gRPC stream that the caller takes before it stops reading."""
    number: int
    """Calls on the connection."""


@st.composite
def _grpc_frames(draw: st.DrawFn) -> Frames:
    method, place = draw(st.sampled_from([one for one in METHODS if one[1] in _GRPC_PLACES]))
    anything = messages(method.input_type)
    message = draw(mutated(VALID.get(method.input_type.name, anything)) | anything)
    data = message.SerializeToString()
    announced = draw(
        st.sampled_from((len(data), len(data), len(data) + 1, 2**20, 2**23, 2**32 - 1))
    )
    whole = b"\0" + announced.to_bytes(4, "big") + data
    size = draw(st.integers(0, len(whole)) | st.just(len(whole)))
    return Frames(
        place=place,
        path=f"/{method.containing_service.full_name}/{method.name}",
        data=whole[:size],
        announced=announced,
        key=draw(st.sampled_from(("holder", "", "wrong"))),
        window=draw(st.sampled_from((STALLED, 1, 100, 2**31 - 1))),
        number=draw(st.sampled_from((1, 1, 3, 40))),
    )


@st.composite
def _http_frames(draw: st.DrawFn) -> Frames:
    size = draw(st.sampled_from((0, 1, 1000, 70_000, 2**20, 4 * 2**20 - 1)))
    return Frames(
        place=draw(st.sampled_from(_HTTP_PLACES)),
        path=draw(st.sampled_from(_PATHS)),
        data=b" " * size,
        announced=draw(st.sampled_from((size + 1, size + 1, 4 * 2**20, 4 * 2**20 + 1, 2**40))),
        key=draw(st.sampled_from(("holder", "", "wrong"))),
        window=STALLED,
        number=1,
    )


def frames() -> st.SearchStrategy[Frames]:
    return _grpc_frames() | _http_frames()


class FramesFeed:
    def __init__(self, started: Started, ledger: Ledger) -> None:
        self._started, self._ledger = started, ledger
        self._held: deque[Callable[[], Any]] = deque()

    def feed(self, again: str, one: Frames) -> None:
        key = self._started.keys.get(one.key, one.key)
        address = self._started.addresses[one.place]
        send = _by_http if one.place in _HTTP_PLACES else _by_grpc
        with suppress(OSError):
            self._held.append(send(address, key, one))
        self._ledger.count("frames", "sent")
        while len(self._held) > HELD_MAX:
            self._held.popleft()()
        time.sleep(CHUNK_S)

    def close(self) -> None:
        for close in self._held:
            close()
        self._held.clear()


def _by_grpc(address: str, key: str, one: Frames) -> Callable[[], Any]:
    connection = Connection(address, one.window)
    for _ in range(one.number):
        connection.data(connection.call(one.path, key), one.data, wait_s=CHUNK_S)
    return connection.close


def _by_http(address: str, key: str, one: Frames) -> Callable[[], Any]:
    host, port = address.split(":")
    head = f"POST {one.path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {one.announced}\r\n"
    head += "Content-Type: application/json\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    connection = socket.create_connection((host, int(port)), CONNECT_S)
    with suppress(OSError):  # The request was refused before all of its body was sent.
        connection.sendall(head.encode() + b"\r\n" + one.data)
    return connection.close
