"""`POST /tokenize` and `POST /detokenize`, as in vLLM."""

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
from coordinator.service import CoordinatorService
from outrider.errors import BadRequest


class TokenizeBody(Body):
    """The body of `POST /tokenize`: a text, or a conversation for the model's chat template."""

    unserved: ClassVar[Unserved] = {
        **asks_nothing("add_generation_prompt", True),
        **asks_nothing("continue_final_message", False),
        **asks_nothing("chat_template mm_processor_kwargs"),
    }

    model: str = ""
    """The name of the served model, if given."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Whether a prompt gets the special tokens that the tokenizer adds to every text (default). A
    conversation never gets them, as its template has them."""
    return_token_strs: bool = False
    """Add the text of each token."""
    tools: ToolList = Field(default=[])
    """The tools that the answer to a conversation may call."""
    chat_template_kwargs: TemplateVariables = Field(default={})
    """Variables for the template of a conversation."""

    def translate(self) -> TranslatedBody:
        """The request with this prompt. Raises `BadRequest`."""
        if (self.prompt is None) is (self.messages is None):
            raise BadRequest("prompt", "or messages must be given; allowed: one of the two")
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs"):
                if getattr(self, name):
                    raise BadRequest(name, "is for messages; leave it out")
            return CompletionBody.model_construct(**dict(self)).translate()
        if self.add_special_tokens:
            raise BadRequest("add_special_tokens", "is for a prompt; give false, or leave it out")
        return ChatBody.model_construct(**dict(self)).translate()


class Tokenized(BaseModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: str = ""
    """The name of the served model, if given."""
    tokens: Several[int]


class Detokenized(BaseModel):
    """The text of tokens."""

    prompt: str


def add_tokens(app: FastAPI, service: CoordinatorService, access: AccessControl) -> None:
    """Adds both routes. A call counts as a request of the caller, but not as a generation."""

    @app.post("/tokenize", responses={200: {"model": Tokenized}})
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """The tokens of a prompt, and their number."""
        asked, special = body.translate(), body.add_special_tokens is not False
        async with access.admit(request.state.caller, num_generations=0):
            try:
                token_ids = await service.tokenize(asked.requests[0], special)
            except BadRequest as error:
                raise asked.renamed(error, 0) from error

        def to_json() -> str:
            strs, text = None, service.text
            if body.return_token_strs and text is not None:
                strs = [as_text(text.spell(token_id)) for token_id in token_ids]
            length, tokens = service.served.max_model_len, list(token_ids)
            return Tokenized(
                count=len(tokens), max_model_len=length, tokens=tokens, token_strs=strs
            ).model_dump_json()

        return Response(await asyncio.to_thread(to_json), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Detokenized:
        """The text of tokens, with the names of special ones."""
        async with access.admit(request.state.caller, num_generations=0):
            return Detokenized(prompt=await service.detokenize(body.tokens, body.model))
