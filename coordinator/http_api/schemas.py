"""The types of HTTP answers, from which FastAPI makes the OpenAPI document. Errors and answers with
generated text are dicts, because instances of classes are too slow for the chunks of a stream."""

from typing import Annotated, Any, Literal, NotRequired

from fastapi import FastAPI
from fastapi.openapi.constants import REF_TEMPLATE
from pydantic import BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

Responses = dict[int | str, dict[str, Any]]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class Usage(TypedDict):
    """Numbers of tokens, for all choices together. A prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(TypedDict):
    """Statistics of drafting, for all choices together. `num_spec_steps` counts the
    rounds with draft tokens."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_spec_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: NotRequired[list[int]]
    acceptance_histogram_by_draft_length: NotRequired[dict[str, list[int]]]


class AnswerMetrics(TypedDict):
    speculative_decoding: SpeculativeDecoding


class LikelyToken(TypedDict):
    token: str
    bytes: list[int]
    logprob: float


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: Annotated[
        list[float | None], Field(description="The entry of a prompt's first token is null.")
    ]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(TypedDict):
    name: NotRequired[
        Annotated[
            str,
            Field(
                description="In a stream, only the first part of a call has the name and the id."
            ),
        ]
    ]
    arguments: Annotated[str, Field(description="JSON as the model wrote it. It may be invalid.")]


class ToolCall(TypedDict):
    index: NotRequired[
        Annotated[
            int, Field(description="In a stream, the index of the call to which this part belongs.")
        ]
    ]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


class AssistantMessage(TypedDict, total=False):
    """A message, or the part of a message that a chunk adds."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str
    tool_calls: list[ToolCall]


class Choice(TypedDict):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: Annotated[
        str | int | None,
        Field(
            description="The stop string or stop token that ended the text, or `deadline` or "
            "`cancelled`."
        ),
    ]
    token_ids: NotRequired[
        Annotated[list[int], Field(description="Only present if return_token_ids is true.")]
    ]


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletionChunkChoice(Choice):
    delta: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Envelope(TypedDict):
    id: str
    created: int
    model: str


class ChatCompletion(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: AnswerMetrics


class Chunk(Envelope):
    usage: NotRequired[
        Annotated[
            Usage | None, Field(description="stream_options decides which chunks have the usage.")
        ]
    ]
    metrics: NotRequired[
        Annotated[AnswerMetrics, Field(description="Only the last chunk has metrics.")]
    ]


class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatCompletionChunkChoice]


class Completion(Chunk):
    """A whole completion, or a chunk of a completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ResponseUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


ResponseStatus = Literal["completed", "incomplete", "failed", "in_progress"]


class ResponseObject(TypedDict):
    """OpenAI's response object. It has further fields, which repeat the request."""

    id: str
    object: Literal["response"]
    model: str
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage | None
    output: Annotated[
        list[dict[str, Any]], Field(description="Messages, reasoning, and calls of functions.")
    ]
    temperature: float
    top_p: float
    stop_reason: NotRequired[str | int | None]
    metrics: NotRequired[AnswerMetrics]


class ResponseEvent(TypedDict):
    """An event of a stream. OpenAI's reference describes the other fields of each event."""

    type: str
    sequence_number: int


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "outrider"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


def _answers(whole: type[Any], chunk: type[Any]) -> Responses:
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
        _, extra = TypeAdapter.json_schemas(
            [
                ("chat", "serialization", TypeAdapter(ChatCompletionChunk)),
                ("response", "serialization", TypeAdapter(ResponseEvent)),
            ],
            ref_template=REF_TEMPLATE,
        )
        document["components"]["schemas"] |= extra["$defs"]
        return document
