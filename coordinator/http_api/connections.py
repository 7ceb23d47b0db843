"""HTTP connections with a time limit for every phase, and a limit on their number.

uvicorn bounds the time between two requests only. Here a connection that has not sent the complete
headers of a request is closed after `HTTP_HEADERS_S`, counted from its TCP accept or from the first
byte of the next request, and bytes that trickle in do not extend that. When all places are taken,
a connection without a request makes room for a new one, so that idle sockets cannot keep callers
out. One whose client does not read its answer is closed after `HTTP_STUCK_WRITE_S`. When the server
stops, those without a request have `HTTP_LAST_REQUEST_S` for a last one.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from outrider.limits import (
    HTTP_CONNECTIONS_MAX,
    HTTP_HEADERS_S,
    HTTP_KEEP_ALIVE_S,
    HTTP_STUCK_WRITE_S,
)

_log = logging.getLogger(__name__)

BACKLOG: Final = 2048
"""Connections that the kernel keeps until they are accepted."""
_ACCEPT_RETRY_S: Final = 0.1
"""Between two attempts to accept where the process has no file descriptor left."""
_ACCEPTS_MAX: Final = 64
"""Connections that are accepted before the event loop does something else ..."""
_LAST_ACCEPTS_MAX: Final = 2 * BACKLOG
"""... and before the socket is closed, however fast new ones come."""
_DRAIN_POLL_S: Final = 0.02
_WARNING_PERIOD_S: Final = 60.0


def connections_max() -> int:
    """Connections to one HTTP server: `HTTP_CONNECTIONS_MAX`, or half of the file descriptors that
    the process may have where that is less."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return HTTP_CONNECTIONS_MAX
    return min(HTTP_CONNECTIONS_MAX, descriptors // 2)


class HttpConnection(H11Protocol):
    """One connection, from its accept on."""

    def __init__(self, config: Config, state: ServerState, open_: OpenConnections) -> None:
        super().__init__(config, state, app_state={})
        self._open = open_
        self._giving_up: asyncio.TimerHandle | None = None

    @property
    def has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.has_request:
            self._open.busy(self)
        else:
            self._open.incomplete(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.has_request:
            return
        if self.conn.their_state is h11.IDLE or self.transport.is_closing():
            self._open.idle(self)
        else:  # A body that was not read still comes. Its sender may read the answer first.
            self._open.incomplete(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._giving_up is None:
            self._giving_up = self.loop.call_later(HTTP_STUCK_WRITE_S, self._give_up)

    def resume_writing(self) -> None:
        self._stop_giving_up()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_giving_up()
        self._open.closed(self)
        super().connection_lost(exc)

    def _stop_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        _log.debug("a client has not read its answer for %g s", HTTP_STUCK_WRITE_S)
        self.transport.abort()  # `close` would wait until the client has read.


class OpenConnections:
    """The connections of one server, by what they wait for."""

    def __init__(self, num_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `num_max` where some of them have no request. `clock` counts seconds."""
        self._num_max = num_max
        self._clock = clock
        self._incomplete: dict[HttpConnection, float] = {}
        """Without complete headers: when they are closed. The oldest comes first."""
        self._idle: dict[HttpConnection, float] = {}
        """Between two requests: when they are broken off. uvicorn closes them before, which waits
        for the client to read its answer. The oldest comes first."""
        self._busy: set[HttpConnection] = set()
        self._connecting: dict[HttpConnection, asyncio.Task[Any]] = {}
        """Those whose TLS handshake is not complete; they are incomplete, too."""
        self._num_evicted = 0
        self._warned_at = -_WARNING_PERIOD_S

    def __len__(self) -> int:
        return len(self._incomplete) + len(self._idle) + len(self._busy)

    def accepted(self, connection: HttpConnection, connecting: asyncio.Task[Any]) -> None:
        """A new one, which `connecting` hands a transport to. An older one makes room for it: one
        that has not sent a request, else one that is idle. Where all have requests, none does."""
        if len(self) >= self._num_max:
            self.make_room()
        self._connecting[connection] = connecting
        self.incomplete(connection)

    def connected(self, connection: HttpConnection) -> None:
        """Its handshake is complete, or has failed: then it has no transport."""
        self._connecting.pop(connection, None)
        if connection.transport is None:
            self.closed(connection)

    def incomplete(self, connection: HttpConnection) -> None:
        if connection not in self._incomplete:
            self.closed(connection)
            self._incomplete[connection] = self._clock() + HTTP_HEADERS_S

    def idle(self, connection: HttpConnection) -> None:
        self.closed(connection)
        self._idle[connection] = self._clock() + HTTP_KEEP_ALIVE_S + HTTP_STUCK_WRITE_S

    def busy(self, connection: HttpConnection) -> None:
        if connection not in self._busy:
            self.closed(connection)
            self._busy.add(connection)

    def closed(self, connection: HttpConnection) -> None:
        self._incomplete.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def close_late(self) -> None:
        now = self._clock()
        for waiting in (self._incomplete, self._idle):
            while waiting:
                connection, end = next(iter(waiting.items()))
                if end > now:
                    break
                self._close(connection)

    async def drain(self, wait_s: float) -> None:
        """Waits until each one has a request or has gone, at most so many seconds."""
        for _ in range(round(wait_s / _DRAIN_POLL_S)):
            if not self._incomplete and not self._idle:
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    def close_connecting(self) -> None:
        for connection in list(self._connecting):
            self._close(connection)

    def make_room(self) -> None:
        """Closes the one that has waited longest without a request, if there is one."""
        for waiting in (self._incomplete, self._idle):
            if waiting:
                self._close(next(iter(waiting)))
                self._num_evicted += 1
                break
        if self._clock() - self._warned_at >= _WARNING_PERIOD_S:
            self._warned_at = self._clock()
            _log.warning(
                "all %d HTTP connections are taken; %d without a request were closed for new ones",
                self._num_max, self._num_evicted,
            )  # fmt: skip

    def _close(self, connection: HttpConnection) -> None:
        self.closed(connection)
        connecting = self._connecting.pop(connection, None)
        if connecting is not None:
            connecting.cancel()
        if connection.transport is not None:
            connection.transport.abort()


class Acceptor:
    """Accepts the connections of one listening socket, from `start` to `stop`. Unlike
    `asyncio.Server` it counts those whose TLS handshake is not complete, and can close them; and it
    loses none that the kernel has queued."""

    def __init__(
        self,
        listening: socket.socket,
        tls: ssl.SSLContext | None,
        open_: OpenConnections,
        new_connection: Callable[[], HttpConnection],
    ) -> None:
        self._listening = listening
        self._tls = tls
        self._open = open_
        self._new_connection = new_connection
        self._loop = asyncio.get_running_loop()
        self._going_on: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept)
        self._expiring = self._loop.create_task(_expire(self._open))

    def stop(self) -> None:
        """Accepts what is queued, and closes the socket: the kernel resets what comes between."""
        if self._going_on is not None:
            self._going_on.cancel()
        self._loop.remove_reader(self._listening)
        self._accept_queued(_LAST_ACCEPTS_MAX)
        self._listening.close()

    def close(self) -> None:
        """Closes connections whose handshake is not complete, and expires none any more."""
        if self._expiring is not None:
            self._expiring.cancel()
        self._open.close_connecting()

    def _accept(self) -> None:
        if self._accept_queued(_ACCEPTS_MAX):
            return
        self._loop.remove_reader(self._listening)
        self._going_on = self._loop.call_later(
            _ACCEPT_RETRY_S, self._loop.add_reader, self._listening, self._accept
        )

    def _accept_queued(self, num_max: int) -> bool:
        """At most so many; whether there was no error. Raises nothing: the reader that calls this
        would be called again at once."""
        try:
            for _ in range(num_max):
                try:
                    client, _address = self._listening.accept()
                except BlockingIOError:
                    break
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    _log.warning("cannot accept an HTTP connection: %s", error.strerror or error)
                    self._open.make_room()
                    return False
                self._begin(client)
        except Exception:  # noqa: BLE001 (a bug, which must not end accepting)
            _log.exception("cannot accept an HTTP connection")
            return False
        return True

    def _begin(self, client: socket.socket) -> None:
        """Hands a connection to a protocol of its own; one that cannot be is closed."""
        connecting: asyncio.Task[Any] | None = None
        try:
            client.setblocking(False)
            connection = self._new_connection()
            connecting = self._loop.create_task(
                self._loop.connect_accepted_socket(lambda: connection, client, ssl=self._tls)
            )

            def connected(task: asyncio.Task[Any]) -> None:
                if task.cancelled() or task.exception() is not None:
                    client.close()  # A cancelled task may never have seen it.
                self._open.connected(connection)

            connecting.add_done_callback(connected)
            self._open.accepted(connection, connecting)
        except Exception:  # noqa: BLE001 (a bug, which concerns this connection alone)
            _log.exception("an HTTP connection is closed unserved")
            if connecting is not None:
                connecting.cancel()
            client.close()


async def _expire(open_: OpenConnections) -> None:
    while True:
        await asyncio.sleep(HTTP_HEADERS_S / 10)
        try:
            open_.close_late()
        except Exception:  # noqa: BLE001 (a bug; the others have their limits all the same)
            _log.exception("cannot close an HTTP connection")
