"""Parses the bodies of requests within limits, and writes JSON and errors in OpenAI's form.

Parsing a body blocks the event loop, which must renew the coordinator's lease every 0.5 s. So
`check_size` refuses a body with too many values before the body is parsed.
"""

import json
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.auth.access_control import AccessControl
from coordinator.http_api.schemas import ErrorBody
from outrider import errors, limits
from outrider.foundation.api_keys import ANYBODY
from outrider.foundation.refusals import count_refusal

_log = logging.getLogger(__name__)

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Shared by all calls, because `json.dumps` with these options makes a new encoder in each call."""
UNKNOWN_FIELD = "extra_forbidden"
"""pydantic's name for errors about fields that do not exist."""
SHOWN_CHARS_MAX = 64
"""An error repeats at most this many characters of a name or value."""
_KINDS: Mapping[int, tuple[str, str, str | None]] = {
    400: ("invalid_request_error", "invalid_value", None),
    401: ("authentication_error", "invalid_api_key", None),
    403: ("permission_error", "permission_denied", None),
    404: ("invalid_request_error", "model_not_found", "model"),
    409: ("server_error", "conflict", None),
    413: ("invalid_request_error", "body_too_large", None),
    429: ("rate_limit_error", "rate_limit_exceeded", None),
    500: ("server_error", "internal_error", None),
    503: ("service_unavailable_error", "unavailable", None),
    504: ("timeout_error", "deadline_exceeded", "deadline_ms"),
}
"""`type`, `code` and `param` of an error, by its HTTP status."""
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout"}
"""`code` of FastAPI's errors, and of an unknown session, by the HTTP status."""
SERVER_FULL = "server_full"
"""`code` of an error with status 429 if another coordinator may have room."""
_WORDS_OF_TYPES = ("str", "int", "float", "bool", "none", "body")
"""Names that pydantic and FastAPI add to the path of a wrong field."""


def to_json(value: Any) -> bytes:
    """Returns JSON in UTF-8. Escapes lone surrogates, because UTF-8 cannot encode them."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(to_json(value), status, headers, "application/json")


def error_body(error: Exception) -> ErrorBody:
    """Returns the body for an error. An error that is not an `OutriderError` is a bug, and the
    client gets only a general message. Logs the traceback of internal errors."""
    reported = errors.OutriderError("internal error; the server's log has its traceback")
    if isinstance(error, errors.OutriderError):
        reported = error
    if reported.grpc_code == errors.OutriderError.grpc_code:
        _log.error("a request failed", exc_info=error)
    count_refusal(reported)
    name, code, param = _KINDS[reported.http_status]
    if isinstance(reported, errors.BadRequest):
        param = reported.field or None
    if isinstance(reported, errors.Overloaded) and reported.of_server:
        code = SERVER_FULL
    if isinstance(reported, errors.SessionNotFound):
        code, param = _CODES[404], None
    return _body(reported.message, name, param, code)


def error_response(error: Exception) -> Response:
    """Returns the response for an error. OpenAI's clients repeat requests after status 409 and 504.
    If a repetition cannot help, the header `x-should-retry: false` prevents it."""
    status = error.http_status if isinstance(error, errors.OutriderError) else 500
    headers = {}
    if isinstance(error, errors.Incompatible | errors.DeadlineExceeded):
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1e3))
    return json_response(error_body(error), status, headers)


def add_error_handlers(app: FastAPI) -> None:

    async def raised(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return NoResponse()
        if isinstance(error, RequestValidationError):
            error = wrong_body(error.errors())
        elif isinstance(error, HTTPException):
            message, code = str(error.detail), _CODES.get(error.status_code, "bad_request")
            if message == "Not Found":
                message = f"there is no {request.method} {request.url.path}; see GET /openapi.json"
            body = _body(message, "invalid_request_error", None, code)
            return json_response(body, error.status_code, error.headers)
        return error_response(error)

    kinds = errors.OutriderError, RequestValidationError, HTTPException, ClientDisconnect, Exception
    for kind in kinds:
        app.add_exception_handler(kind, raised)


def _body(message: str, name: str, param: str | None, code: str) -> ErrorBody:
    message = message[: limits.ERROR_MESSAGE_CHARS_MAX]
    return {"error": {"message": message, "type": name, "param": param, "code": code}}


def wrong_body(wrong: Sequence[Mapping[str, Any]]) -> errors.BadRequest:
    """Converts one of pydantic's errors about a body. If a value fits no member of a union,
    pydantic reports an error for each member. Of the errors about the first wrong field, this
    function converts the error with the longest path, because a longer path is more specific."""
    same = [entry for entry in wrong if entry["loc"][:2] == wrong[0]["loc"][:2]]
    entry = max(same, key=lambda entry: len(entry["loc"]))
    kind, reason = entry["type"], str(entry["msg"]).removeprefix("Value error, ")
    *path, last = entry["loc"]
    parts = [part for part in path if _names_a_field(part)]
    if kind == UNKNOWN_FIELD or _names_a_field(last):
        parts.append(last)
    field = "".join(
        f"[{part}]" if isinstance(part, int) or part.isdecimal() else f".{_cut(part)}"
        for part in parts
    ).removeprefix(".")
    if not field:
        wanted = "must be a JSON object, with Content-Type: application/json"
        return of_body(reason if kind == "value_error" else wanted)
    if kind == "missing":
        reason = "is missing"
    elif kind == UNKNOWN_FIELD:
        reason = entry.get("ctx", {}).get("reason", "there is no such field")
    elif kind != "value_error":
        reason = f"{reason[:1].lower()}{reason[1:]}; got {_shown(entry.get('input'))}"
    return errors.BadRequest(field, reason)


def of_body(reason: str) -> errors.BadRequest:
    error = errors.BadRequest("", reason)
    error.message = f"the body {reason}"
    return error


def _names_a_field(part: object) -> bool:
    """Whether a part of an error's path is a field, an index or a token id. Other parts name a
    union's members. The names of members are in `_WORDS_OF_TYPES`, or are not identifiers."""
    return isinstance(part, int) or (
        isinstance(part, str)
        and (part.isidentifier() or part.isdecimal())
        and part not in _WORDS_OF_TYPES
    )


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."


_BOM = b"\xef\xbb\xbf"
_MARKS = b"[{,:"
"""Every key or value in an object or list follows one of these bytes."""
_OTHERS = bytes(set(range(256)).difference(_MARKS, b'"'))
"""All bytes that are neither marks nor quotes."""
_PORT = re.compile(r":\d*$")
PAGE = "/page"


class NoResponse(Response):
    """Sends nothing, because the client has disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def read_body(data: bytes) -> Any:
    """Returns the value of a body. Raises the errors of `check_size` and `parse`."""
    check_size(data)
    return parse(data)


def check_size(data: bytes) -> None:
    """Raises `BadRequest` if a body exceeds a limit of `exceeded`."""
    if excess := exceeded(data):
        raise of_body(f"has more than {excess}")


def exceeded(data: bytes) -> str:
    """Names the limit that some JSON exceeds: `HTTP_VALUES_MAX` values, `HTTP_STRINGS_MAX` strings
    and keys, or `HTTP_CONTAINERS_MAX` lists and objects. "" = no limit is exceeded. Does not parse
    the JSON."""
    excess = _too_many(data.translate(None, _OTHERS))
    if excess:  # Some marks may be within strings. Count again without strings.
        bare = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
        excess = _too_many_strings(bare) or _too_many(b"".join(bare.split(b'"')[::2]))
    return excess


def parse(data: bytes) -> Any:
    """Returns the value of a body that is JSON in UTF-8. Raises `BadRequest`."""
    try:
        return from_json(data.removeprefix(_BOM))
    except ValueError as error:
        raise of_body(f"is not JSON: {error}") from None


def _too_many(marks: bytes) -> str:
    """Names the exceeded limit. "" = no limit is exceeded. `marks` has the marks and quotes of the
    JSON in their order. Marks within strings count, too."""
    if marks.count(b"[") + marks.count(b"{") > limits.HTTP_CONTAINERS_MAX:
        return f"{limits.HTTP_CONTAINERS_MAX} lists and objects"
    if len(marks) - marks.count(b'"') > limits.HTTP_VALUES_MAX:
        return f"{limits.HTTP_VALUES_MAX} values"
    return _too_many_strings(marks)


def _too_many_strings(marks: bytes) -> str:
    is_over = marks.count(b'"') > 2 * limits.HTTP_STRINGS_MAX
    return f"{limits.HTTP_STRINGS_MAX} strings and keys" if is_over else ""


def is_open(path: str) -> bool:
    """Whether a path needs no API key. Probes have no key. The page at `/` asks for a key."""
    return path in ("/", "/docs", "/health", "/ping") or path.startswith(f"{PAGE}/")


class AuthenticationMiddleware:
    """Middleware that identifies the caller of each request before its body is read."""

    def __init__(self, app: ASGIApp, access: AccessControl, hosts: Collection[str]) -> None:
        self._app, self._access, self._hosts = app, access, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, caller = Headers(scope=scope), ANYBODY
        try:
            # This prevents DNS rebinding (see `HttpOptions.hosts`).
            if self._hosts and _PORT.sub("", headers.get("host", "")).lower() not in self._hosts:
                raise errors.PermissionDenied(
                    "the header Host does not name this machine; call localhost, or give the "
                    "server API keys"
                )
            if not is_open(scope["path"]):
                caller = self._access.identify(headers.getlist("authorization"))
        except errors.OutriderError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
