"""JSON as it goes to the client, and every error in OpenAI's shape:
`{"error": {"message", "type", "param", "code"}}`.

The status is the error's own (`outrider/errors.py`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from coordinator.http_api.bodies import UnservedField
from outrider.errors import (
    BadRequest,
    DeadlineExceeded,
    Incompatible,
    NotFound,
    OutriderError,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from outrider.limits import ERROR_MESSAGE_CHARS_MAX

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Made once: `json.dumps` would make another one for each chunk."""


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; what is no Unicode, as a caller's unknown field may be, is escaped."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(to_json(value), status, headers, "application/json")


_log = logging.getLogger(__name__)

_INTERNAL: Final = 500
_VALUE_CHARS_MAX: Final = 64
"""Of a wrong value that is told back."""
_KINDS: Final[Sequence[tuple[type[OutriderError], str, str]]] = (
    (BadRequest, "invalid_request_error", "invalid_value"),
    (Unauthenticated, "authentication_error", "invalid_api_key"),
    (PermissionDenied, "permission_error", "permission_denied"),
    (NotFound, "invalid_request_error", "model_not_found"),
    (Overloaded, "rate_limit_error", "rate_limit_exceeded"),
    (Unavailable, "service_unavailable_error", "unavailable"),
    (DeadlineExceeded, "timeout_error", "deadline_exceeded"),
)
"""`type` and `code` by error; others are the server's."""
_CODES: Final = {
    404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "body_too_large",
}  # fmt: skip
"""Of what is refused before anybody has looked at a body."""
_WORDS_OF_TYPES: Final = ("str", "int", "float", "bool", "none", "body")
"""Parts of a place in a body that name no field."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


def meant(error: Exception) -> OutriderError:
    """The error that a caller is told. One that is a bug of ours is logged with its traceback."""
    if not isinstance(error, OutriderError):
        _log.error("a request failed", exc_info=error)
        return OutriderError("internal error; the server's log has its traceback")
    if error.http_status == _INTERNAL:
        _log.error("a request failed", exc_info=error)
    return error


def error_body(error: OutriderError) -> dict[str, Any]:
    name, code = _kind(error)
    param = None
    if isinstance(error, BadRequest):
        param = error.field or None
    elif isinstance(error, NotFound):
        param = "model"
    elif isinstance(error, DeadlineExceeded):
        param = "deadline_ms"
    return _body(error.message, name, param, code)


def _kind(error: OutriderError) -> tuple[str, str]:
    for kind, name, code in _KINDS:
        if isinstance(error, kind):
            return name, code
    return "server_error", "internal_error" if error.http_status == _INTERNAL else "conflict"


def error_response(error: OutriderError) -> Response:
    """The answer that tells of an error; one that may pass says when to try again, one that will
    not that OpenAI's clients, which go by the status, shall not, and one for want of a key what to
    show."""
    headers = {}
    if isinstance(error, Incompatible | DeadlineExceeded):
        headers["x-should-retry"] = "false"
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1e3))
    return json_response(error_body(error), error.http_status, headers)


def add_error_handlers(app: FastAPI) -> None:

    async def raised(request: Request, error: Exception) -> Response:
        return error_response(meant(error))

    async def malformed(request: Request, error: Any) -> Response:
        return error_response(wrong_body(error.errors()))

    async def unrouted(request: Request, error: Any) -> Response:
        return _plain(error)

    app.add_exception_handler(OutriderError, raised)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(Exception, raised)


def _body(message: str, name: str, param: str | None, code: str | None) -> dict[str, Any]:
    message = message[:ERROR_MESSAGE_CHARS_MAX]
    return {"error": {"message": message, "type": name, "param": param, "code": code}}


def _plain(error: Any) -> Response:
    status = int(error.status_code)
    code = _CODES.get(status, "bad_request")
    body = _body(str(error.detail), "invalid_request_error", None, code)
    return json_response(body, status, error.headers)


def wrong_body(errors: Sequence[Mapping[str, Any]]) -> BadRequest:
    """What is wrong with a body, of all that is: the first, and of what is said of one place that
    may be several things the most exact."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = f"is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
        return of_body(reason)
    same = [one for one in errors if one["loc"][:2] == first["loc"][:2]]
    found = max(same, key=lambda one: len(one["loc"]))
    param = _param(found)
    if not param:
        return of_body("must be a JSON object, with Content-Type: application/json")
    return BadRequest(param, _reason(found))


def of_body(reason: str) -> BadRequest:
    """An error of a body as a whole, which names no field."""
    error = BadRequest("", reason)
    error.message = f"the body {reason}"
    return error


def _param(found: Mapping[str, Any]) -> str:
    *place, last = found["loc"]
    unknown = found["type"] == "extra_forbidden"
    parts = [part for part in (*place, *(() if unknown else (last,))) if _names_a_field(part)]
    if unknown:
        parts.append(str(last))
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, UnservedField):
        parts.append(cause.name)
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


def _names_a_field(part: object) -> bool:
    return isinstance(part, int) or (
        isinstance(part, str) and part.isidentifier() and part not in _WORDS_OF_TYPES
    )


def _reason(found: Mapping[str, Any]) -> str:
    if found["type"] == "extra_forbidden":
        return "there is no such field"
    if found["type"] == "missing":
        return "is missing"
    message = str(found["msg"]).removeprefix("Value error, ")
    if found["type"] == "value_error":
        return message
    return f"{message[:1].lower()}{message[1:]}; got {_shown(found.get('input'))}"


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a number as large"
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}..."
