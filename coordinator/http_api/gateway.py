"""A proxy that resumes broken streams for clients that cannot resume them.

    client --- gateway --- coordinator A    dies in the middle of a stream
                      \\--- coordinator B    goes on after the last event that the client has

The gateway forwards each request to a coordinator. If that coordinator does not answer, or cannot
serve the request now, the gateway tries the next coordinator. To resume a stream, the gateway
repeats the request with the same `Idempotency-Key`, and with the id of the last event that the
client has (docs/http.md). If the client gives no `Idempotency-Key`, the gateway adds one. So it
keeps each body until the answer ends. Longer bodies are in temporary files.
"""

import asyncio
import logging
import math
import os
import re
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from random import random
from typing import IO

import httpx2
from fastapi import FastAPI, HTTPException, Request, Response
from starlette.types import Receive, Scope, Send

from coordinator.auth.access_control import OPEN, AccessControl
from coordinator.http_api.incoming import IncomingBodies
from coordinator.http_api.reading import SERVER_FULL, AuthenticationMiddleware, add_error_handlers
from coordinator.http_api.server import LiveResponse, Metrics, metrics_response, send_part
from outrider.client.client import RESUMED_TIMEOUT_S
from outrider.client.failover import AVOIDED_S, RESUME_TIMEOUT_S, EndpointPool
from outrider.errors import StreamBroken, Unavailable
from outrider.foundation.api_keys import ANYBODY
from outrider.foundation.backoff import backoff
from outrider.limits import DEADLINE_MS_DEFAULT, DEADLINE_MS_MAX, HTTP_STUCK_WRITE_S

_log = logging.getLogger(__name__)

KEY = "idempotency-key"
LAST_ID = "last-event-id"
CONNECT_S = 5.0
_BROKEN = (httpx2.ReadError, httpx2.RemoteProtocolError)
WORKED_S = 1.0
"""If a connection breaks more than this time after the request was sent, the coordinator probably
worked on the request. The gateway then counts failures from 0 again."""
_WAIT_S = (0.05, 1.0)
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_PASSING = frozenset({409, 502, 503})
"""After these statuses, the gateway tries the next coordinator."""
_PASSING_LATER = _PASSING | {429}
"""Used instead of `_PASSING` once the response to the client has begun."""
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_ASKED = _HOP_BY_HOP | {"accept-encoding", "content-length", "expect", "host", LAST_ID}
_NOT_TOLD = _HOP_BY_HOP | {"date"}
_INTERRUPTED = b'"type":"service_unavailable_error"'
"""If an event without an id contains these bytes, another coordinator can continue the stream.
Generated text cannot contain these bytes, because its quotes are escaped."""
_SERVER_FULL = f'"code":"{SERVER_FULL}"'.encode()
_ID = re.compile(rb"^id:(.*)", re.MULTILINE)
_DEADLINE = re.compile(rb'"deadline_ms"\s*:\s*(\d{1,9})(?![\d.eE])')
"""Finds the deadline in a body. Parsing the whole body would delay all other streams."""
_PART_BYTES = 64 * 2**10
"""A body is sent in parts of this size."""
_TIMEOUT = httpx2.Timeout(
    connect=CONNECT_S, read=RESUMED_TIMEOUT_S, write=HTTP_STUCK_WRITE_S, pool=None
)
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""With these socket options, a connection breaks about 11 s after its peer stops answering."""


def open_transport(verify: ssl.SSLContext | bool = True) -> httpx2.AsyncHTTPTransport:
    """Makes a transport to coordinators. `verify` says how their certificates are checked."""
    return httpx2.AsyncHTTPTransport(
        verify=verify,
        trust_env=False,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=256),
        socket_options=_KEEP_ALIVE,
    )


@dataclass(frozen=True, slots=True)
class Coordinators:
    """The coordinators of a gateway. The pool has their base URLs."""

    pool: EndpointPool[str]
    transport: httpx2.AsyncBaseTransport = field(default_factory=open_transport)
    tls_name: str = ""
    """The host name in the coordinators' certificates. Empty = the host of the URL."""


class ForwardedResponse(LiveResponse):
    """The response to a client, made of the responses of one or several coordinators."""

    _body: IO[bytes]
    """The body of the request, while the response is called."""

    def __init__(
        self, coordinators: Coordinators, bodies: IncomingBodies | None, request: Request
    ) -> None:
        """Without `bodies`, forwards the request without its body."""
        super().__init__()
        self._coordinators, self._bodies, self._request = coordinators, bodies, request
        self._method = request.method
        query = request.scope["query_string"]
        self._target = request.scope["raw_path"] + (b"?" + query if query else b"")
        if not self._target.startswith(b"/"):
            raise HTTPException(400, "the path must begin with /")
        self._passed = _passed_on(request.headers.raw, _NOT_ASKED)
        if request.method == "POST" and KEY not in request.headers:
            self._passed.append((KEY.encode(), secrets.token_hex(16).encode()))
        self._deadline_s = 0.0
        self._last_id = request.headers.get(LAST_ID, "")
        self._has_sent = False
        self._num_failures = 0
        """Number of failed tries since the last event."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bodies, empty = self._bodies, nullcontext[IO[bytes]](BytesIO())
        async with empty if bodies is None else bodies.read(self._request) as self._body:
            match = _DEADLINE.search(self._body.read())
            deadline_ms = DEADLINE_MS_DEFAULT if match is None else int(match[1])
            self._deadline_s = min(deadline_ms, DEADLINE_MS_MAX) / 1e3
            await super().__call__(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(send)
        if answer is None:
            await send_part(send, more=False)
        elif self._has_begun:  # The answer is an error, which becomes the last event.
            await send_part(send, b"data: " + bytes(answer.body) + b"\n\n", more=False)
        else:
            await answer(scope, receive, send)

    async def _answer(self, send: Send) -> Response | None:
        """Asks one coordinator after another until one serves the request or refuses it for good.
        Returns the result of `_ask`. When no further try is allowed, returns the refusal of the
        last coordinator. If this coordinator did not answer, raises `Unavailable`."""
        pool, now = self._coordinators.pool, asyncio.get_running_loop().time
        began, url, failing_since = now(), None, math.inf
        while True:
            asked_at, avoided_s = now(), 0.0
            answer: Response | None = None
            try:
                url = url or pool.begin()
                answer = await self._ask(url, send)
                passing = _PASSING_LATER if self._has_begun else _PASSING
                if answer is None or not (
                    answer.status_code in passing or self._may_pass_full(answer)
                ):
                    return answer
                if answer.headers.get("x-should-retry") == "false":
                    return answer
                failure: object = f"status {answer.status_code}"
            except (httpx2.TransportError, StreamBroken) as error:
                failure, avoided_s = error, AVOIDED_S
                pool.renew()
                if isinstance(error, _BROKEN) and now() > asked_at + WORKED_S:
                    failing_since, self._num_failures = math.inf, 0
            _log.info("%s failed to answer %s: %r", url, self._target.decode(), failure)
            wait_s = backoff(*_WAIT_S, self._num_failures, random)
            self._num_failures += 1
            failing_since = min(failing_since, now())
            until = began + self._deadline_s
            if not self._has_begun:
                until = min(until, failing_since + RESUME_TIMEOUT_S)
            if now() + wait_s >= until or not self._may_ask_again:
                if answer is not None:
                    return answer
                raise Unavailable(f"no coordinator answers: {_reason(failure)}")
            url = None if url is None else pool.after(url, avoided_s)
            await asyncio.sleep(wait_s)

    def _may_pass_full(self, answer: Response) -> bool:
        """Whether the coordinator has reached a limit of its own, and another may not have."""
        is_last = self._num_failures + 1 >= len(self._coordinators.pool.each)
        return answer.status_code == 429 and _SERVER_FULL in bytes(answer.body) and not is_last

    @property
    def _may_ask_again(self) -> bool:
        """A stream whose events have no ids cannot be resumed. A request other than `POST`
        may be a probe, which must fail soon. So each coordinator gets such a request only once."""
        if self._method == "POST":
            return bool(self._last_id) or not self._has_sent
        return self._num_failures < len(self._coordinators.pool.each)

    async def _ask(self, url: str, send: Send) -> Response | None:
        """Asks one coordinator, and returns the response. If the response is a stream, sends its
        events to the client, and returns None. Raises `TransportError` for incomplete responses."""
        headers = list(self._passed)
        if self._last_id:
            headers.append((LAST_ID.encode(), self._last_id.encode("latin-1")))
        if size := self._body.seek(0, os.SEEK_END):
            headers.append((b"content-length", b"%d" % size))
        extensions: dict[str, object] = {"timeout": _TIMEOUT.as_dict()}
        if self._coordinators.tls_name:
            extensions["sni_hostname"] = self._coordinators.tls_name
        outgoing = httpx2.Request(
            self._method,
            httpx2.URL(url).copy_with(raw_path=self._target),
            headers=headers,
            content=_parts(self._body) if size else None,
            extensions=extensions,
        )
        response = await self._coordinators.transport.handle_async_request(outgoing)
        try:
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                await self._pass_on(response, send)
                return None
            body = b"".join([part async for part in response.aiter_raw()])
            answer = Response(body, response.status_code)
            answer.raw_headers = _passed_on(response.headers.raw, _NOT_TOLD)
            return answer
        finally:
            await response.aclose()

    async def _pass_on(self, response: httpx2.Response, send: Send) -> None:
        await self._begin(send, response.status_code, _passed_on(response.headers.raw, _NOT_TOLD))
        async with aclosing(_events(response)) as events:
            async for event in events:
                named = _ID.search(event)
                event_id = "" if named is None else named[1].strip().decode("latin-1")
                if not event_id and _INTERRUPTED in event:
                    raise httpx2.RemoteProtocolError("the coordinator has ended the stream")
                await send_part(send, event)
                self._last_id, self._has_sent = event_id or self._last_id, True
                self._num_failures = 0


async def _parts(file: IO[bytes]) -> AsyncIterator[bytes]:
    file.seek(0)
    while part := file.read(_PART_BYTES):
        yield part


def _reason(error: object) -> str:
    """Returns an error's text. If it has none, returns its class's name, such as `read error`."""
    return str(error) or re.sub("(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()


async def _events(response: httpx2.Response) -> AsyncGenerator[bytes]:
    left = b""
    async for part in response.aiter_raw():
        *whole, left = (left + part).split(b"\n\n")
        for event in whole:
            yield event + b"\n\n"


def _passed_on(
    headers: Sequence[tuple[bytes, bytes]], without: Collection[str]
) -> list[tuple[bytes, bytes]]:
    """Leaves out the headers in `without`, and all headers that the header `connection` names."""
    named = httpx2.Headers(headers).get("connection", "").lower().split(",")
    left_out = {*without, *map(str.strip, named)}
    lowered = [(name.lower(), value) for name, value in headers]
    return [header for header in lowered if header[0].decode("latin-1") not in left_out]


def build_gateway(
    coordinators: Coordinators,
    hosts: Collection[str] = (),
    access: AccessControl = OPEN,
    metrics: Metrics = bytes,
) -> FastAPI:
    """Makes the application of a gateway. For `hosts`, see `HttpOptions.hosts`. `access` knows the
    API keys of the coordinators, or asks for no keys. `metrics` are those of the gateway."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(AuthenticationMiddleware, access=access, hosts=hosts)
    add_error_handlers(app)
    bodies = IncomingBodies(by_address=True, spools=True)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return await metrics_response(metrics)

    @app.api_route("/{path:path}", methods=list(_METHODS))
    async def forward(request: Request) -> Response:
        is_known = request.state.caller is not ANYBODY or not access.asks_for_keys
        return ForwardedResponse(coordinators, bodies if is_known else None, request)

    return app
