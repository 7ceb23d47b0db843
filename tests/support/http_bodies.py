"""Bodies of HTTP requests, what their translation returns, and how errors name their fields."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.http_api.bodies import ChatBody, TranslatedBody
from coordinator.http_api.reading import wrong_body
from coordinator.http_api.tools import ChatFormats
from coordinator.requests import validation
from outrider.config.deployment import CoordinatorConfig
from outrider.errors import BadRequest
from outrider.interfaces.messages import ReplicaDescription
from outrider.interfaces.request import GenerateRequest

MODEL = ReplicaDescription("m", "", "", 100, "float32", 64, (), 1)
"""A model with 100 tokens, for prompts of less than 64 tokens."""
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


async def refused_by_coordinator(request: GenerateRequest) -> BadRequest:
    """The error of a coordinator of `MODEL`, which has no tokenizer."""
    with pytest.raises(BadRequest) as caught:
        validation.check_fields(request, MODEL)
        field, token_ids = await validation.PromptEncoder(None).encode(request, 64, "")
        validation.resolve(request, field, token_ids, MODEL, CoordinatorConfig(), 7)
    return caught.value
