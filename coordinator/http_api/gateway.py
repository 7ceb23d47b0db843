"""Holds the connections of clients that cannot resume a stream, and resumes it behind them.

    client --- gateway --- coordinator A    dies in the middle of a stream
                      \\--- coordinator B    goes on behind the last event that the client has

It has no sessions, keys and limits of its own: each request goes to a coordinator as it came, with
its `Authorization`, and to the next one where that does not answer or cannot serve it now. One for
a generation carries an `Idempotency-Key`, the client's or one that is made here, by which every
coordinator knows its sessions. The events of a stream have ids: `Last-Event-ID` asks for those
behind one. Both are the coordinators' matter, see docs/http.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from random import random

import httpx2
from fastapi import FastAPI, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from coordinator.auth.access_control import OPEN
from coordinator.http_api.reading import (
    Entrance,
    Unsent,
    add_error_handlers,
    read_body,
    whole_body,
)
from coordinator.http_api.server import LiveResponse, send_part
from outrider.backoff import backoff
from outrider.client.client import RESUMED_TIMEOUT_S
from outrider.client.failover import AVOIDED_S, RESUME_TIMEOUT_S, EndpointPool
from outrider.errors import BadRequest, StreamBroken, Unavailable
from outrider.limits import DEADLINE_MS_DEFAULT, DEADLINE_MS_MAX, HTTP_STUCK_WRITE_S

_log = logging.getLogger(__name__)

KEY = "idempotency-key"
LAST_ID = "last-event-id"
CONNECT_S = 5.0
_BROKEN = (httpx2.ReadError, httpx2.RemoteProtocolError)
WORKED_S = 1.0
"""A coordinator that breaks off after so long had begun to work."""
_WAIT_S = (0.05, 1.0)
"""First and longest wait between two tries; see `backoff`."""
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_PASSING = frozenset({409, 502, 503})
"""Statuses of what another coordinator, or this one later, may serve ..."""
_PASSING_LATER = _PASSING | {429}
"""... and of what the client cannot be told any more, as its answer has begun."""
_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
_NOT_ASKED = _HOP_BY_HOP | {"accept-encoding", "content-length", "expect", "host", LAST_ID}
_NOT_TOLD = _HOP_BY_HOP | {"date"}
_INTERRUPTED = b'"type":"service_unavailable_error"'
"""In an event without an id: the coordinator ends the stream, not the request. In JSON it is no
part of a text, whose quotes are escaped."""
_TIMEOUT = httpx2.Timeout(
    connect=CONNECT_S, read=RESUMED_TIMEOUT_S, write=HTTP_STUCK_WRITE_S, pool=None
)
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""A machine that falls silent is given up after some 11 s."""


def open_transport(verify: ssl.SSLContext | bool = True) -> httpx2.AsyncHTTPTransport:
    """Connections to coordinators; `verify` says how one with TLS is known."""
    return httpx2.AsyncHTTPTransport(
        verify=verify,
        trust_env=False,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=256),
        socket_options=_KEEP_ALIVE,
    )


@dataclass(frozen=True, slots=True)
class Coordinators:
    """Where requests go."""

    pool: EndpointPool[str]
    """Of their base URLs."""
    transport: httpx2.AsyncBaseTransport = field(default_factory=open_transport)
    tls_name: str = ""
    """Name that their certificate has; empty = the host of their URL."""


class Refused(Exception):
    """A coordinator has answered that it cannot serve the request now."""

    def __init__(self, answer: Response) -> None:
        super().__init__(f"status {answer.status_code}")
        self.answer = answer


class Forwarded(LiveResponse):
    """The answer to one request, from whichever coordinators give it."""

    def __init__(
        self, coordinators: Coordinators, request: Request, body: bytes, closing: asyncio.Event
    ) -> None:
        """Raises `HTTPException` for a path that is none."""
        super().__init__(closing)
        self._coordinators = coordinators
        self._method, self._body = request.method, body
        query = request.scope["query_string"]
        self._target = request.scope["raw_path"] + (b"?" + query if query else b"")
        if not self._target.startswith(b"/"):
            raise HTTPException(400, "the path must begin with /")
        self._passed = _passed_on(request.headers.raw, _NOT_ASKED)
        if request.method == "POST" and KEY not in request.headers:
            self._passed.append((KEY.encode(), secrets.token_hex(16).encode()))
        self._last_id = request.headers.get(LAST_ID, "")
        self._has_told = False
        self._num_failures = 0
        """Since the last event."""

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Asks one coordinator after the other until the answer is whole, or the time is over."""
        pool, now = self._coordinators.pool, asyncio.get_running_loop().time
        began, url, failing_since = now(), None, math.inf
        while True:
            avoided_s, answer, asked_at = AVOIDED_S, None, now()
            try:
                url = url or pool.begin()
                answer = await self._ask(url, send)
                break
            except (httpx2.TransportError, StreamBroken) as error:
                failure: Exception = error
                pool.renew()
                if isinstance(error, _BROKEN) and now() > asked_at + WORKED_S:
                    failing_since, self._num_failures = math.inf, 0
            except Refused as error:
                failure, answer, avoided_s = error, error.answer, 0.0
            _log.info("%s has not answered %s: %r", url, self._target.decode(), failure)
            wait_s = backoff(*_WAIT_S, self._num_failures, random)
            self._num_failures += 1
            failing_since = min(failing_since, now())
            until = began + self._deadline_s
            if not self._has_begun:
                until = min(until, failing_since + RESUME_TIMEOUT_S)
            if now() + wait_s >= until or not self._may_ask_again:
                if answer is None:
                    raise Unavailable(f"no coordinator answers: {failure}") from failure
                break
            url = None if url is None else pool.after(url, avoided_s)
            await asyncio.sleep(wait_s)
        if answer is None:
            await send_part(send, more=False)
        elif self._has_begun:  # The error that ends a stream.
            await send_part(send, b"data: " + bytes(answer.body) + b"\n\n", more=False)
        else:
            await answer(scope, receive, send)

    @cached_property
    def _deadline_s(self) -> float:
        """The request's, counted from its arrival. A body that does not name the field is not
        parsed: that would hold up all other streams."""
        deadline_ms = None
        if b'"deadline_ms"' in self._body:
            try:
                body = read_body(self._body)
            except BadRequest:
                body = None
            deadline_ms = body.get("deadline_ms") if isinstance(body, dict) else None
        if not isinstance(deadline_ms, int):
            deadline_ms = DEADLINE_MS_DEFAULT
        return min(deadline_ms, DEADLINE_MS_MAX) / 1e3

    @property
    def _may_ask_again(self) -> bool:
        """Of what is no generation each coordinator is asked once, so that a probe hears soon of
        trouble. Nothing can be asked behind an event without an id."""
        if self._method == "POST":
            return bool(self._last_id) or not self._has_told
        return self._num_failures < len(self._coordinators.pool.each)

    async def _ask(self, url: str, send: Send) -> Response | None:
        """A whole answer, or None behind the last event of a stream. Raises `TransportError` where
        either does not come, and `Refused`."""
        headers = list(self._passed)
        if self._last_id:
            headers.append((LAST_ID.encode(), self._last_id.encode("latin-1")))
        extensions: dict[str, object] = {"timeout": _TIMEOUT.as_dict()}
        if self._coordinators.tls_name:
            extensions["sni_hostname"] = self._coordinators.tls_name
        asked = httpx2.Request(
            self._method, httpx2.URL(url).copy_with(raw_path=self._target), headers=headers,
            content=self._body or None, extensions=extensions,
        )  # fmt: skip
        found = await self._coordinators.transport.handle_async_request(asked)
        try:
            if found.headers.get("content-type", "").startswith("text/event-stream"):
                await self._pass_on(found, send)
                return None
            answer = Response(await _raw(found), found.status_code)
            answer.raw_headers = _passed_on(found.headers.raw, _NOT_TOLD)
        finally:
            await found.aclose()
        passing = _PASSING_LATER if self._has_begun else _PASSING
        if found.status_code in passing and found.headers.get("x-should-retry") != "false":
            raise Refused(answer)
        return answer

    async def _pass_on(self, found: httpx2.Response, send: Send) -> None:
        """The events of a stream, as they are."""
        if not self._has_begun:
            headers = _passed_on(found.headers.raw, _NOT_TOLD)
            await self._begin(send, found.status_code, headers)
        async with aclosing(_events(found)) as events:
            async for event in events:
                event_id = _id_of(event)
                if not event_id and _INTERRUPTED in event:
                    raise httpx2.RemoteProtocolError("the coordinator has ended the stream")
                await send_part(send, event)
                self._last_id, self._has_told = event_id or self._last_id, True
                self._num_failures = 0


async def _raw(found: httpx2.Response) -> bytes:
    """A body as it was sent."""
    return b"".join([part async for part in found.aiter_raw()])


async def _events(found: httpx2.Response) -> AsyncGenerator[bytes]:
    """Each whole one, with the empty line behind it."""
    left = b""
    async for part in found.aiter_raw():
        *whole, left = (left + part).split(b"\n\n")
        for event in whole:
            yield event + b"\n\n"


def _id_of(event: bytes) -> str:
    """Empty where it has none."""
    lines = event.split(b"\n")
    found = next((line for line in lines if line.startswith(b"id:")), b"")
    return found.removeprefix(b"id:").strip().decode("latin-1")


def _passed_on(
    headers: Iterable[tuple[bytes, bytes]], without: Collection[str]
) -> list[tuple[bytes, bytes]]:
    """Those that concern the ends of a request, not one of its connections."""
    found = [(name.lower(), value) for name, value in headers]
    named = {
        name.strip().lower() for key, value in found if key == b"connection"
        for name in value.decode("latin-1").split(",")
    }  # fmt: skip
    return [
        (name, value) for name, value in found
        if (text := name.decode("latin-1")) not in without and text not in named
    ]  # fmt: skip


def build_gateway(
    coordinators: Coordinators, closing: asyncio.Event, hosts: Collection[str] = ()
) -> FastAPI:
    """The application; `closing` and `hosts` as for a coordinator's."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Entrance, access=OPEN, hosts=hosts)
    add_error_handlers(app)
    num_bytes = Counter[str]()

    @app.api_route("/{path:path}", methods=list(_METHODS))
    async def forward(request: Request) -> Response:
        try:
            body = await whole_body(request, num_bytes)
        except ClientDisconnect:
            return Unsent()
        return Forwarded(coordinators, request, body, closing)

    return app
