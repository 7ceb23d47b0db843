"""What the body of a request may hold: fields and their types, and no others.

Limits that the coordinator knows are its own to check; null means that a field is not given. What
OpenAI's and vLLM's requests may ask for and Outrider does not do is refused by name where it asks
for something, and ignored where its value asks for nothing, as clients send it that write every
field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

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

Unserved = Mapping[str, tuple[Any, ...]]
"""Fields, and the values (beside null) that ask for nothing."""
_ANY: Final = object()
"""Every value: a label, or a hint that changes no answer."""

_EVERYWHERE: Final[Unserved] = {
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "best_of": (1,),
    "prompt_logprobs": (),
    "priority": (0,),
    "metadata": (_ANY,),
    "request_id": (_ANY,),
    "service_tier": ("auto", "default"),
}
IN_COMPLETIONS: Final[Unserved] = {
    **_EVERYWHERE,
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (True,),
}
IN_CHAT: Final[Unserved] = {
    **_EVERYWHERE,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (_ANY,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "safety_identifier": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
}
IN_MESSAGES: Final[Unserved] = {
    "name": (_ANY,),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
}


def without_unserved(values: Any, unserved: Unserved) -> Any:
    """The values without those of fields that are not served. Raises `ValueError`, naming the
    field, for one that asks for something. What is no mapping is left to others to refuse."""
    if not isinstance(values, dict):
        return values
    for name in unserved.keys() & values.keys():
        idle = unserved[name]
        if not (values[name] is None or _ANY in idle or _is_among(values[name], idle)):
            raise UnservedField(name, idle)
    return {name: value for name, value in values.items() if name not in unserved}


class UnservedField(ValueError):
    """A field asks for what is not served."""

    def __init__(self, name: str, idle: tuple[Any, ...]) -> None:
        allowed = " or ".join(json.dumps(value) for value in idle)
        super().__init__("is not served; leave it out" + (allowed and f", or give {allowed}"))
        self.name = name


def _is_among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether it is one of them; 1 is not true, though Python finds them equal."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


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

    def validate(value: int) -> int:
        if not low <= value <= high:
            raise ValueError(f"got {value}; allowed: {low}..{high}")
        return value

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return AfterValidator(validate), WithJsonSchema(schema)


def _unicode(text: str) -> str:
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
