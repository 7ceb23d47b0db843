"""An HTTP server in the coordinator's event loop: uvicorn with more limits.

- A client must send complete headers within `HTTP_HEADERS_S` after its connection is accepted, or
  after the first byte of a later request.
- The kernel breaks a connection if its client reads nothing for `HTTP_STUCK_WRITE_S` although the
  server has data to send.
- When the maximum number of connections is reached, each new connection replaces a connection
  without a request.

A stopping server first closes its listening socket, so that another server on the same port gets
new connections. For `HTTP_LAST_REQUEST_S`, it still serves requests on open connections. Then it
waits for the running requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import h11
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from coordinator.auth.access_control import OPEN, AccessControl
from coordinator.http_api.reading import error_body, error_response, to_json
from coordinator.http_api.schemas import ErrorBody
from outrider import limits
from outrider.config.deployment import CoordinatorConfig, is_loopback
from outrider.errors import ConfigError, Overloaded, Unavailable
from outrider.foundation.files import FileWatch
from outrider.transport.server import check_port

if TYPE_CHECKING:
    from outrider.telemetry.metrics import HttpTimes

_log = logging.getLogger(__name__)

BACKLOG = 2048
"""The kernel queues at most this many connections until they are accepted."""
_ACCEPTS = 16
"""asyncio accepts at most this many connections in a row. The server counts them only afterwards,
so a much larger number could use up all file descriptors."""
CLOSE_S = 2.0
"""Time for a response to send its last event when the server stops."""
_POLL_S = 0.02
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files for TLS, in PEM format."""

    certificate: Path
    key: Path
    authority: Path | None = None
    """The authority that signs clients' certificates. None = clients need no certificate."""

    @classmethod
    def of(cls, config: CoordinatorConfig) -> Self | None:
        """Returns None if the server has no TLS."""
        if not config.ssl_certfile:
            return None
        authority = Path(config.ssl_ca_certs) if config.ssl_ca_certs else None
        return cls(Path(config.ssl_certfile), Path(config.ssl_keyfile), authority)

    def read(self) -> ssl.SSLContext:
        """Raises `OSError` or `ValueError` if a file cannot be read or is invalid."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # If `password` were None, OpenSSL would ask for a password at the terminal.
        context.load_cert_chain(self.certificate, self.key, password="")
        if self.authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.authority)
        return context


Metrics = Callable[[], bytes]
"""A blocking function that returns the metrics in Prometheus' text format."""


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where and how a server listens, and what it serves."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 = any free port."""
    shares_port: bool = False
    """Whether a later server with `takes_over` may listen on the same port."""
    takes_over: bool = False
    """Whether this server may listen on the port of a server with `shares_port`."""
    metrics: Metrics = bytes
    access: AccessControl = OPEN
    tls: TlsFiles | None = None
    """None = no TLS. Changed files are read again. If the new files are invalid, the old
    certificates stay in use."""
    times: HttpTimes | None = None
    spools: bool = False
    """Whether the server is a gateway, which keeps long bodies in temporary files."""

    @property
    def hosts(self) -> frozenset[str]:
        """The allowed values of the header `Host`; empty = all. Only a server that has no API keys
        and listens on loopback limits the values. This prevents DNS rebinding, in which a web
        site's host name resolves to this machine, so that the site's pages can call this server."""
        if self.access.asks_for_keys or not is_loopback(self.host):
            return frozenset()
        return _LOOPBACK_NAMES | {_in_url(self.host).lower()}


class _State(IntEnum):
    """The state of a connection. To make room for a new connection, the server closes an
    `INCOMPLETE` connection or, if there is none, an `IDLE` connection."""

    INCOMPLETE = 0
    """The connection waits for complete headers, or for the TLS handshake."""
    IDLE = 1
    BUSY = 2


def connections_max(*, spools: bool = False) -> int:
    """The maximum number of a server's connections. For `spools`, see `HttpOptions`."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return limits.HTTP_CONNECTIONS_MAX
    files = limits.HTTP_FILES_PER_CONNECTION
    if spools:
        files = limits.HTTP_FILES_PER_CONNECTION_OF_GATEWAY
    return min(limits.HTTP_CONNECTIONS_MAX, descriptors // files)


class OpenConnections:
    """The connections of one server, by state."""

    def __init__(self, num_max: int) -> None:
        self.num_max = num_max
        """This number is exceeded only while all connections are busy."""
        # In an ordered dict, the first key is found at once, also after many removals.
        self._by_state: dict[_State, OrderedDict[HttpConnection, None]] = {
            state: OrderedDict() for state in _State
        }

    def __len__(self) -> int:
        return sum(map(len, self._by_state.values()))

    def __iter__(self) -> Iterator[HttpConnection]:
        for connections in self._by_state.values():
            yield from connections

    @property
    def are_busy(self) -> bool:
        return len(self) == len(self._by_state[_State.BUSY])

    def enter(self, connection: HttpConnection, state: _State) -> bool:
        """Returns whether the connection was in another state, or in none."""
        if connection in self._by_state[state]:
            return False
        self.leave(connection)
        self._by_state[state][connection] = None
        return True

    def leave(self, connection: HttpConnection) -> None:
        for connections in self._by_state.values():
            connections.pop(connection, None)

    def make_room(self) -> None:
        """At the limit, breaks off the connection that is longest in its state."""
        if len(self) < self.num_max:
            return
        for state in (_State.INCOMPLETE, _State.IDLE):
            for connection in self._by_state[state]:
                connection.break_off()
                return


class HttpConnection(H11Protocol):
    """A connection that slow and silent clients cannot hold. It makes room for itself, encrypts
    itself, notes its state in `OpenConnections`, and is broken off if its headers are late."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        others: OpenConnections,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(config, state, app_state={})
        self._open, self._tls = others, tls
        self._early = bytearray()
        """Decrypted bytes that arrived before `_encrypt` noticed the end of the handshake."""
        self.handshake: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        """The timer that closes the connection if its headers stay incomplete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._open.make_room()
        self._await_headers()
        if self._tls is None:
            super().connection_made(transport)
        else:
            self.transport = transport
            self.handshake = self.loop.create_task(self._encrypt(transport, self._tls))

    async def _encrypt(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        with suppress(OSError):
            encrypted = await self.loop.start_tls(transport, self, tls, server_side=True)
            self.handshake = None
            if not transport.is_closing():
                super().connection_made(cast(asyncio.Transport, encrypted))
                if self._early:
                    self.data_received(bytes(self._early))
                return
        self._leave_state()

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.handshake is not None:
            self._early += data
            return
        super().data_received(data)
        if self._has_request:
            self._enter(_State.BUSY)
        else:
            self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_request:
            return
        if self.conn.their_state is h11.IDLE or self.transport.is_closing():
            self._enter(_State.IDLE)
        else:  # The client must still send the rest of the body of the answered request.
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_state()
        super().connection_lost(exc)

    def break_off(self) -> None:
        self._leave_state()
        if self.handshake is not None:
            self.handshake.cancel()
        self.transport.abort()

    def _await_headers(self) -> None:
        self._enter(_State.INCOMPLETE)
        self._late = self._late or self.loop.call_later(limits.HTTP_HEADERS_S, self.break_off)

    def _enter(self, state: _State) -> None:
        if self._open.enter(self, state):
            self._forget_headers()

    def _leave_state(self) -> None:
        self._forget_headers()
        self._open.leave(self)

    def _forget_headers(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpServer:
    """Serves an application, from `start` to `stop`."""

    def __init__(self, options: HttpOptions, app: ASGIApp) -> None:
        """Raises `OSError` or `ValueError` if the TLS files cannot be read."""
        self._options, self._app = options, app
        self._tls = None
        if (tls := options.tls) is not None:
            self._tls = FileWatch([tls.certificate, tls.key, tls.authority], tls.read)
        self._open = OpenConnections(connections_max(spools=options.spools))
        config = uvicorn.Config(
            self._answer,
            http=cast(Any, self._connect),  # Only called, so it need not be a class.
            backlog=_ACCEPTS,
            interface="asgi3",
            lifespan="off",
            ws="none",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.HTTP_KEEP_ALIVE_S,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self.address = ""
        """`HOST:PORT`. Empty before the server has started."""
        self._serving: asyncio.Task[None] | None = None
        self.failed = False

    async def start(self) -> None:
        """Begins to listen. Raises `ConfigError` if the address cannot be bound."""
        listening = _bind(self._options)
        self.address = f"{_in_url(self._options.host)}:{listening.getsockname()[1]}"
        await self._server.startup(sockets=[listening])
        listening.listen(BACKLOG)  # uvicorn has limited the kernel's queue to `_ACCEPTS`.
        self._serving = asyncio.create_task(self._serve(listening))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request, and records its duration. Refuses a request on a connection beyond the
        limit. While the server stops, each response closes its connection. If the request is
        cancelled before the response has begun, for example while the body arrives, responds with
        an error."""
        status: int | None = None

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._server.should_exit or is_refused:
                    last = (b"connection", b"close")
                    message = {**message, "headers": [*message["headers"], last]}
            await send(message)

        begun, most = time.monotonic(), self._open.num_max
        is_refused = len(self._open) > most
        try:
            if is_refused:
                message = f"the server has {most} connections, the most allowed; try again later"
                refusal = error_response(
                    Overloaded(message, limit="http_connections", of_server=True)
                )
                await refusal(scope, receive, send_noted)
            else:
                await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:
            if status is not None:
                raise
            await error_response(_stopping())(scope, receive, send_noted)
        finally:
            if (times := self._options.times) is not None:
                route = getattr(scope.get("route"), "path", "")
                seconds = time.monotonic() - begun
                times.add(seconds, scope["method"], scope["scheme"], route, status)

    def _connect(self, **_: Any) -> HttpConnection:
        """Makes the protocol of a new connection. uvicorn's arguments are attributes of its server,
        too. uvicorn knows nothing of TLS, because it would see a connection only after the
        handshake, so that silent clients would not be counted."""
        tls = None if self._tls is None else self._tls.current()
        return HttpConnection(self._server.config, self._server.server_state, self._open, tls)

    async def _serve(self, listening: socket.socket) -> None:
        """Does what `uvicorn.Server.serve` does after its start, but handles no signals, and still
        serves requests that are on their way."""
        try:
            await self._server.main_loop()
        except Exception:  # noqa: BLE001 (the owner of the server looks at `failed`)
            _log.exception("the HTTP server has failed, and stops")
            self.failed = True
        await self._leave_port(listening)
        for _ in range(round(limits.HTTP_LAST_REQUEST_S / _POLL_S)):
            if not self._open.are_busy:
                await asyncio.sleep(_POLL_S)
        for connection in [
            connection for connection in self._open if connection.handshake is not None
        ]:
            connection.break_off()
        await self._server.shutdown()

    async def _leave_port(self, listening: socket.socket) -> None:
        """Closes the listening socket, and serves the connections that the kernel has queued."""
        queued: list[socket.socket] = []
        # Ends when the queue is empty (`accept` raises an error), or after `2 * BACKLOG` sockets.
        with suppress(OSError):
            queued.extend(listening.accept()[0] for _ in range(2 * BACKLOG))
        self._server.servers[0].close()  # The kernel resets all connections still in the queue.
        for client in queued:
            client.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(self._connect, client)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        if self._serving is not None:
            await asyncio.wait([self._serving])

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stops the server. Requests that still run after `grace_s` seconds get an error."""
        if self._serving is None:
            return
        # uvicorn's time limit begins after `limits.HTTP_LAST_REQUEST_S`.
        left_s = max(0.0, grace_s - limits.HTTP_LAST_REQUEST_S) + CLOSE_S
        self._server.config.timeout_graceful_shutdown = math.ceil(left_s)
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=grace_s)
        for task in [*self._server.server_state.tasks]:
            task.cancel()
        await self._serving


class LiveResponse(Response):
    """The response to a request whose body has been read. When the client disconnects, `_respond`
    is cancelled. If the server cancels an incomplete response, `Unavailable` replaces the
    cancellation. An error before the response begins is raised. A later error is the last event."""

    _has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        responding = asyncio.create_task(self._respond(scope, receive, send))
        tasks = (responding, asyncio.create_task(disconnected()))
        try:
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if responding.done():
                    responding.result()
            except asyncio.CancelledError:
                if not responding.done():
                    raise _stopping() from None
                responding.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except Exception as error:
            if not self._has_begun:
                raise
            await send_part(send, self._error_events(error_body(error)), more=False)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _begin(self, send: Send, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Sends the status and headers. Further calls do nothing."""
        if not self._has_begun:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            self._has_begun = True

    def _error_events(self, error: ErrorBody) -> bytes:
        return b"data: " + to_json(error) + b"\n\n"


async def metrics_response(metrics: Metrics) -> Response:
    return Response(await asyncio.to_thread(metrics), media_type="text/plain; version=0.0.4")


def _stopping() -> Unavailable:
    return Unavailable("this server is shutting down")


async def send_part(send: Send, body: bytes = b"", *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bind(options: HttpOptions) -> socket.socket:
    host, port = options.host, options.port
    try:
        if port and not options.takes_over:
            check_port(host, port)
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # If a name has IPv4 and IPv6 addresses, IPv4 is preferred.
        family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        bound = socket.create_server(
            address,
            family=family,
            reuse_port=options.shares_port,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        reason = f"{error.strerror or error} (port 0 = any free port)"
        raise ConfigError(f"cannot listen on {host}:{port} for HTTP: {reason}") from error
    bound.setblocking(False)
    # Accepted connections inherit this option.
    timeout_ms = round(limits.HTTP_STUCK_WRITE_S * 1e3)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    return bound
