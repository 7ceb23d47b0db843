"""What the body of a request may hold: fields and their types, and no others.

Limits that the coordinator knows are its own to check; null is as good as nothing everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from outrider.errors import BadRequest
from outrider.limits import ANSWERS_MAX, SEED_BITS, SEED_MAX
from outrider.speculation.sampling_params import Rule

from .unserved import IN_CHAT, IN_COMPLETIONS, IN_MESSAGES, without_unserved

Item = TypeVar("Item")


class _AtFirst(FailFast):
    """Stops at the first wrong item of a list: there may be millions."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Several = Annotated[list[Item], _AtFirst()]


def _described(field: str, words: str) -> WrapValidator:
    """Says what a field of several kinds may be, in place of what is wrong with each kind."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise BadRequest(field, f"must be {words}, all text in Unicode") from None

    return WrapValidator(validate)


def _within(low: int, high: int) -> tuple[object, ...]:
    """Bounds that are told as the coordinator tells its own."""

    def validate(value: int) -> int:
        if not low <= value <= high:
            raise ValueError(f"got {value}; allowed: {low}..{high}")
        return value

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return AfterValidator(validate), WithJsonSchema(schema)


def _unicode(text: str) -> str:
    """JSON may spell half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is not Unicode: it has a lone surrogate") from None
    return text


Words = Annotated[str, AfterValidator(_unicode)]
"""Text that can be encoded."""


class Body(BaseModel):
    """Unknown fields, NaN and infinity are refused; nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Speculation(Body):
    """How drafts are used for this request, and what is told of them."""

    enabled: bool | None = Field(
        default=None, description="false = plain decoding by the target alone."
    )
    rule: Annotated[Rule, Field(strict=False)] | None = Field(
        default=None, description="How drafts are accepted; by default as the sampling asks for."
    )
    num_draft_tokens: int | None = Field(
        default=None, description="Most draft tokens of a round, 0..16."
    )
    draft_deadline_ms: int | None = Field(
        default=None,
        description="Time that a round gives its draft, which answers with what it has by then.",
    )
    histograms: bool | None = Field(
        default=None, description="Tell how many rounds accepted how much."
    )


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool | None = Field(default=None, description="A last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="The usage in every chunk."
    )
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Body):
    """What both kinds of generation have."""

    model: Words | None = Field(
        default=None, description="The served model's name; it may be left out."
    )
    max_tokens: int | None = None
    min_tokens: int | None = Field(
        default=None, description="Only with ignore_eos and without stop."
    )
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, *_within(1, ANSWERS_MAX)] | None = Field(
        default=None, description="Texts for one prompt."
    )
    seed: Annotated[int, *_within(-(2 ** (SEED_BITS - 1)), SEED_MAX)] | None = Field(
        default=None, description="A negative one is the same as itself plus 2**64."
    )
    stop: Annotated[
        Words | Several[Words] | None, _described("stop", "a string or a list of strings")
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Added to logits, by token id."
    )
    user: Words | None = Field(
        default=None, description="A label of the caller's own; not looked at."
    )
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    deadline_ms: int | None = Field(
        default=None, description="When the answer is cut off, ms from now."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Tell the tokens beside the text."
    )
    speculation: Speculation | None = None
    response_format: dict[str, Any] | None = Field(
        default=None,
        description="What form the answer has: text, json_object, or json_schema with its schema.",
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="The same as vLLM has it: json, json_object, regex or choice."
    )
    guided_json: dict[str, Any] | Words | None = Field(
        default=None, description="A schema, as vLLM had it before structured_outputs."
    )
    guided_regex: Words | None = Field(default=None, description="A regular expression.")
    guided_choice: Several[Words] | None = Field(default=None, description="One of these texts.")
    guided_grammar: Any = Field(default=None, description="Not served.")


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Words

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", "text") != "text":
            raise ValueError(f"a part of type {value['type']!r} is not served; only text is")
        return value


class Message(Body):
    """A turn of a conversation."""

    role: Words
    content: Words | Several[TextPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_unserved(cls, value: Any) -> Any:
        return without_unserved(value, IN_MESSAGES)


class ChatBody(GenerationBody):
    """Of a chat completion."""

    messages: Several[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_unserved(cls, value: Any) -> Any:
        return without_unserved(value, IN_CHAT)


class CompletionBody(GenerationBody):
    """Of a completion of raw text or tokens."""

    prompt: Annotated[
        Words | Several[int] | Several[Words] | Several[Several[int]],
        _described(
            "prompt", "a string, a list of strings, a list of token ids, or a list of such lists"
        ),
    ]
    logprobs: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_unserved(cls, value: Any) -> Any:
        return without_unserved(value, IN_COMPLETIONS)
