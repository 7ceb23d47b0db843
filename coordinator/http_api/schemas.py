"""Pydantic classes that describe the HTTP answers in the OpenAPI document. Answers with generated
text are built as plain dicts, because these classes are too slow for the chunks of a stream."""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.constants import REF_TEMPLATE
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

Responses = dict[int | str, dict[str, Any]]


class Schema(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Usage(Schema):
    """Numbers of tokens, for all choices together. A prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(Schema):
    """Statistics of drafting, for all choices together. `num_spec_steps` counts the
    rounds with draft tokens."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance_histogram: list[int] = []
    acceptance_histogram_by_draft_length: dict[str, list[int]] = {}


AnswerMetrics = dict[Literal["speculative_decoding"], SpeculativeDecoding]


class Choice(Schema):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    """The stop string or stop token that ended the text, or `deadline` or `cancelled`."""
    token_ids: list[int] = []
    """Only present if return_token_ids is true."""


class LikelyToken(Schema):
    token: str
    bytes: list[int]
    logprob: float


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Schema):
    content: list[ChatToken]
    refusal: None


class FunctionCall(Schema):
    name: str = ""
    """In a stream, only the first part of a call has the name and the id."""
    arguments: str
    """JSON as the model wrote it. It may be invalid."""


class ToolCall(Schema):
    index: int = 0
    """In a stream, the index of the call to which this part belongs."""
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Schema):
    """A message, or the part of a message that a chunk adds."""

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
    """The entry of a prompt's first token is null."""
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
    """stream_options decides which chunks have the usage."""
    metrics: AnswerMetrics | None = None
    """Only the last chunk has metrics."""


class ChatCompletion(Chunk):
    object: Literal["chat.completion"]
    usage: Usage
    metrics: AnswerMetrics
    choices: list[ChatChoice]


class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatCompletionChunkChoice]


class Completion(Chunk):
    """A whole completion, or a chunk of a completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ResponseUsage(Schema):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(Schema):
    """OpenAI's response object. It has further fields, most of which repeat the request."""

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
    """An event of a stream. OpenAI's reference describes the other fields of each event."""

    type: str
    sequence_number: int


class Tokenized(Schema):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Schema):
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


def _answers(whole: type[Schema], chunk: type[Schema]) -> Responses:
    chunks = {"schema": {"$ref": REF_TEMPLATE.format(model=chunk.__name__)}}
    text = "The answer. If `stream` is true, it is a stream of chunks."
    return {200: {"description": text, "model": whole, "content": {"text/event-stream": chunks}}}


CHAT = _answers(ChatCompletion, ChatCompletionChunk)
COMPLETION = _answers(Completion, Completion)
RESPONSE = _answers(ResponseObject, ResponseEvent)


class DocumentedApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI adds the schemas of whole answers. This method adds the schemas of chunks."""
        document = super().openapi()
        _, found = models_json_schema(
            [(ChatCompletionChunk, "serialization"), (ResponseEvent, "serialization")],
            ref_template=REF_TEMPLATE,
        )
        document["components"]["schemas"] |= found["$defs"]
        return document
