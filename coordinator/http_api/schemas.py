"""Models of the routes' answers, for the OpenAPI document. Answers to generations are not made from
these models but are plain dicts, as a chunk of a stream must be cheap."""

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
    """Numbers of tokens of all choices. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(Schema):
    """What drafts contributed to all choices. A step is a round."""

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
    """The stop string or stop token that ended the text. If the text was cut off, `deadline` or
    `cancelled`."""
    token_ids: list[int] = []
    """Only with return_token_ids."""


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
    """A stream has the name and the id only at the beginning of a call."""
    arguments: str
    """JSON as the model wrote it, which may be invalid."""


class ToolCall(Schema):
    index: int = 0
    """In a stream: which call this is a part of."""
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Schema):
    """A message, or what a chunk adds to one."""

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
    """In the last chunk or in each one, as stream_options says."""
    metrics: AnswerMetrics | None = None
    """Only in the last chunk."""


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
    """OpenAI's response object. Its other fields repeat those of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    """Messages, reasoning, and calls of functions."""
    error: dict[str, Any] | None
    usage: ResponseUsage | None
    stop_reason: str | int | None = None
    metrics: AnswerMetrics | None = None


class ResponseEvent(Schema):
    """A change of a response. OpenAI's reference describes its other fields."""

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
    """The documentation of a route that answers as a whole or in a stream of chunks."""
    content = {
        kind: {"schema": {"$ref": _REF.format(model=model.__name__)}}
        for kind, model in (("application/json", whole), ("text/event-stream", chunk))
    }
    text = "The answer; a stream of its chunks if `stream` is true."
    return {200: {"description": text, "content": content}}


class DocumentedApp(FastAPI):
    """Adds to the OpenAPI document the schemas that `answers` refers to. FastAPI adds only one
    model for each response."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            wanted: Any = [(model, "validation") for model in _GENERATIONS]
            schemas |= models_json_schema(wanted, ref_template=_REF)[1]["$defs"]
        return super().openapi()
