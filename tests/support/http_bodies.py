"""Bodies of HTTP requests, and what their translation returns."""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from coordinator.http_api.bodies import ChatBody, TranslatedBody
from coordinator.http_api.reading import wrong_body
from coordinator.http_api.tools import ChatFormats
from outrider.errors import BadRequest

USER = {"role": "user", "content": "hi"}


def chat(formats: ChatFormats | None = None, **fields: Any) -> TranslatedBody:
    return ChatBody.model_validate({"messages": [USER]} | fields).translate(formats)


def refused(body: Callable[..., TranslatedBody], fields: Any) -> BadRequest:
    """The error that a caller gets for a wrong body."""
    try:
        body(**fields)
    except BadRequest as error:
        return error
    except ValidationError as error:
        return wrong_body([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])
    raise AssertionError("it is taken")
