"""What answers look like, for the OpenAPI document alone: no answer is validated or built by these
models."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


class Told(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Usage(Told):
    """Of all choices; those of a prompt share it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(Told):
    """What drafts did for all choices; a step is a round."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance_histogram: list[int] = []
    acceptance_histogram_by_draft_length: dict[str, list[int]] = {}


class AnswerMetrics(Told):
    speculative_decoding: SpeculativeDecoding


class Choice(Told):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    """The stop string or token that ended it; deadline or cancelled where that cut it off."""
    token_ids: list[int] = []
    """Where return_token_ids asks for them."""


class LikelyToken(Told):
    token: str
    bytes: list[int]
    logprob: float


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Told):
    content: list[ChatToken]
    refusal: None


class CalledFunction(Told):
    name: str
    arguments: str
    """JSON; the model's, so it need not be valid."""


class ToolCall(Told):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Told):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class FunctionDelta(Told):
    name: str = ""
    arguments: str


class ToolCallDelta(Told):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class AssistantDelta(Told):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletionChunkChoice(Choice):
    delta: AssistantDelta
    logprobs: ChatLogprobs | None


class CompletionLogprobs(Told):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Envelope(Told):
    id: str
    created: int
    model: str


class Whole(Envelope):
    usage: Usage
    metrics: AnswerMetrics


class Chunk(Envelope):
    usage: Usage | None = None
    """In the last chunk, or in each, as stream_options say."""
    metrics: AnswerMetrics | None = None
    """In the last chunk."""


class ChatCompletion(Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatCompletionChunkChoice]


class Completion(Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ResponseUsage(Told):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(Told):
    """As OpenAI has it; its other fields are the request's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    """Messages, reasoning and calls of functions."""
    error: dict[str, Any] | None
    usage: ResponseUsage | None
    stop_reason: str | int | None = None
    metrics: AnswerMetrics | None = None


class ResponseEvent(Told):
    """A step to a response, whose other fields OpenAI's reference has."""

    type: str
    sequence_number: int


class Model(Told):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "outrider"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Told):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(Told):
    status: Literal["ok"] = "ok"


class Version(Told):
    version: str


_GENERATIONS: tuple[type[Told], ...] = (
    ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, ResponseObject, ResponseEvent,
)  # fmt: skip


def answers(whole: type[Told], chunk: type[Told]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that answers once, or by a stream of chunks."""
    content = {
        kind: {"schema": {"$ref": _REF.format(model=model.__name__)}}
        for kind, model in (("application/json", whole), ("text/event-stream", chunk))
    }
    told = "The answer; a stream of its chunks where `stream` is true."
    return {200: {"description": told, "content": content}}


class DocumentedApp(FastAPI):
    """Its document has the schemas that `answers` name: FastAPI knows one model a response."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            wanted: Any = [(model, "validation") for model in _GENERATIONS]
            schemas |= models_json_schema(wanted, ref_template=_REF)[1]["$defs"]
        return super().openapi()
