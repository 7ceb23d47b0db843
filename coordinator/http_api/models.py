"""The served model, as a list of models has it."""

from __future__ import annotations

from typing import Any

from coordinator.requests.validation import ServedModel
from outrider.errors import NotFound


def listed(model: ServedModel, created: int) -> dict[str, Any]:
    """All models, of which there is one. `created` is when it began to be served, in seconds since
    1970."""
    return {"object": "list", "data": [_told(model, created)]}


def found(model: ServedModel, name: str, created: int) -> dict[str, Any]:
    """The model of a name. Raises `NotFound`."""
    if name != model.name:
        raise NotFound(f"model: {name[:256]!r} is not served; {model.name!r} is")
    return _told(model, created)


def _told(model: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
