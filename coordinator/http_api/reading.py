"""Reads bodies: what would take long to look at is refused before anybody does.

Parsing and validating hold up everything else that the coordinator does, its leases too. So the
values of a body are counted before it is parsed, and lists and objects before pydantic sees them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.auth.access_control import AccessControl
from coordinator.http_api.serving import Unsent
from outrider.api_keys import ANYBODY, Caller
from outrider.errors import BadRequest, Overloaded, Unavailable
from outrider.limits import (
    CHAT_MESSAGES_MAX,
    CHAT_PARTS_MAX,
    CHOICES_MAX,
    CONSTRAINT_BYTES_MAX,
    HTTP_BODIES_BYTES_MAX,
    HTTP_BODY_BYTES_MAX,
    HTTP_BODY_PART_S_MAX,
    HTTP_BODY_S_MAX,
    HTTP_CONTAINERS_MAX,
    HTTP_FIELDS_MAX,
    HTTP_TENANT_BODIES_BYTES_MAX,
    HTTP_VALUES_MAX,
    LOGIT_BIAS_ENTRIES_MAX,
    PROMPTS_MAX,
    STOP_STRINGS_MAX,
)

from .errors import of_body

_OPENINGS: Final = (b"[", b"{")
_MARKS: Final = (*_OPENINGS, b",", b":")
"""One of them stands before each value and each key, but for the first."""
_QUOTES_MAX: Final = 2 * (HTTP_VALUES_MAX + 1)
_CONSTRAINTS: Final = ("response_format", "structured_outputs", "guided_json")
_CONSTRAINT_VALUES_MAX: Final = CONSTRAINT_BYTES_MAX // 2
"""Each takes two bytes at least, with the comma behind it."""


class BodyRoute(APIRoute):
    """A route whose body is JSON, and read by `read_body`; not where its caller's bucket is known
    to be empty, for every route that has a body is limited."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def read(request: Request) -> Response:
            access: AccessControl = request.app.state.access
            access.check_rate(request.state.caller)
            try:
                data = await request.body()
            except ClientDisconnect:
                return Unsent()
            value = None
            if data and "json" in request.headers.get("content-type", "").lower():
                value = read_body(data)
            return await handle(_ReadRequest(request, data, value))

        return read


class _ReadRequest(Request):
    """A request whose body has been read."""

    def __init__(self, request: Request, data: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._data, self._value = data, value

    async def body(self) -> bytes:
        return self._data

    async def json(self) -> Any:
        """What it stands for. Asked for only where the content type says JSON."""
        return self._value


def read_body(data: bytes) -> Any:
    """What a body stands for. Raises `BadRequest` for what is no JSON, and for more of anything
    than a request may have; types are not checked."""
    _check_values(data)
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise of_body(f"is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise of_body("is nested too deep") from None
    except UnicodeDecodeError:
        raise of_body("is not JSON: it is not UTF-8") from None
    except ValueError as error:  # A number of thousands of digits.
        raise of_body(f"cannot be read: {error}") from None
    if isinstance(value, dict):
        _check_counts(value)
    return value


def _check_values(data: bytes) -> None:
    """Raises `BadRequest` for more marks outside of strings than there may be. It takes some ms,
    or some tens where strings have many marks, too."""
    if not _too_many(data):
        return
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    found = f"more than {HTTP_VALUES_MAX} values"  # Between two strings there is a mark.
    if bare.count(b'"') <= _QUOTES_MAX:
        found = _too_many(b"".join(bare.split(b'"')[::2]))
    if found:
        raise of_body(f"has {found}")


def _too_many(data: bytes) -> str:
    num_containers = sum(map(data.count, _OPENINGS))
    if num_containers > HTTP_CONTAINERS_MAX:
        return f"more than {HTTP_CONTAINERS_MAX} lists and objects"
    if sum(map(data.count, _MARKS)) > HTTP_VALUES_MAX:
        return f"more than {HTTP_VALUES_MAX} values"
    return ""


def _check_counts(body: Mapping[str, Any]) -> None:
    """Raises `BadRequest` for more entries of a field than there may be."""
    _check_fields("", body)
    for field in ("speculation", "stream_options"):
        _check_fields(field, body.get(field))
    _check_messages(body.get("messages"))
    prompts = body.get("prompt")
    if isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int)):
        _check_size("prompt", prompts, PROMPTS_MAX, "prompts")
    _check_size("stop", body.get("stop"), STOP_STRINGS_MAX, "strings")
    _check_size("logit_bias", body.get("logit_bias"), LOGIT_BIAS_ENTRIES_MAX, "entries")
    _check_size("guided_choice", body.get("guided_choice"), CHOICES_MAX, "choices")
    for field in _CONSTRAINTS:
        _check_constraint(field, body.get(field))


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        return
    _check_size("messages", messages, CHAT_MESSAGES_MAX, "messages")
    num_parts = 0
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            return  # That one is refused, and no other is looked at.
        _check_fields(f"messages[{index}]", message)
        parts = message.get("content")
        if not isinstance(parts, list):
            continue
        num_parts += len(parts)
        if num_parts > CHAT_PARTS_MAX:
            raise BadRequest("messages", f"have more than {CHAT_PARTS_MAX} parts in all")
        for place, part in enumerate(parts):
            _check_fields(f"messages[{index}].content[{place}]", part)


def _check_fields(field: str, value: Any) -> None:
    if not isinstance(value, dict) or len(value) <= HTTP_FIELDS_MAX:
        return
    reason = f"has {len(value)} fields; at most {HTTP_FIELDS_MAX} are allowed"
    raise BadRequest(field, reason) if field else of_body(reason)


def _check_size(field: str, value: Any, most: int, what: str) -> None:
    if isinstance(value, dict | list) and len(value) > most:
        raise BadRequest(field, f"got {len(value)} {what}; at most {most} are allowed")


def _check_constraint(field: str, value: Any) -> None:
    """Counts values within values, no more of them than there may be."""
    num_values, left = 0, [value]
    while left:
        inner = left.pop()
        if not isinstance(inner, dict | list):
            continue
        num_values += len(inner)
        if num_values > _CONSTRAINT_VALUES_MAX:
            raise BadRequest(
                field, f"has more values than {CONSTRAINT_BYTES_MAX} bytes, which are allowed"
            )
        left += inner.values() if isinstance(inner, dict) else inner


class BodyLimit:
    """Reads no more of a body than `HTTP_BODY_BYTES_MAX`, for no longer than `HTTP_BODY_S_MAX` in
    all and `HTTP_BODY_PART_S_MAX` for a part. Of all bodies that have begun to come it holds at
    most `HTTP_BODIES_BYTES_MAX`, and of those of one tenant, where keys tell tenants apart, at most
    `HTTP_TENANT_BODIES_BYTES_MAX`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_bytes = 0
        self._num_tenant_bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = asyncio.get_running_loop().time() + HTTP_BODY_S_MAX
        caller: Caller = scope.get("state", {}).get("caller", ANYBODY)
        size, is_read = 0, False

        async def bounded() -> Message:
            nonlocal size, is_read
            if is_read:
                return await receive()
            message = await _received_by(end, receive)
            num_new = len(message.get("body", b""))
            size += num_new
            self._count(caller, num_new)
            if size > HTTP_BODY_BYTES_MAX:
                raise HTTPException(413, f"the body has more than {HTTP_BODY_BYTES_MAX} bytes")
            self._check(caller)
            if not message.get("more_body", False):
                self._count(caller, -size)
                size, is_read = 0, True
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._count(caller, -size)

    def _count(self, caller: Caller, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._num_tenant_bytes[caller.tenant] += num_bytes
        if not self._num_tenant_bytes[caller.tenant]:
            del self._num_tenant_bytes[caller.tenant]

    def _check(self, caller: Caller) -> None:
        if self._num_bytes > HTTP_BODIES_BYTES_MAX:
            raise Unavailable("too many bodies are being read; try again later")
        num_bytes = self._num_tenant_bytes[caller.tenant]
        if caller is not ANYBODY and num_bytes > HTTP_TENANT_BODIES_BYTES_MAX:
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
