"""`POST /tokenize` and `POST /detokenize`, as vLLM has them: a prompt as tokens, and back."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field

from coordinator.auth.access_control import AccessControl
from coordinator.http_api.answers import as_text
from coordinator.http_api.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    Messages,
    Several,
    TemplateVariables,
    ToolList,
    TranslatedBody,
    Unserved,
    asks_nothing,
)
from coordinator.http_api.reading import to_json
from coordinator.service import CoordinatorService
from outrider.errors import BadRequest


class TokenizeBody(Body):
    """Of a text, or of a conversation for the model's chat template."""

    unserved: ClassVar[Unserved] = {
        **asks_nothing("add_generation_prompt", True),
        **asks_nothing("continue_final_message", False),
        **asks_nothing("chat_template mm_processor_kwargs"),
    }

    model: str = ""
    """The served model's name; it may be left out."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Whether a prompt has what the tokenizer puts before every text; by default it has. Never a
    conversation, whose template writes them."""
    return_token_strs: bool = False
    """Tell how each token is written."""
    tools: ToolList = Field(default=[])
    """Of a conversation, what its answer may call."""
    chat_template_kwargs: TemplateVariables = Field(default={})
    """Of a conversation, variables for its template."""

    def translate(self) -> TranslatedBody:
        """The request that begins so. Raises `BadRequest`."""
        if (self.prompt is None) is (self.messages is None):
            raise BadRequest("prompt", "or messages must be given; allowed: one of the two")
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs"):
                if getattr(self, name):
                    raise BadRequest(name, "is for messages; leave it out")
            return CompletionBody.model_construct(**given).translate()
        if self.add_special_tokens:
            raise BadRequest("add_special_tokens", "is for a prompt; give false, or leave it out")
        return ChatBody.model_construct(**given).translate()


class Tokenized(BaseModel):
    """What a prompt is for the model."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Body):
    """Of some tokens."""

    model: str = ""
    """The served model's name; it may be left out."""
    tokens: Several[int]


class Detokenized(BaseModel):
    """The text of tokens."""

    prompt: str


def add_tokens(app: FastAPI, service: CoordinatorService, access: AccessControl) -> None:
    """Both routes. A call counts as a request of its caller's, and as no generation."""

    @app.post("/tokenize", responses={200: {"model": Tokenized}})
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Tells the tokens of a prompt, and how many they are."""
        asked, special = body.translate(), body.add_special_tokens is not False
        async with access.admit(request.state.caller, num_generations=0):
            try:
                token_ids = await service.tokenize(asked.requests[0], special)
            except BadRequest as error:
                raise asked.renamed(error, 0) from error

        def told() -> bytes:
            text = service.text if body.return_token_strs else None
            strs = text and [as_text(text.spell(token_id)) for token_id in token_ids]
            length = service.served.max_model_len
            values = {"count": len(token_ids), "max_model_len": length, "tokens": token_ids}
            return to_json({**values, "token_strs": strs})

        return Response(await asyncio.to_thread(told), media_type="application/json")

    @app.post("/detokenize", responses={200: {"model": Detokenized}})
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """Tells the text of tokens, special ones by their names."""
        async with access.admit(request.state.caller, num_generations=0):
            text = await service.detokenize(body.tokens, body.model)
        return Response(to_json({"prompt": text}), media_type="application/json")
