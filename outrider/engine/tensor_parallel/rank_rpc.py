"""TCP connections between the ranks of one model. Rank 0 is the leader, and the other ranks are its
followers. This module imports no numeric library."""

import hmac
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ConfigError, Unavailable
from outrider.limits import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, TENSOR_PARALLEL_SIZE_MAX

LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"{_TOKEN_BYTES}sq")
"""The first message on a connection: the secret token, and the sender's rank."""
_STRANGERS_MAX = 64  # if more connections have sent nothing yet, the oldest of them is closed
_KEEPALIVE_PROBES = 3


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of the leader's `TCPStore`, a table of the ranks' addresses. A process that
    knows the token may join."""

    host: str
    store_port: int
    num_ranks: int
    token: bytes = field(repr=False)


def open_rendezvous(host: str, num_ranks: int) -> tuple[Rendezvous, socket.socket]:
    """Opens a rendezvous on the leader, before the followers start. Also returns the listening
    socket for the `TCPStore`. Raises `ConfigError` if `host` is no address of this machine."""
    listening, port = listen(host)
    return Rendezvous(host, port, num_ranks, secrets.token_bytes(_TOKEN_BYTES)), listening


def listen(host: str) -> tuple[socket.socket, int]:
    """Listens on a free port of `host`. Returns the socket and the port."""
    try:
        listening = socket.create_server((host, 0), backlog=TENSOR_PARALLEL_SIZE_MAX)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
    return listening, int(listening.getsockname()[1])


def connect(rendezvous: Rendezvous, port: int, rank: int, timeout_s: float) -> socket.socket:
    """Connects `rank` to the rank that listens on `port`. Raises `Unavailable` if the other rank
    does not answer within `timeout_s`."""
    try:
        connection = socket.create_connection((rendezvous.host, port), timeout_s)
        connection.sendall(_HELLO.pack(rendezvous.token, rank))
    except OSError as error:
        raise Unavailable(f"the rank at port {port} does not answer: {error}") from error
    return connection


def accept(
    listening: socket.socket, token: bytes, ranks: Iterable[int], timeout_s: float
) -> dict[int, socket.socket]:
    """Waits until all `ranks` have connected, and returns their connections by rank. Closes any
    other connection. Raises `Unavailable` if a rank does not connect within `timeout_s`."""
    end = time.monotonic() + timeout_s
    missing, connections = set(ranks), dict[int, socket.socket]()
    silent: list[Any] = []  # connections that have sent nothing yet
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while missing and (left_s := end - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                connection: Any = key.fileobj
                if connection is listening:
                    silent.append(listening.accept()[0])
                    selector.register(silent[-1], selectors.EVENT_READ)
                    if len(silent) <= _STRANGERS_MAX:
                        continue
                    connection = silent[0]
                if connection not in silent:
                    continue  # This loop has just closed it to make room.
                silent.remove(connection)
                selector.unregister(connection)
                rank = _named_rank(connection, token)
                if rank in missing:
                    missing.discard(rank)
                    connections[rank] = connection
                else:
                    connection.close()
    for connection in [*silent, *(connections.values() if missing else ())]:
        connection.close()
    if missing:
        raise Unavailable(f"rank {min(missing)} has not joined within {timeout_s:g} s")
    return connections


def _named_rank(connection: socket.socket, token: bytes) -> int | None:
    """Returns the rank that a new connection names. Returns None if the received bytes are not a
    whole message with the right token."""
    try:
        hello = connection.recv(_HELLO.size, socket.MSG_DONTWAIT)
    except OSError:
        return None
    if len(hello) != _HELLO.size:
        return None
    theirs, rank = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(theirs, token) else None


def tune(connection: socket.socket) -> None:
    """Makes a connection send small messages at once, and notice if the peer's machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, KEEPALIVE_MS // 1000),
            (socket.TCP_KEEPINTVL, KEEPALIVE_TIMEOUT_MS // 1000),
            (socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
