"""Reads bodies. What would take long to look at is refused before: parsing holds up everything else
that the coordinator does, its leases too."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.auth.access_control import AccessControl
from coordinator.http_api.errors import error_response, of_body
from outrider.api_keys import ANYBODY, Caller
from outrider.errors import OutriderError, Overloaded, PermissionDenied, Unavailable
from outrider.limits import (
    HTTP_BODIES_BYTES_MAX,
    HTTP_BODY_BYTES_MAX,
    HTTP_BODY_PART_S_MAX,
    HTTP_BODY_S_MAX,
    HTTP_CONTAINERS_MAX,
    HTTP_TENANT_BODIES_BYTES_MAX,
    HTTP_VALUES_MAX,
)

_BOM: Final = b"\xef\xbb\xbf"
_OPENINGS: Final = (b"[", b"{")
_MARKS: Final = (*_OPENINGS, b",", b":")
"""One of them stands before each value and each key, but for the first."""
_QUOTES_MAX: Final = 2 * (HTTP_VALUES_MAX + 1)
_PORT: Final = re.compile(r":\d*$")
PAGE: Final = "/page"
"""Where the files of the page are."""


class BodyRoute(APIRoute):
    """A route whose body is JSON, and read by `read_body`; not where its caller's bucket is known
    to be empty, for every route that has a body is limited."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            request.app.state.access.check_rate(request.state.caller)
            try:
                data = await request.body()
            except ClientDisconnect:
                return Unsent()
            if data:  # `_json` is what `Request.json` returns.
                is_json = "json" in request.headers.get("content-type", "").lower()
                request._json = read_body(data) if is_json else None
            return await handle(request)

        return handle if self.body_field is None else read


class Unsent(Response):
    """The answer to a client that has gone: nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def read_body(data: bytes) -> Any:
    """What a body stands for. Raises `BadRequest` for what is no JSON in UTF-8, and for more values
    than a request may have; types are not checked."""
    if _too_many(data):
        bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
        found = f"more than {HTTP_VALUES_MAX} values"  # Between two strings there is a mark.
        if bare.count(b'"') <= _QUOTES_MAX:
            found = _too_many(b"".join(bare.split(b'"')[::2]))
        if found:
            raise of_body(f"has {found}")
    try:
        return from_json(data.removeprefix(_BOM))
    except ValueError as error:
        raise of_body(f"is not JSON: {error}") from None


def _too_many(data: bytes) -> str:
    """What there is too much of; marks within strings are counted, too."""
    if sum(map(data.count, _OPENINGS)) > HTTP_CONTAINERS_MAX:
        return f"more than {HTTP_CONTAINERS_MAX} lists and objects"
    if sum(map(data.count, _MARKS)) > HTTP_VALUES_MAX:
        return f"more than {HTTP_VALUES_MAX} values"
    return ""


def is_open(path: str) -> bool:
    """Whether no key is asked for: probes have none, and the page's files, which have no data, ask
    for one themselves."""
    return path in ("/", "/health") or path.startswith(f"{PAGE}/")


class Entrance:
    """Before an application: learns who calls before anything of a request's body is read.

    Reads no more of a body than `HTTP_BODY_BYTES_MAX`, for no longer than `HTTP_BODY_S_MAX` in all
    and `HTTP_BODY_PART_S_MAX` for a part. Of all bodies that have begun to come it holds at most
    `HTTP_BODIES_BYTES_MAX`, and of those of one tenant, where keys tell tenants apart, at most
    `HTTP_TENANT_BODIES_BYTES_MAX`."""

    def __init__(self, app: ASGIApp, access: AccessControl, hosts: Collection[str]) -> None:
        self._app = app
        self._access = access
        self._hosts = hosts
        self._num_bytes: Counter[str] = Counter()
        """Of bodies that are not whole yet, by tenant."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, caller = Headers(scope=scope), ANYBODY
        try:
            # A browser sends it on behalf of another site, whose name leads to this machine.
            if self._hosts and _PORT.sub("", headers.get("host", "")).lower() not in self._hosts:
                raise PermissionDenied(
                    "Host: is none of this machine's own names; call localhost, or give the server "
                    "API keys"
                )
            if not is_open(scope["path"]):
                caller = self._access.identify(headers.getlist("authorization"))
        except OutriderError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        end = asyncio.get_running_loop().time() + HTTP_BODY_S_MAX
        size, is_read = 0, False

        async def bounded() -> Message:
            nonlocal size, is_read
            if is_read:
                return await receive()
            message = await _received_by(end, receive)
            num_new = len(message.get("body", b""))
            size += num_new
            self._num_bytes[caller.tenant] += num_new
            if size > HTTP_BODY_BYTES_MAX:
                raise HTTPException(413, f"the body has more than {HTTP_BODY_BYTES_MAX} bytes")
            self._check_room(caller)
            if not message.get("more_body", False):
                self._forget(caller, size)
                size, is_read = 0, True
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._forget(caller, size)

    def _forget(self, caller: Caller, num_bytes: int) -> None:
        self._num_bytes[caller.tenant] -= num_bytes
        self._num_bytes += Counter()  # Forgets tenants without bodies.

    def _check_room(self, caller: Caller) -> None:
        if self._num_bytes.total() > HTTP_BODIES_BYTES_MAX:
            raise Unavailable("too many bodies are being read; try again later")
        if caller is not ANYBODY and self._num_bytes[caller.tenant] > HTTP_TENANT_BODIES_BYTES_MAX:
            raise Overloaded(
                f"the tenant {caller.tenant!r} sends bodies of more than "
                f"{HTTP_TENANT_BODIES_BYTES_MAX} bytes at a time; try again later"
            )


async def _received_by(end: float, receive: Receive) -> Message:
    part_end = asyncio.get_running_loop().time() + HTTP_BODY_PART_S_MAX
    try:
        async with asyncio.timeout_at(min(end, part_end)):
            return await receive()
    except TimeoutError:
        if part_end < end:
            reason = f"no part of the body has come for {HTTP_BODY_PART_S_MAX} s"
        else:
            reason = f"the body has not come within {HTTP_BODY_S_MAX} s"
        raise HTTPException(408, reason, {"connection": "close"}) from None
