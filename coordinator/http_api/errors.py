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

from coordinator.http_api.bodies import unserved_reason
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

_log = logging.getLogger(__name__)

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Made once: `json.dumps` would make another one for each chunk."""
_VALUE_CHARS_MAX: Final = 64
"""Of a wrong value that is told back."""
_KINDS: Final[Sequence[tuple[type[OutriderError], str, str, str | None]]] = (
    (BadRequest, "invalid_request_error", "invalid_value", None),
    (Unauthenticated, "authentication_error", "invalid_api_key", None),
    (PermissionDenied, "permission_error", "permission_denied", None),
    (NotFound, "invalid_request_error", "model_not_found", "model"),
    (Overloaded, "rate_limit_error", "rate_limit_exceeded", None),
    (Unavailable, "service_unavailable_error", "unavailable", None),
    (DeadlineExceeded, "timeout_error", "deadline_exceeded", "deadline_ms"),
)
"""`type`, `code` and `param` by error; others are the server's."""
_CODES: Final = {
    404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "body_too_large",
}  # fmt: skip
"""Of what is refused before anybody has looked at a body."""
_WORDS_OF_TYPES: Final = ("str", "int", "float", "bool", "none", "body")
"""Parts of a place in a body that name no field."""


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, as a header may have it, is escaped."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(to_json(value), status, headers, "application/json")


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


def error_body(error: Exception) -> dict[str, Any]:
    """What a caller is told. An error that is a bug of ours is logged with its traceback."""
    if not isinstance(error, OutriderError) or error.http_status == 500:
        _log.error("a request failed", exc_info=error)
    if not isinstance(error, OutriderError):
        error = OutriderError("internal error; the server's log has its traceback")
    name, code, param = next(
        ((name, code, param) for kind, name, code, param in _KINDS if isinstance(error, kind)),
        ("server_error", "internal_error" if error.http_status == 500 else "conflict", None),
    )
    if isinstance(error, BadRequest):
        param = error.field or None
    return _body(error.message, name, param, code)


def error_response(error: Exception) -> Response:
    """The answer that tells of an error: one that may pass says when to try again; one that will
    not, that OpenAI's clients, which go by the status, shall not."""
    headers = {}
    if isinstance(error, Incompatible | DeadlineExceeded):
        headers["x-should-retry"] = "false"
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1e3))
    status = error.http_status if isinstance(error, OutriderError) else 500
    return json_response(error_body(error), status, headers)


def add_error_handlers(app: FastAPI) -> None:

    async def raised(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = wrong_body(error.errors())
        elif isinstance(error, HTTPException):
            status = error.status_code
            code = _CODES.get(status, "bad_request")
            body = _body(str(error.detail), "invalid_request_error", None, code)
            return json_response(body, status, error.headers)
        return error_response(error)

    for kind in (OutriderError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, raised)


def _body(message: str, name: str, param: str | None, code: str) -> dict[str, Any]:
    message = message[:ERROR_MESSAGE_CHARS_MAX]
    return {"error": {"message": message, "type": name, "param": param, "code": code}}


def wrong_body(errors: Sequence[Mapping[str, Any]]) -> BadRequest:
    """What is wrong with a body, of all that pydantic finds: the first, and of what it says of one
    field that may be several things the most exact."""
    same = [one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]]
    found = max(same, key=lambda one: len(one["loc"]))
    *place, last = found["loc"]
    parts = [part for part in place if _names_a_field(part)]
    is_unknown = found["type"] == "extra_forbidden"
    if is_unknown or _names_a_field(last):
        parts.append(last)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    reason = str(found["msg"]).removeprefix("Value error, ")
    if is_unknown:
        reason = unserved_reason(str(last))
    elif found["type"] == "missing":
        reason = "is missing"
    elif found["type"] != "value_error":
        reason = f"{reason[:1].lower()}{reason[1:]}; got {_shown(found.get('input'))}"
    if field:
        return BadRequest(field.removeprefix("."), reason)
    if found["type"] != "value_error":
        reason = "must be a JSON object, with Content-Type: application/json"
    return of_body(reason)


def of_body(reason: str) -> BadRequest:
    """An error of a body as a whole, which names no field."""
    error = BadRequest("", reason)
    error.message = f"the body {reason}"
    return error


def _names_a_field(part: object) -> bool:
    return isinstance(part, int) or (
        isinstance(part, str) and part.isidentifier() and part not in _WORDS_OF_TYPES
    )


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}..."
