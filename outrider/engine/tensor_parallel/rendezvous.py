"""Where the ranks of one model meet, before any of them has loaded a numeric library."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from outrider.engine.tensor_parallel.rank_rpc import read_exactly
from outrider.errors import ConfigError, Unavailable, check
from outrider.limits import TENSOR_PARALLEL_SIZE_MAX

LOOPBACK: Final = "127.0.0.1"
_TOKEN_BYTES: Final = 32
_HELLO: Final = struct.Struct(f"{_TOKEN_BYTES}sq")
"""Token and rank of a follower that joins."""
_LEAST_WAIT_S: Final = 0.01
_HELLO_TIMEOUT_S: Final = 5.0
"""How long one that has connected may take to say who it is."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one model meet. Whoever knows the token may join."""

    host: str
    store_port: int
    frames_port: int
    num_ranks: int
    token: bytes = field(repr=False)


class OpenRendezvous:
    """The leader's side of a meeting, from before its followers know of it."""

    def __init__(self, host: str, num_ranks: int) -> None:
        """Listens on `host` alone. Raises `ConfigError` where that is no address to listen on."""
        check(1 < num_ranks <= TENSOR_PARALLEL_SIZE_MAX, f"a meeting of {num_ranks} ranks")
        self._store_socket, store_port = listen(host)
        self._frames_socket, frames_port = listen(host)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.meeting = Rendezvous(host, store_port, frames_port, num_ranks, token)

    def accept(self, timeout_s: float) -> dict[int, socket.socket]:
        """The connections of all followers by rank, once. Raises as `accept`."""
        followers = range(1, self.meeting.num_ranks)
        with self._frames_socket as listening:
            return accept(listening, self.meeting.token, followers, timeout_s)

    def take_store_fd(self) -> int:
        """The socket for the ranks' table of addresses, once; it is the caller's to close."""
        return self._store_socket.detach()

    def close(self) -> None:
        """Listens no more."""
        self._store_socket.close()
        self._frames_socket.close()


def listen(host: str) -> tuple[socket.socket, int]:
    """A socket that listens on any free port, and that. Raises `ConfigError` for a host that is no
    address of this machine."""
    try:
        listening = socket.create_server((host, 0), backlog=TENSOR_PARALLEL_SIZE_MAX)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
    return listening, int(listening.getsockname()[1])


def connect(meeting: Rendezvous, port: int, rank: int, timeout_s: float) -> socket.socket:
    """A connection, without a timeout, to a rank that listens on `port`, which hears that it is
    `rank` that calls. Raises `Unavailable` where nobody answers within `timeout_s`."""
    try:
        connection = socket.create_connection((meeting.host, port), timeout_s)
        connection.sendall(_HELLO.pack(meeting.token, rank))
    except OSError as error:
        raise Unavailable(f"a rank of the model does not answer: {error}") from error
    connection.settimeout(None)
    return connection


def accept(
    listening: socket.socket, token: bytes, ranks: Iterable[int], timeout_s: float
) -> dict[int, socket.socket]:
    """The connections of these ranks; strangers are turned away. Raises `Unavailable` where one
    does not come within `timeout_s`."""
    end = time.monotonic() + timeout_s
    missing = set(ranks)
    found: dict[int, socket.socket] = {}
    while missing:
        listening.settimeout(max(_LEAST_WAIT_S, end - time.monotonic()))
        try:
            connection, _ = listening.accept()
        except TimeoutError as error:
            for connection in found.values():
                connection.close()
            raise Unavailable(
                f"rank {min(missing)} has not joined within {timeout_s:g} s"
            ) from error
        rank = _greet(connection, token)
        if rank in missing:
            missing.discard(rank)
            connection.settimeout(None)
            found[rank] = connection
        else:
            connection.close()
    return found


def _greet(connection: socket.socket, token: bytes) -> int | None:
    """The rank of who has connected; None for a stranger."""
    connection.settimeout(_HELLO_TIMEOUT_S)
    try:
        hello = read_exactly(connection, _HELLO.size)
    except TimeoutError:
        return None
    if hello is None:
        return None
    theirs, rank = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(theirs, token) else None
