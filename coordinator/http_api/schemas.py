"""The answers of routes as models for the OpenAPI document. Small answers are made from these
models. Answers of generations are plain dicts, as each chunk of a stream must be cheap."""

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


class Schema(BaseModel):
    model_config = ConfigDict(
        use_attribute_docstrings=True, json_schema_serialization_defaults_required=True
    )


class Usage(Schema):
    """Tokens of all choices; a prompt counts once for all of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(Schema):
    """What drafts contributed to all choices; a step is a round."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance_histogram: list[int] = []
    acceptance_histogram_by_draft_length: dict[str, list[int]] = {}


class AnswerMetrics(Schema):
    speculative_decoding: SpeculativeDecoding


class Choice(Schema):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    """The stop string or token that ended the text, or what cut it off: deadline or cancelled."""
    token_ids: list[int] = []
    """With return_token_ids."""


class LikelyToken(Schema):
    token: str
    bytes: list[int]
    logprob: float


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Schema):
    content: list[ChatToken]
    refusal: None


class CalledFunction(Schema):
    name: str = ""
    """In a stream only at the beginning of the call, like its id."""
    arguments: str
    """JSON as the model wrote it, which may be invalid."""


class ToolCall(Schema):
    index: int = 0
    """In a stream: the call that this is a part of."""
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Schema):
    """A message, or what a chunk adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletionChunkChoice(Choice):
    delta: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(Schema):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Chunk(Schema):
    id: str
    created: int
    model: str
    usage: Usage | None = None
    """In the last chunk or in each, depending on stream_options."""
    metrics: AnswerMetrics | None = None
    """In the last chunk."""


class ChatCompletion(Chunk):
    object: Literal["chat.completion"]
    usage: Usage
    metrics: AnswerMetrics
    choices: list[ChatChoice]


class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatCompletionChunkChoice]


class Completion(Chunk):
    """A whole completion, or a chunk of one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ResponseUsage(Schema):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(Schema):
    """OpenAI's response object; its other fields are those of the request."""

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


class ResponseEvent(Schema):
    """A change of a response; OpenAI's reference has its other fields."""

    type: str
    sequence_number: int


class Tokenized(Schema):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Schema):
    """The text of tokens."""

    prompt: str


class Model(Schema):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "outrider"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Schema):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(Schema):
    status: Literal["ok"] = "ok"


class Version(Schema):
    version: str


_GENERATIONS: tuple[type[Schema], ...] = (
    ChatCompletion, ChatCompletionChunk, Completion, ResponseObject, ResponseEvent,
)  # fmt: skip


def answers(whole: type[Schema], chunk: type[Schema]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route with whole answers and streams of chunks."""
    content = {
        kind: {"schema": {"$ref": _REF.format(model=model.__name__)}}
        for kind, model in (("application/json", whole), ("text/event-stream", chunk))
    }
    text = "The answer; a stream of its chunks if `stream` is true."
    return {200: {"description": text, "content": content}}


class DocumentedApp(FastAPI):
    """Adds the schemas that `answers` refers to: FastAPI allows only one model for a response."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            wanted: Any = [(model, "validation") for model in _GENERATIONS]
            schemas |= models_json_schema(wanted, ref_template=_REF)[1]["$defs"]
        return super().openapi()
