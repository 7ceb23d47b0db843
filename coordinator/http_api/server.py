"""Listens for HTTP inside the coordinator's own event loop; with TLS, by the newest certificate in
its files."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from coordinator.auth.access_control import OPEN, AccessControl
from coordinator.http_api.app import Metrics, build_app
from coordinator.http_api.connections import (
    BACKLOG,
    Acceptor,
    HttpConnection,
    OpenConnections,
    connections_max,
)
from coordinator.service import CoordinatorService
from outrider.config import is_loopback
from outrider.errors import ConfigError, check
from outrider.files import FileWatch
from outrider.limits import HTTP_KEEP_ALIVE_S, HTTP_LAST_REQUEST_S, KEY_FILE_LOOK_MS
from outrider.transport.server import is_taken

if TYPE_CHECKING:
    from outrider.telemetry.http_times import HttpTimes


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """In PEM."""

    certificate: Path
    key: Path
    authority: Path | None = None
    """By which callers must have a certificate, too; None = they need none."""

    @property
    def asks_callers(self) -> ssl.VerifyMode:
        return ssl.CERT_NONE if self.authority is None else ssl.CERT_REQUIRED


class ShownCertificate:
    """Reads files again when they have changed, as a connection begins. What cannot be read changes
    nothing."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        paths = [one for one in (files.certificate, files.key, files.authority) if one is not None]
        self._files = files
        self._watch = FileWatch(paths, clock, KEY_FILE_LOOK_MS / 1e3)
        self._newest: ssl.SSLContext | None = None

    def follow(self, context: ssl.SSLContext) -> None:
        context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Asked in each handshake, whether the client names a host or not."""
        self._newest = self._watch.news(lambda: _read(self._files)) or self._newest
        if self._newest is not None:
            connection.context = self._newest


def _read(files: TlsFiles) -> ssl.SSLContext:
    """Raises `OSError` or `ValueError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key, password="")  # It asks no terminal.
    context.verify_mode = files.asks_callers
    if files.authority is not None:
        context.load_verify_locations(files.authority)
    return context


_log = logging.getLogger(__name__)

_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
CLOSE_S: Final = 2.0
"""What requests that were told to end may take to say so."""


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
    """None = plain text."""
    times: HttpTimes | None = None
    """Hear of each request."""


class HttpServer:
    """Serves a coordinator, from `start` to `stop`."""

    def __init__(self, service: CoordinatorService, options: HttpOptions) -> None:
        self._options = options
        self._closing = asyncio.Event()
        tls = options.tls
        shown = None if tls is None else ShownCertificate(tls)  # Looks before they are read.
        self._num_max = connections_max()
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
            limit_concurrency=self._num_max + 1,  # As many are served, one more is refused.
            **_tls(tls),
        )
        config.load()
        if shown is not None and config.ssl is not None:
            shown.follow(config.ssl)
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._serving: asyncio.Task[None] | None = None
        self._failed = False
        self._address = ""

    @property
    def address(self) -> str:
        check(bool(self._address), "the server has not been started")
        return self._address

    @property
    def failed(self) -> bool:
        return self._failed

    async def start(self) -> None:
        """Listens. Raises `ConfigError` where the address cannot be had."""
        options = self._options
        listening = _bind(options)
        self._address = f"{_in_url(self._options.host)}:{listening.getsockname()[1]}"
        # In place of `uvicorn.Server.startup`, which accepts without limits.
        config, state = self._server.config, self._server.server_state
        open_ = OpenConnections(self._num_max)
        acceptor = Acceptor(
            listening, config.ssl, open_, lambda: HttpConnection(config, state, open_)
        )
        acceptor.start()
        self._server.servers = []
        self._server.started = True
        self._serving = asyncio.create_task(self._serve(acceptor, open_))

    async def _serve(self, acceptor: Acceptor, open_: OpenConnections) -> None:
        # As `uvicorn.Server.serve`, but signals stay with the process.
        try:
            await self._server.main_loop()
        except Exception:  # noqa: BLE001 (seen by `failed`)
            _log.exception("the HTTP server has failed, and stops")
            self._failed = True
        acceptor.stop()
        self._say_last()
        await open_.drain(HTTP_LAST_REQUEST_S)
        acceptor.close()
        await self._server.shutdown()

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


def _tls(files: TlsFiles | None) -> dict[str, Any]:
    if files is None:
        return {}
    return {
        "ssl_certfile": files.certificate,
        "ssl_keyfile": files.key,
        "ssl_ca_certs": None if files.authority is None else str(files.authority),
        "ssl_cert_reqs": files.asks_callers,
    }


def _bind(options: HttpOptions) -> socket.socket:
    host, port = options.host, options.port
    try:
        if port and not options.takes_over and is_taken(host, port):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, number)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if options.shares_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror or error} (0 = any free "
            "port)"
        ) from error
    return bound
