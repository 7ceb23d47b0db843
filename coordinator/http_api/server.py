"""Listens for HTTP inside the coordinator's own event loop, with a limit on the number of
connections and one of time for every phase of them.

uvicorn bounds the time between two requests only. Here a connection that has not sent the complete
headers of a request is closed after `HTTP_HEADERS_S`, counted from its TCP accept or from the first
byte of the next request, and bytes that trickle in do not extend that. When all places are taken,
a connection without a request makes room for a new one, so that idle sockets cannot keep callers
out. One whose client does not read its answer is closed after `HTTP_STUCK_WRITE_S`. When the server
stops, those without a request have `HTTP_LAST_REQUEST_S` for a last one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coordinator.auth.access_control import OPEN, AccessControl
from coordinator.http_api.app import Metrics, build_app
from coordinator.service import CoordinatorService
from outrider.config import is_loopback
from outrider.errors import ConfigError, check
from outrider.files import FileWatch
from outrider.limits import (
    HTTP_CONNECTIONS_MAX,
    HTTP_HEADERS_S,
    HTTP_KEEP_ALIVE_S,
    HTTP_LAST_REQUEST_S,
    HTTP_STUCK_WRITE_S,
    KEY_FILE_LOOK_MS,
)
from outrider.transport.server import is_taken

if TYPE_CHECKING:
    from outrider.telemetry.metrics import HttpTimes

_log = logging.getLogger(__name__)

BACKLOG: Final = 2048
"""Connections that the kernel keeps until they are accepted."""
CLOSE_S: Final = 2.0
"""What requests that were told to end may take to say so."""
_ACCEPT_RETRY_S: Final = 0.1
"""Between two attempts to accept where the process has no file descriptor left."""
_ACCEPTS_MAX: Final = 64
"""Connections that are accepted before the event loop does something else ..."""
_LAST_ACCEPTS_MAX: Final = 2 * BACKLOG
"""... and before the socket is closed, however fast new ones come."""
_DRAIN_POLL_S: Final = 0.02
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """In PEM."""

    certificate: Path
    key: Path
    authority: Path | None = None
    """By which callers must have a certificate, too; None = they need none."""

    def watch(self) -> FileWatch:
        """Knows what they are now."""
        paths = [one for one in (self.certificate, self.key, self.authority) if one is not None]
        return FileWatch(paths, time.monotonic, KEY_FILE_LOOK_MS / 1e3)

    def read(self) -> ssl.SSLContext:
        """Raises `OSError` or `ValueError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key, password="")  # It asks no terminal.
        if self.authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.authority)
        return context


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where a server listens, and what it knows of its process."""

    host: str = "127.0.0.1"
    """Address to bind; the default is loopback, which only this machine reaches."""
    port: int = 0
    """0 = any free port."""
    shares_port: bool = False
    """Whether a later server that has `takes_over` may listen on the same port."""
    takes_over: bool = False
    """Whether the port may be held by a server that `shares_port`, whose place this one takes.
    Else a port that another process holds is refused."""
    metrics: Metrics | None = None
    """None = they are off."""
    access: AccessControl = OPEN
    """Who may call, and how much."""
    tls: TlsFiles | None = None
    """None = plain text. Files that change are read again; what cannot be read changes nothing."""
    times: HttpTimes | None = None
    """Hear of each request."""


class HttpConnection(H11Protocol):
    """One connection, from its accept on."""

    def __init__(self, config: uvicorn.Config, state: ServerState, open_: OpenConnections) -> None:
        super().__init__(config, state, app_state={})
        self._open = open_
        self._late: asyncio.TimerHandle | None = None
        """Breaks it off where it sends no complete headers, or does not end when told to."""
        self._stuck: asyncio.TimerHandle | None = None
        """Breaks it off where its client does not read."""
        self.connecting: asyncio.Task[Any] | None = None
        """Until its TLS handshake is complete."""

    @property
    def has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.has_request:
            self.await_headers()
        else:
            self._move(self._open.busy)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.has_request:
            return
        if self.conn.their_state is h11.IDLE or self.transport.is_closing():
            self._move(self._open.idle)
            if self.transport.is_closing():  # No timer of uvicorn's watches it any more.
                self._late = self.loop.call_later(HTTP_STUCK_WRITE_S, self.break_off)
        else:  # A body that was not read still comes. Its sender may read the answer first.
            self.await_headers()

    def await_headers(self) -> None:
        self._move(self._open.incomplete)
        self._late = self._late or self.loop.call_later(HTTP_HEADERS_S, self.break_off)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()  # Waits for the client to read its answer.
        self._late = self._late or self.loop.call_later(HTTP_STUCK_WRITE_S, self.break_off)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._stuck or self.loop.call_later(HTTP_STUCK_WRITE_S, self.break_off)

    def resume_writing(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        super().connection_lost(exc)

    def break_off(self) -> None:
        """Closes it, without waiting until its client has read what was sent."""
        self.forget()
        if self.connecting is not None:
            self.connecting.cancel()
        if self.transport is not None:
            self.transport.abort()

    def forget(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        self._move(None)

    def _move(self, place: dict[HttpConnection, None] | None) -> None:
        if place is not None and self in place:
            return
        if self._late is not None:
            self._late.cancel()
            self._late = None
        for one in (self._open.incomplete, self._open.idle, self._open.busy):
            one.pop(self, None)
        if place is not None:
            place[self] = None


class OpenConnections:
    """The connections of one server, by what they wait for; the oldest of each kind comes first."""

    def __init__(self) -> None:
        self.incomplete: dict[HttpConnection, None] = {}
        """Without complete headers, or in their TLS handshake."""
        self.idle: dict[HttpConnection, None] = {}
        """Between two requests."""
        self.busy: dict[HttpConnection, None] = {}
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            descriptors = 2 * HTTP_CONNECTIONS_MAX
        self.num_max = min(HTTP_CONNECTIONS_MAX, descriptors // 2)
        """They may be more where all have requests."""

    @property
    def num_waiting(self) -> int:
        return len(self.incomplete) + len(self.idle)

    def make_room(self) -> None:
        """Closes the one that has waited longest without a request, if there is one: one that has
        not sent any, else one that is idle."""
        connection = next(chain(self.incomplete, self.idle), None)
        if connection is not None:
            _log.debug("an HTTP connection without a request makes room for a new one")
            connection.break_off()


class HttpServer:
    """Serves a coordinator, from `start` to `stop`.

    Accepts by itself. Unlike `asyncio.Server` it counts connections whose TLS handshake is not
    complete, and can close them; and it loses none that the kernel has queued."""

    def __init__(self, service: CoordinatorService, options: HttpOptions) -> None:
        """Raises `OSError` or `ValueError` for files of TLS that are wrong."""
        self._options = options
        self._tls_watch = (
            None if options.tls is None else options.tls.watch()
        )  # Before they are read.
        self._tls = None if options.tls is None else options.tls.read()
        self._open = OpenConnections()
        self._closing = asyncio.Event()
        config = uvicorn.Config(
            build_app(
                service,
                self._closing,
                options.metrics,
                options.access,
                options.times,
                _own_names(options),
            ),
            lifespan="off",
            ws="none",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=HTTP_KEEP_ALIVE_S,
            limit_concurrency=self._open.num_max + 1,  # As many are served, one more is refused.
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._listening: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._failed = False

    @property
    def address(self) -> str:
        check(self._listening is not None, "the server has not been started")
        return self._address

    @property
    def failed(self) -> bool:
        return self._failed

    async def start(self) -> None:
        """Listens. Raises `ConfigError` where the address cannot be had."""
        self._listening = _bind(self._options)
        self._address = f"{_in_url(self._options.host)}:{self._listening.getsockname()[1]}"
        # In place of `uvicorn.Server.startup`, which accepts without limits.
        self._server.servers = []
        self._server.started = True
        self._serving = asyncio.create_task(self._serve(self._listening))

    async def _serve(self, listening: socket.socket) -> None:
        # As `uvicorn.Server.serve`, but signals stay with the process.
        self._listen(listening)
        try:
            await self._server.main_loop()
        except Exception:  # noqa: BLE001 (seen by `failed`)
            _log.exception("the HTTP server has failed, and stops")
            self._failed = True
        asyncio.get_running_loop().remove_reader(listening)
        with suppress(OSError):
            self._accept_queued(listening, _LAST_ACCEPTS_MAX)
        listening.close()  # The kernel resets what comes between.
        self._say_last()
        for _ in range(round(HTTP_LAST_REQUEST_S / _DRAIN_POLL_S)):
            if self._open.num_waiting:
                await asyncio.sleep(_DRAIN_POLL_S)
        for connection in [one for one in self._open.incomplete if one.connecting is not None]:
            connection.break_off()
        await self._server.shutdown()

    def _listen(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Waits for nothing, so that no connection is accepted and then lost."""
        try:
            self._accept_queued(listening, _ACCEPTS_MAX)
        except Exception as error:  # noqa: BLE001 (whatever it is, others are accepted)
            _log.warning("cannot accept an HTTP connection: %s", error)
            self._open.make_room()
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_RETRY_S, self._listen, listening)

    def _accept_queued(self, listening: socket.socket, num_max: int) -> None:
        for _ in range(num_max):
            try:
                client, _address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # None is left, or the one is gone.
            self._begin(client)

    def _begin(self, client: socket.socket) -> None:
        """Hands a connection to a protocol of its own. Where all places are taken, an older one
        without a request makes room for it."""
        client.setblocking(False)
        if self._tls_watch is not None and self._options.tls is not None:
            self._tls = self._tls_watch.news(self._options.tls.read) or self._tls
        if self._open.num_waiting + len(self._open.busy) >= self._open.num_max:
            self._open.make_room()
        connection = HttpConnection(self._server.config, self._server.server_state, self._open)
        connection.await_headers()

        def connected(task: asyncio.Task[Any]) -> None:
            connection.connecting = None
            if task.cancelled() or task.exception() is not None:
                client.close()  # A cancelled task may never have seen it.
                connection.forget()

        loop = asyncio.get_running_loop()
        connection.connecting = loop.create_task(
            loop.connect_accepted_socket(lambda: connection, client, ssl=self._tls)
        )
        connection.connecting.add_done_callback(connected)

    def _say_last(self) -> None:
        """Answers that have not begun say that their connection is closed after them."""
        state = self._server.server_state
        state.default_headers = [*state.default_headers, (b"connection", b"close")]
        for connection in state.connections:
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_started:
                cycle.default_headers = state.default_headers

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more connections, and on those that it has no more requests after
        `HTTP_LAST_REQUEST_S`. Ends requests that last longer than `grace_s` seconds: they are told
        that the server is shutting down."""
        if self._serving is None:
            return
        # Counted from when the last requests have come.
        left_s = max(0.0, grace_s - HTTP_LAST_REQUEST_S) + CLOSE_S
        self._server.config.timeout_graceful_shutdown = left_s  # type: ignore[assignment]
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=grace_s)
        self._closing.set()
        await self._serving


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_names(options: HttpOptions) -> frozenset[str]:
    """Those that its callers may use; none = any. Where nothing else keeps others out, a name of
    somebody else's means a web page that has led its own name here."""
    if options.access.asks_for_keys or not is_loopback(options.host):
        return frozenset()
    return _LOOPBACK_NAMES | {_in_url(options.host).lower()}


def _bind(options: HttpOptions) -> socket.socket:
    host, port = options.host, options.port
    try:
        if port and not options.takes_over and is_taken(host, port):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.create_server(
            address, family=family, backlog=BACKLOG, reuse_port=options.shares_port,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror or error} (0 = any free "
            "port)"
        ) from error
    bound.setblocking(False)
    return bound
