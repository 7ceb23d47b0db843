"""JSON as it goes to the client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Made once: `json.dumps` would make another one for each chunk."""


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; what is no Unicode, as a caller's unknown field may be, is escaped."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A whole answer."""
    return Response(to_json(value), status, headers, "application/json")
