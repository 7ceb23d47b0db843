"""What the body of a request may hold, and the coordinator's requests that it stands for.

Limits that the coordinator knows are its own to check: it names its own fields, and
`TranslatedBody.renamed` gives them the names that the body has for them. What OpenAI's and vLLM's
requests may ask for and Outrider does not do is refused where it asks for something, and ignored
where its value asks for nothing, as clients send it that write every field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from coordinator.http_api.tool_parsers import AnswerForm
from coordinator.http_api.tools import REQUIRED, Tools, arguments_of, tools_of
from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint
from outrider.limits import (
    ANSWERS_MAX,
    CALLS_MAX,
    CHAT_MESSAGES_MAX,
    CHAT_PARTS_MAX,
    CHOICES_MAX,
    CONSTRAINT_BYTES_MAX,
    HTTP_CONTAINERS_MAX,
    HTTP_FIELDS_MAX,
    LOGIT_BIAS_ENTRIES_MAX,
    PROMPTS_MAX,
    SEED_BITS,
    SEED_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    TEMPLATE_VARIABLE_CHARS_MAX,
    TEMPLATE_VARIABLES_MAX,
    TOOLS_MAX,
)
from outrider.request import ChatMessage, GenerateRequest, Prompt
from outrider.speculation.random_streams import choice_seed
from outrider.speculation.sampling_params import Rule, SamplingParams

Unserved = Mapping[str, tuple[Any, ...]]
"""Fields that are not served, and the values (beside null) that ask for nothing."""
ANY_VALUE = object()
"""Every value: a label, or a hint that changes no answer."""
_COMPLETION_TOKENS = 16
"""OpenAI's default of a completion's `max_tokens`."""

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True)]
"""Validated up to the first wrong item: there may be millions."""


def asks_nothing(names: str, *values: Any) -> Unserved:
    return dict.fromkeys(names.split(), values)


def field_error(name: str, reason: str) -> ValidationError:
    """What is wrong with one field of a body, for a validator of the whole body to raise."""
    told: InitErrorDetails = {
        "type": "value_error", "loc": (name,), "input": None, "ctx": {"error": ValueError(reason)}
    }  # fmt: skip
    return ValidationError.from_exception_data(name, [told])


class Body(BaseModel):
    """A JSON object. Unknown fields, NaN and infinity are refused; nothing is converted; null is as
    good as nothing."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )
    unserved: ClassVar[Unserved] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > HTTP_FIELDS_MAX:
            raise ValueError(f"has {len(values)} fields; at most {HTTP_FIELDS_MAX} are allowed")
        kept = {name: value for name, value in values.items() if not cls._is_idle(name, value)}
        for name in kept:
            if (idle := cls.unserved.get(name)) is not None:
                allowed = " or ".join(json.dumps(value) for value in idle)
                raise field_error(
                    name, "is not supported; leave it out" + (allowed and f", or give {allowed}")
                )
        return kept

    @classmethod
    def _is_idle(cls, name: str, value: Any) -> bool:
        """Whether a field asks for nothing. 1 is not true, though Python finds them equal."""
        if value is None:
            return name in cls.unserved or name in cls.model_fields
        return any(
            idle is ANY_VALUE
            or (idle == value and isinstance(idle, bool) == isinstance(value, bool))
            for idle in cls.unserved.get(name, ())
        )


def must_be(words: str) -> WrapValidator:
    """Says what a field of several kinds may be, in place of what is wrong with each kind."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {words}") from None

    return WrapValidator(validate)


def _few_values(value: Any) -> Any:
    """Counts values within values, no more of them than there may be."""
    num_values, left = 0, [value]
    while left:
        inner = left.pop()
        if isinstance(inner, dict | list):
            num_values += len(inner)
            left += inner.values() if isinstance(inner, dict) else inner
        if num_values > CONSTRAINT_BYTES_MAX // 2:  # Each takes two at least, with a comma.
            raise ValueError(
                f"has more values than {CONSTRAINT_BYTES_MAX} bytes, which are allowed"
            )
    return value


Described = Annotated[dict[str, Any], BeforeValidator(_few_values)]


B = TypeVar("B", bound=Body)
NO_STREAM = "is for streams; set stream to true, or leave it out"


class Speculation(Body):
    """How drafts are used for this request, and what is told of them."""

    enabled: bool = True
    """false = plain decoding by the target alone."""
    rule: Annotated[Rule, Field(strict=False)] | None = None
    """How drafts are accepted; by default as the sampling asks for."""
    num_draft_tokens: int | None = None
    """Most draft tokens of a round, 0..16."""
    draft_deadline_ms: int | None = None
    """Time that a round gives its draft, which answers with what it has by then."""
    histograms: bool = False
    """Tell how many rounds accepted how much."""


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    """A last chunk with the usage."""
    continuous_usage_stats: bool = False
    """The usage in every chunk."""
    include_obfuscation: Literal[False] = False


class GenerationBody(Body):
    """What every kind of generation has."""

    unserved: ClassVar[Unserved] = {
        **asks_nothing("request_id", ANY_VALUE),
        **asks_nothing("skip_special_tokens spaces_between_special_tokens", True),
        **asks_nothing("include_stop_str_in_output use_beam_search", False),
        **asks_nothing("length_penalty", 1),
        **asks_nothing("priority", 0),
        **asks_nothing("service_tier", "auto", "default"),
        **asks_nothing("prompt_logprobs"),
    }

    model: str = ""
    """The served model's name; it may be left out."""
    min_tokens: int = 0
    """No EOS, stop token or stop string before so many tokens."""
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(default=None, ge=-(2 ** (SEED_BITS - 1)), le=SEED_MAX)
    """A negative one is the same as itself plus 2**64."""
    stop: Annotated[
        str | Annotated[Several[str], Field(max_length=STOP_STRINGS_MAX)],
        must_be(f"a string or a list of at most {STOP_STRINGS_MAX} strings"),
    ] = []
    stop_token_ids: Annotated[Several[int], Field(max_length=STOP_TOKEN_IDS_MAX)] = []
    """Tokens that end the text as an EOS does."""
    stream: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = Field(default={}, max_length=LOGIT_BIAS_ENTRIES_MAX)
    """Added to logits, by token id."""
    user: str = ""
    """A label of the caller's own; not looked at."""
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    deadline_ms: int | None = None
    """When the answer is cut off, ms from now."""
    speculation: Speculation = Speculation()
    structured_outputs: Described = {}
    """What form the answer has, as vLLM has it: json, json_object, regex or choice."""


class ChoicesBody(GenerationBody):
    """What chat completions and completions have besides."""

    unserved = {
        **GenerationBody.unserved,
        **asks_nothing("metadata", ANY_VALUE),
        **asks_nothing("best_of", 1),
        **asks_nothing("guided_grammar"),
    }

    max_tokens: int | None = None
    n: int = Field(default=1, ge=1, le=ANSWERS_MAX)
    """Texts for one prompt."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Tell the tokens beside the text."""
    response_format: Described | None = None
    """What form the answer has: text, json_object, or json_schema with its schema."""
    guided_json: Annotated[dict[str, Any] | str, BeforeValidator(_few_values)] | None = None
    """A schema, as vLLM had it before structured_outputs."""
    guided_regex: str | None = None
    """A regular expression."""
    guided_choice: Annotated[Several[str], Field(max_length=CHOICES_MAX)] | None = None
    """One of these texts."""

    def _translated(
        self,
        prompts: Sequence[Prompt],
        names: Mapping[str, str],
        **own: Any,
    ) -> TranslatedBody:
        """Of `prompts`, with what each kind of body calls differently: fields of the requests, and
        the body's `names` for them."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options", NO_STREAM)
        found, speculation = self._constraints(), self.speculation
        if len(found) > 1:
            reason = f"is given beside {found[0][0]}; allowed: one of them"
            raise BadRequest(found[1][0], reason)
        if not speculation.enabled and speculation.num_draft_tokens:
            raise BadRequest(
                "speculation.num_draft_tokens", "must be 0, or be left out, with enabled false"
            )
        request = GenerateRequest(
            prompt="",
            model=self.model,
            sampling=self._sampling(),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
            rule=speculation.rule,
            num_draft_tokens=speculation.num_draft_tokens if speculation.enabled else 0,
            deadline_ms=self.deadline_ms,
            include_rounds=speculation.histograms,
            draft_deadline_ms=speculation.draft_deadline_ms,
            constraint=found[0][1] if found else None,
            **own,
        )
        seeds = [
            None if self.seed is None else choice_seed(self.seed % 2**SEED_BITS, choice)
            for choice in range(self.n)
        ]
        requests = tuple(
            replace(request, prompt=prompt, seed=seed) for prompt in prompts for seed in seeds
        )
        more = {"stop[0]": "stop"} if isinstance(self.stop, str) else {}
        more |= {constraint.kind.value: field for field, constraint in found}
        return TranslatedBody(self, requests, {**_NAMES, **names, **more})

    def _sampling(self) -> SamplingParams:
        given = self.model_fields_set & {field.name for field in fields(SamplingParams)}
        values: dict[str, Any] = {name: getattr(self, name) for name in given}
        for token in self.logit_bias:
            if not re.fullmatch("0|[1-9][0-9]{0,9}", token):
                raise BadRequest("logit_bias", f"{token[:20]!r} is not a token id")
        biases = sorted((int(token), bias) for token, bias in self.logit_bias.items())
        listed = {"logit_bias": tuple(biases), "stop_token_ids": tuple(self.stop_token_ids)}
        return SamplingParams(**values | listed)

    def _constraints(self) -> list[tuple[str, Constraint]]:
        """Each that is asked for, behind the field that asks for it. Raises `BadRequest`."""
        field, asked = "response_format", list[tuple[str, str, Any]]()
        match self.response_format:
            case None | {"type": "text"}:
                pass
            case {"type": "json_object"}:
                asked = [(field, "json_object", True)]
            case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
                asked = [(f"{field}.json_schema.schema", "json", schema)]
            case {"type": "json_schema"}:
                raise BadRequest(f"{field}.json_schema.schema", "is missing")
            case other:
                kind = other.get("type")
                raise BadRequest(
                    f"{field}.type", f"got {kind!r}; allowed: text, json_object, json_schema"
                )
        given = self.structured_outputs
        asked += [(f"structured_outputs.{kind}", kind, value) for kind, value in given.items()]
        for kind in ("json", "regex", "choice"):
            field = f"guided_{kind}"
            asked.append((field, kind, getattr(self, field)))
        return [
            (field, _constraint(field, kind, value))
            for field, kind, value in asked
            if value is not None and not (kind == "json_object" and value is False)
        ]


def _constraint(field: str, kind: str, value: Any) -> Constraint:
    match kind, value:
        case "json_object", True:
            return Constraint.any_object()
        case "json", _:
            return Constraint.of_schema(value, field)
        case "regex", _:
            return Constraint.of_regex(value, field)
        case "choice", list():
            return Constraint.of_choices(value, field)
        case "json_object", _:
            raise BadRequest(field, f"got {value!r}; allowed: true, false")
        case "choice", _:
            raise BadRequest(field, "is no list of texts")
    raise BadRequest(field, "is not supported; allowed: one of json, json_object, regex, choice")


class ResumeBody(Body):
    """How the rest of an answer is told."""

    stream: bool = True
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    def as_part_of(self, kind: type[B], **more: Any) -> B:
        """A body that asks for such an answer and `more`, and says nothing else."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options", NO_STREAM)
        return kind.model_construct(
            **more, **{name: getattr(self, name) for name in type(self).model_fields}
        )


class CalledFunction(Body):
    """What an assistant has called."""

    name: str
    arguments: str
    """A JSON object, as text."""


class CalledTool(Body):
    """A call of a tool."""

    unserved = asks_nothing("index", ANY_VALUE)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A turn of a conversation."""

    unserved = {
        **asks_nothing("name", ANY_VALUE),
        **asks_nothing("annotations", []),
        **asks_nothing("function_call refusal audio reasoning"),
    }

    role: str
    content: str | Several[TextPart] | None = Field(default=None, validate_default=True)
    reasoning_content: str = ""
    """How an assistant came to what it said."""
    tool_calls: Annotated[Several[CalledTool], Field(max_length=CALLS_MAX)] = []
    """What an assistant has called."""
    tool_call_id: str | None = Field(default=None, validate_default=True)
    """The call that a tool's message answers."""

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role == "function":
            raise ValueError(f"{role!r} is not supported; say tool")
        return "system" if role == "developer" else role

    @field_validator("content")
    @classmethod
    def _given(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("is missing; only the assistant's may be left out")
        return content

    @field_validator("reasoning_content", "tool_calls")
    @classmethod
    def _of_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") != "assistant":
            raise ValueError("is for messages of the assistant; leave it out")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _of_tool(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (value is None) is (info.data.get("role") == "tool"):
            raise ValueError(
                "is missing; it names the call that this answers"
                if value is None
                else "is for messages of a tool; leave it out"
            )
        return value

    def turn(self, place: str) -> ChatMessage:
        """Text parts become lines of one text. Raises `BadRequest` for arguments that are none;
        `place` is the message's."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        more: dict[str, Any] = {}
        if self.reasoning_content:
            more["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            more["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_of(
                            call.function.arguments,
                            f"{place}.tool_calls[{index}].function.arguments",
                        ),
                    },
                }
                for index, call in enumerate(self.tool_calls)
            ]
        if self.tool_call_id is not None:
            more["tool_call_id"] = self.tool_call_id
        return ChatMessage(self.role, content, more)


class FunctionTool(Body):
    """A function that the caller has."""

    unserved = asks_nothing("strict", ANY_VALUE)

    name: str
    """1 to 64 letters, digits, - and _."""
    description: str = ""
    parameters: Described = {}
    """Their JSON schema; empty = it has none."""


class Tool(Body):
    """What an answer may call."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """One of the tools' functions."""

    name: str


class NamedTool(Body):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: NamedFunction


TemplateVariable = (
    Annotated[str, Field(max_length=TEMPLATE_VARIABLE_CHARS_MAX)]
    | Annotated[int, Field(ge=-SEED_MAX, le=SEED_MAX)]
    | float
    | bool
    | None
)


def few_parts(messages: Any) -> Any:
    """Counts the parts of all messages, before any is looked at."""
    if isinstance(messages, list):
        contents = (one.get("content") for one in messages if isinstance(one, dict))
        if sum(len(one) for one in contents if isinstance(one, list)) > CHAT_PARTS_MAX:
            raise ValueError(f"have more than {CHAT_PARTS_MAX} parts in all")
    return messages


Messages = Annotated[
    Several[Message],
    Field(min_length=1, max_length=CHAT_MESSAGES_MAX),
    BeforeValidator(few_parts),
]
ToolList = Annotated[Several[Tool], Field(max_length=TOOLS_MAX)]
TemplateVariables = Annotated[dict[str, TemplateVariable], Field(max_length=TEMPLATE_VARIABLES_MAX)]


class ChatBody(ChoicesBody):
    """Of a chat completion."""

    unserved = {
        **ChoicesBody.unserved,
        **asks_nothing("echo", False),
        **asks_nothing("safety_identifier", ANY_VALUE),
        **asks_nothing("prompt_cache_key prompt_cache_retention", ANY_VALUE),
        **asks_nothing("functions", []),
        **asks_nothing("function_call", "none", "auto"),
        **asks_nothing("modalities", ["text"]),
        **asks_nothing("reasoning_effort", "none"),
        **asks_nothing("verbosity", "medium"),
        **asks_nothing("store continue_final_message", False),
        **asks_nothing("add_generation_prompt", True),
        **asks_nothing("audio prediction web_search_options chat_template"),
    }

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: ToolList = []
    """What the answer may call."""
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool,
        must_be('none, auto, required, or {"type": "function", "function": {"name": ...}}'),
    ] = "auto"
    """Whether it may call something, must, or calls a certain tool."""
    parallel_tool_calls: bool = True
    """false = one call at most."""
    chat_template_kwargs: TemplateVariables = {}
    """Variables for the chat template, such as enable_thinking."""

    @cached_property
    def called_tools(self) -> Tools | None:
        """Raises `BadRequest`."""
        choice = self.tool_choice
        named = choice.function.name if isinstance(choice, NamedTool) else ""
        return tools_of(
            [tool.function.model_dump(exclude_unset=True) for tool in self.tools],
            choice if isinstance(choice, str) else REQUIRED,
            named,
            several=self.parallel_tool_calls,
            place=".function.name",
        )

    def _constraints(self) -> list[tuple[str, Constraint]]:
        """An answer that must be calls is not held to the form that it would have as a text."""
        tools = self.called_tools
        held = None if tools is None else tools.constraint()
        found = super()._constraints()
        if held is None:
            return found
        others = [one for one in found if not one[0].startswith("response_format")]
        return [("tools", held), *others]

    def _turns(self) -> tuple[ChatMessage, ...]:
        calls = [call for message in self.messages for call in message.tool_calls]
        texts = [call.function.arguments for call in calls]
        if sum(text.count("{") + text.count("[") for text in texts) > HTTP_CONTAINERS_MAX:
            raise BadRequest(
                "messages",
                f"have calls with more than {HTTP_CONTAINERS_MAX} lists and objects in all",
            )
        return tuple(
            message.turn(f"messages[{index}]") for index, message in enumerate(self.messages)
        )

    def translate(self) -> TranslatedBody:
        """Raises `BadRequest` for fields that contradict each other. OpenAI has two
        names for the most tokens."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise BadRequest("max_completion_tokens", f"{new} is not the {old} of max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs", "needs logprobs to be true")
        names = {"chat": "messages", "chat.messages": "messages", "logprobs": "top_logprobs"}
        if new is not None:
            names["max_tokens"] = "max_completion_tokens"
        tools = self.called_tools
        asked = self._translated(
            [self._turns()],
            names,
            max_tokens=old if new is None else new,
            logprobs=self.top_logprobs if self.logprobs else None,
            tools=() if tools is None else tools.for_template(),
            template_variables=self.chat_template_kwargs,
        )
        return replace(asked, tools=tools)


class CompletionBody(ChoicesBody):
    """Of a completion of raw text or tokens."""

    unserved = {
        **ChoicesBody.unserved,
        **asks_nothing("suffix", ""),
        **asks_nothing("add_special_tokens", True),
    }

    prompt: Annotated[
        str
        | Annotated[Several[int], Field(min_length=1)]
        | Annotated[Several[str], Field(min_length=1, max_length=PROMPTS_MAX)]
        | Annotated[Several[Several[int]], Field(min_length=1, max_length=PROMPTS_MAX)],
        must_be(
            f"a string, a list of 1 to {PROMPTS_MAX} strings, a list of token ids, or a list of "
            f"1 to {PROMPTS_MAX} such lists"
        ),
    ]
    logprobs: int | None = None
    echo: bool = False
    """Tell the prompt before the text; with logprobs its log-probabilities, too, and max_tokens may
    be 0."""

    def translate(self) -> TranslatedBody:
        """As `ChatBody.translate`."""
        given = self.prompt
        prompts: list[Any] = (
            [given] if isinstance(given, str) or isinstance(given[0], int) else given
        )
        return self._translated(
            [one if isinstance(one, str) else tuple(one) for one in prompts],
            {"text": "prompt", "token_ids": "prompt"},
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            default_max_tokens=_COMPLETION_TOKENS,
        )


_NAMES = {name: f"speculation.{name}" for name in ("rule", "num_draft_tokens", "draft_deadline_ms")}
"""What fields of the coordinator's are called in every body, where it is not the same."""


@dataclass(frozen=True, slots=True)
class TranslatedBody:
    """A body, and the coordinator's requests that it stands for."""

    body: ChoicesBody
    requests: tuple[GenerateRequest, ...]
    """`n` for each prompt, all of the first prompt first."""
    names: Mapping[str, str]
    """What the body calls fields of the coordinator's."""
    tools: Tools | None = None
    """What the answers may call."""
    form: AnswerForm | None = None
    """How the answers are read; None = all of them is content."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer tells log-probabilities."""
        return self.requests[0].logprobs is not None

    def renamed(self, error: BadRequest, index: int) -> BadRequest:
        """The error of one of the requests, with the name that the body has for the field."""
        name = error.field.removeprefix("sampling.")
        head, bracket, rest = name.partition("[")
        name = self.names.get(name) or self.names.get(head, head) + bracket + rest
        if name.startswith("prompt") and len(self.requests) > self.body.n:
            name = name.replace("prompt", f"prompt[{index // self.body.n}]", 1)
        return BadRequest(name, error.reason)


# Tags that are no identifiers name no part of a field in an error.
_CHAT = "with messages"
_RAW = "with a prompt"


def _kind(value: object) -> str:
    if isinstance(value, dict) and None not in map(value.get, ("messages", "prompt")):
        raise BadRequest("prompt", "is given beside messages; allowed: one of the two")
    is_chat = isinstance(value, ChatBody) or (isinstance(value, dict) and "messages" in value)
    return _CHAT if is_chat else _RAW


NativeBody = Annotated[
    Annotated[ChatBody, Tag(_CHAT)] | Annotated[CompletionBody, Tag(_RAW)], Discriminator(_kind)
]
