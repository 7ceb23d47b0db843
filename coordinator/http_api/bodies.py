"""The bodies of requests, and their translation into the coordinator's requests.

The coordinator checks the limits that depend on the model. Some clients send every field of
OpenAI's API. So a field that Outrider does not implement is accepted if its value has no effect,
such as OpenAI's default. Any other value is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from coordinator.http_api.reading import SHOWN_CHARS_MAX, UNKNOWN_FIELD
from coordinator.http_api.tools import (
    NO_TOOLS,
    PLAIN,
    REQUIRED,
    AnswerForm,
    ChatFormats,
    Tools,
    call_for_template,
    parsed_arguments,
    tools_of,
)
from coordinator.requests.validation import wrong_role, wrong_stop_string
from outrider import limits
from outrider.errors import BadRequest, did_you_mean
from outrider.grammar.constraint import Constraint
from outrider.interfaces.request import (
    ChatMessage,
    DeadlineMs,
    DraftDeadlineMs,
    FieldNames,
    GenerateRequest,
    Logprobs,
    NumDraftTokens,
    Prompt,
    StopStrings,
)
from outrider.speculation.random_streams import choice_seed
from outrider.speculation.sampling_params import (
    Bias,
    LogitBias,
    MinP,
    MinTokens,
    Penalty,
    RepetitionPenalty,
    Rule,
    SamplingParams,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
)

Unserved = Mapping[str, tuple[Any, ...]]
"""Name of a field that is not implemented -> its accepted values, besides null."""
ANY_VALUE = object()
"""An entry of `Unserved` that accepts every value, for fields that are only labels or hints."""
_REPLACED = {
    "guided_json": "`structured_outputs.json`",
    "guided_regex": "`structured_outputs.regex`",
    "guided_choice": "`structured_outputs.choice`",
    "guided_grammar": "`structured_outputs` with `json`, `regex` or `choice`",
}
"""Older field of vLLM -> the field to use."""
_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

Item = TypeVar("Item")
FailFastList = Annotated[list[Item], Field(fail_fast=True)]
"""A list that may be long. Its validation stops at the first wrong item."""
Parts = Annotated[FailFastList[Item], Field(max_length=limits.CONTENT_PARTS_MAX)]
"""The parts of one message."""


def without_effect(names: str, *values: Any) -> Unserved:
    return dict.fromkeys(names.split(), values)


def field_error(name: str, reason: str, kind: Any = "value_error") -> ValidationError:
    """Makes an error about one field, for validators that check a whole body."""
    error = PydanticCustomError(kind, "{reason}", {"reason": reason})
    details: InitErrorDetails = {"type": error, "loc": (name,), "input": None}
    return ValidationError.from_exception_data("", [details])


class Body(BaseModel):
    """A JSON object. Unknown fields, NaN and infinity are refused. Values are not converted to
    other types. A field with the value null counts as left out."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )
    unserved: ClassVar[Unserved] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > (most := limits.HTTP_FIELDS_MAX):
            raise ValueError(f"has {len(values)} fields; at most {most} are allowed")
        kept, known = dict[str, Any](), cls.model_fields
        for name, value in values.items():
            if name in known:
                if value is not None:
                    kept[name] = value
            elif (idle := cls.unserved.get(name)) is None:
                kept[name] = value  # pydantic refuses this field, but does not suggest a name.
                if hint := did_you_mean(name[:SHOWN_CHARS_MAX], known):
                    raise field_error(name, f"there is no such field{hint}", UNKNOWN_FIELD)
            elif not _is_idle(value, idle):
                allowed = " or ".join(map(json.dumps, idle))
                more = allowed and f", or give {allowed}"
                if instead := _REPLACED.get(name):
                    more = f", and give {instead}"
                raise field_error(name, f"is not supported; leave it out{more}")
        return kept


def _is_idle(value: Any, idle: tuple[Any, ...]) -> bool:
    # Compares the types, too, because 1 == True in Python.
    return value is None or any(
        idle_value is ANY_VALUE
        or (idle_value == value and isinstance(idle_value, bool) == isinstance(value, bool))
        for idle_value in idle
    )


def must_be(words: str) -> pydantic.WrapValidator:
    """Makes a validator that replaces pydantic's errors about a union by `must be {words}`."""

    def validate(value: Any, handler: pydantic.ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {words}") from None

    return pydantic.WrapValidator(validate)


def at_most(num_max: int) -> pydantic.BeforeValidator:
    """Makes a validator that refuses a long object before its entries are validated. With
    `max_length` alone, pydantic would make an error for each wrong entry."""

    def validate(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_max:
            raise ValueError(f"should have at most {num_max} items; got {len(value)}")
        return value

    return pydantic.BeforeValidator(validate)


def converted(
    given: Any, convert: Callable[[Any], Any], result: type[Any] | None = None
) -> pydantic.GetPydanticSchema:
    """Makes an annotation for a field whose caller gives a value of the type `given`. The field
    gets what `convert` makes of this value. A value of the class `result` is converted already."""

    def validate(value: Any, handler: pydantic.ValidatorFunctionWrapHandler) -> Any:
        if result is not None and isinstance(value, result):
            return value
        return convert(handler(value))

    return pydantic.GetPydanticSchema(
        lambda _, handler: core_schema.no_info_wrap_validator_function(validate, handler(given))
    )


class Speculation(Body):
    """How the request uses drafts, and what is reported about them."""

    enabled: bool = True
    """false = plain decoding by the target alone."""
    rule: Annotated[Rule, Field(strict=False)] | None = None
    """How draft tokens are accepted. The default depends on the sampling parameters."""
    num_draft_tokens: NumDraftTokens | None = None
    """Largest number of draft tokens in a round."""
    draft_deadline_ms: DraftDeadlineMs | None = None
    """Time limit for drafting in a round, ms."""
    histograms: bool = False
    """Report how many rounds accepted 0, 1, 2, ... draft tokens."""


class StreamOptions(Body):
    include_usage: bool = False
    """Add a last chunk with the usage."""
    continuous_usage_stats: bool = False
    """Add the usage to every chunk."""
    include_obfuscation: Literal[False] = False


class StreamedBody(Body):
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Add `token_ids` to each text."""

    @model_validator(mode="after")
    def _options_are_for_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            reason = "applies only to streams; leave it out, or set stream to true"
            raise field_error("stream_options", reason)
        return self


# Tags appear in pydantic's error paths. `wrong_body` drops each part that contains a space.
_ONE, _SEVERAL = "a string", "several strings"
_CHAT, _RAW = "with messages", "with a prompt"


def _stop_string(text: str) -> str:
    if reason := wrong_stop_string(text):
        raise ValueError(reason)
    return text


StopString = Annotated[str, pydantic.AfterValidator(_stop_string)]
StopField = Annotated[
    Annotated[StopString, pydantic.Tag(_ONE)]
    | Annotated[StopStrings[FailFastList[StopString]], pydantic.Tag(_SEVERAL)],
    pydantic.Discriminator(
        lambda value: {str: _ONE, list: _SEVERAL}.get(type(value)),
        custom_error_type="wrong_type",
        custom_error_message=(
            f"must be a string or a list of at most {limits.STOP_STRINGS_MAX} strings"
        ),
    ),
]


def _without_nulls(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    return {name: value for name, value in given.items() if value is not None}


class GenerationBody(Body):
    unserved: ClassVar[Unserved] = {
        **without_effect("request_id user metadata safety_identifier", ANY_VALUE),
        **without_effect("prompt_cache_key prompt_cache_retention", ANY_VALUE),
        **without_effect("skip_special_tokens spaces_between_special_tokens", True),
        **without_effect("add_generation_prompt add_special_tokens", True),
        **without_effect("include_stop_str_in_output use_beam_search echo store", False),
        **without_effect("continue_final_message background", False),
        **without_effect("length_penalty best_of", 1),
        **without_effect("priority", 0),
        **without_effect("suffix", ""),
        **without_effect("functions context_management", []),
        **without_effect("function_call", "none", "auto"),
        **without_effect("service_tier", "auto", "default"),
        **without_effect("modalities", ["text"]),
        **without_effect("reasoning_effort", "none"),
        **without_effect("verbosity", "medium"),
        **without_effect("truncation", "disabled"),
        **without_effect("prompt prompt_logprobs audio prediction chat_template"),
        **without_effect(" ".join(_REPLACED)),
        **without_effect("web_search_options previous_response_id conversation"),
        **without_effect("max_tool_calls moderation mm_processor_kwargs"),
    }
    """If a subclass has a field with one of these names, the field replaces the entry."""

    model: str = ""
    """The name of the served model. May be left out."""
    min_tokens: MinTokens = 0
    """An EOS token, stop token or stop string can end the text only after this many tokens."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: int | None = Field(default=None, ge=-(2 ** (limits.SEED_BITS - 1)), le=limits.SEED_MAX)
    """A negative seed S is the same as S + 2**64."""
    stop: StopField = []
    stop_token_ids: StopTokenIds[FailFastList[int]] = []
    """Ids of tokens that end the text like an EOS token."""
    stream: bool = False
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[LogitBias[dict[str, Bias]], at_most(limits.LOGIT_BIAS_ENTRIES_MAX)] = {}
    """For each token id, a number that is added to the token's logit."""
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool = False
    deadline_ms: DeadlineMs | None = None
    """Time after which the answer is cut off, ms."""
    speculation: Speculation = Speculation()
    structured_outputs: Annotated[
        dict[Literal["json", "json_object", "regex", "choice"], Any],
        pydantic.BeforeValidator(_without_nulls),
        at_most(limits.HTTP_FIELDS_MAX),
    ] = {}
    """The form of the answer, as in vLLM. Has one of the keys json, json_object, regex, choice."""

    def _translated(
        self,
        prompts: Mapping[str, Prompt],
        max_tokens_field: str,
        tools: Tools = NO_TOOLS,
        formats: ChatFormats | None = None,
        **own: Any,
    ) -> TranslatedBody:
        """Makes the requests for these prompts, by their names in errors. `max_tokens_field` is the
        body's name of `max_tokens`. Without `formats`, the answers are not parsed. `own` has
        further fields of the requests."""
        constraints, speculation, form = self._constraints(tools), self.speculation, PLAIN
        if len(constraints) > 1:
            reason = (
                f"cannot be combined with {constraints[0].field}; give only one of these fields"
            )
            raise BadRequest(constraints[1].field, reason)
        if not speculation.enabled and speculation.num_draft_tokens:
            raise BadRequest(
                "speculation.num_draft_tokens", "must be 0 or be left out if enabled is false"
            )
        constraint = constraints[0] if constraints else None
        if formats is not None:
            form = formats.form(tools, constraint, own["template_variables"])
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
            constraint=constraint,
            tools=tools.for_template(),
            shown_tokens=form.shown_tokens,
            answer_form=form.to_json(),
            **own,
        )
        n = self.n if isinstance(self, ChoicesBody) else 1
        seeds = [
            None if self.seed is None else choice_seed(self.seed % 2**limits.SEED_BITS, choice)
            for choice in range(n)
        ]
        requests = list[GenerateRequest]()
        for name, prompt in prompts.items():
            names = FieldNames(name, max_tokens_field, rule="speculation.rule", sampling="")
            requests += [replace(request, prompt=prompt, seed=seed, names=names) for seed in seeds]
        return TranslatedBody(self, tuple(requests), n, form=form)

    def _sampling(self) -> SamplingParams:
        given = self.model_fields_set & {field.name for field in fields(SamplingParams)}
        values: dict[str, Any] = {name: getattr(self, name) for name in given}
        for token in self.logit_bias:
            if not re.fullmatch("0|[1-9][0-9]{0,9}", token):
                raise BadRequest("logit_bias", f"{token[:20]!r} is not a token id")
        biases = sorted((int(token), bias) for token, bias in self.logit_bias.items())
        listed = {"logit_bias": tuple(biases), "stop_token_ids": tuple(self.stop_token_ids)}
        return SamplingParams(**values | listed)

    def _constraints(self, tools: Tools) -> Sequence[Constraint]:
        # If the answer must be a tool call, the response format is ignored.
        constraints = [tools.constraint() or self._format()]
        for kind, value in self.structured_outputs.items():
            if not (kind == "json_object" and value is False):
                constraints.append(_constraint(f"structured_outputs.{kind}", kind, value))
        return [constraint for constraint in constraints if constraint is not None]

    def _format(self) -> Constraint | None:
        raise NotImplementedError


class ChoicesBody(GenerationBody, StreamedBody):
    max_tokens: int | None = None
    n: int = Field(default=1, ge=1, le=limits.ANSWERS_MAX)
    """Number of answers to each prompt."""
    response_format: dict[str, Any] = {"type": "text"}
    """The form of the answer: text, json_object, or json_schema with its schema."""

    def _format(self) -> Constraint | None:
        place = "response_format"
        return format_constraint(self.response_format, place, f"{place}.json_schema.schema")


def format_constraint(given: Mapping[str, Any], field: str, schema_field: str) -> Constraint | None:
    """Returns the constraint of a response format, if any. Raises `BadRequest`."""
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Constraint.any_object(field)
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return Constraint.of_schema(schema, schema_field)
        case {"type": "json_schema"}:
            raise BadRequest(schema_field, "is missing")
    kind = given.get("type")
    raise BadRequest(f"{field}.type", f"got {kind!r}; allowed: text, json_object, json_schema")


def _constraint(field: str, kind: str, value: Any) -> Constraint:
    match kind:
        case "json":
            return Constraint.of_schema(value, field)
        case "regex":
            return Constraint.of_regex(value, field)
        case "json_object" if value is True:
            return Constraint.any_object(field)
        case "json_object":
            raise BadRequest(field, f"got {value!r}; allowed: true, false")
        case _ if isinstance(value, list):
            return Constraint.of_choices(value, field)
    raise BadRequest(field, "must be a list of strings")


class ResumeBody(StreamedBody):
    stream: bool = True


Arguments = Annotated[dict[str, Any], converted(str, parsed_arguments)]


class CalledFunction(Body):
    name: str
    arguments: Arguments
    """A JSON object, as text."""


class CalledTool(Body):
    unserved = without_effect("index", ANY_VALUE)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Body):
    type: Literal["text"]
    text: str


def lines(content: str | list[Any]) -> str:
    """Returns the text of a message. If `content` is a list, each part becomes a line."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _known_role(role: str) -> str:
    if role == "function":
        raise ValueError(f"{role!r} is not supported; use tool instead")
    if reason := wrong_role(role):
        raise ValueError(reason)
    return "system" if role == "developer" else role


class Message(Body):
    """A message of a conversation. Only an assistant's message may have reasoning or calls, or no
    content. Only a tool's message may have a `tool_call_id`, and it must have one."""

    unserved = {
        **without_effect("name", ANY_VALUE),
        **without_effect("annotations", []),
        **without_effect("function_call refusal audio reasoning"),
    }

    role: Annotated[str, pydantic.AfterValidator(_known_role)]
    content: str | Parts[TextPart] | None = None
    reasoning_content: str = ""
    tool_calls: Annotated[FailFastList[CalledTool], Field(max_length=limits.CALLS_MAX)] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fit_for_its_role(self) -> Self:
        for name in ("reasoning_content", "tool_calls", "tool_call_id"):
            role = "tool" if name == "tool_call_id" else "assistant"
            if getattr(self, name) and self.role != role:
                raise field_error(name, f"is allowed only for the role {role}; leave it out")
        if self.content is None and self.role != "assistant":
            raise field_error("content", "is missing; only the assistant may leave it out")
        if self.tool_call_id is None and self.role == "tool":
            raise field_error("tool_call_id", "is missing; give the id of the answered call")
        return self

    def turn(self) -> ChatMessage:
        """Returns the message for the chat template."""
        more: dict[str, Any] = {
            "reasoning_content": self.reasoning_content,
            "tool_calls": [
                call_for_template(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls
            ],
            "tool_call_id": self.tool_call_id,
        }
        more = {name: value for name, value in more.items() if value}
        return ChatMessage(self.role, lines(self.content or ""), more)


Turn = Annotated[ChatMessage, converted(Message, Message.turn, ChatMessage)]
"""A `Message`, as the chat template gets it."""


class OfFunction(Body):
    type: Literal["function"]


class FunctionTool(Body):
    unserved = without_effect("strict", ANY_VALUE)

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON schema of the parameters. By default, the function has no parameters."""


class Tool(OfFunction):
    function: FunctionTool


class NamedFunction(Body):
    name: str


class NamedTool(OfFunction):
    function: NamedFunction


TemplateVariable = (
    Annotated[str, Field(max_length=limits.TEMPLATE_VARIABLE_CHARS_MAX)] | int | float | bool | None
)
Messages = Annotated[FailFastList[Turn], Field(min_length=1, max_length=limits.CHAT_MESSAGES_MAX)]
ToolList = Annotated[FailFastList[Tool], Field(max_length=limits.TOOLS_MAX)]
TemplateVariables = Annotated[
    dict[str, TemplateVariable],
    Field(max_length=limits.TEMPLATE_VARIABLES_MAX),
    at_most(limits.TEMPLATE_VARIABLES_MAX),
]


class ConversationBody(GenerationBody):
    top_logprobs: Logprobs = 0
    parallel_tool_calls: bool = True
    """false = at most one call."""
    chat_template_kwargs: TemplateVariables = {}
    """Variables for the chat template, such as enable_thinking."""

    def _conversation(
        self,
        conversation: Mapping[str, tuple[ChatMessage, ...]],
        functions: Sequence[FunctionTool],
        choice: str | NamedFunction,
        max_tokens_field: str,
        max_tokens: int | None,
        logprobs: bool,
        formats: ChatFormats | None,
    ) -> TranslatedBody:
        fields = {"name", "description", "parameters"}
        tools = tools_of(
            [function.model_dump(include=fields, exclude_unset=True) for function in functions],
            choice if isinstance(choice, str) else REQUIRED,
            "" if isinstance(choice, str) else choice.name,
            several=self.parallel_tool_calls,
        )
        return self._translated(
            conversation,
            max_tokens_field,
            tools,
            formats,
            max_tokens=max_tokens,
            logprobs=self.top_logprobs if logprobs else None,
            template_variables=self.chat_template_kwargs,
        )


class ChatBody(ChoicesBody, ConversationBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    tools: ToolList = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool,
        must_be('none, auto, required, or {"type": "function", "function": {"name": ...}}'),
    ] = "auto"
    """Whether the answer may call a tool, must call any tool, or must call the named tool."""

    def translate(self, formats: ChatFormats | None = None) -> TranslatedBody:
        """`formats` says how the model writes calls and reasoning. None = answers are not parsed.
        Raises `BadRequest` for fields that contradict each other."""
        old, new = self.max_tokens, self.max_completion_tokens  # OpenAI has both fields.
        if old is not None and new is not None and old != new:
            raise BadRequest("max_completion_tokens", f"got {new}, but max_tokens is {old}")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs", "needs logprobs to be true")
        functions, choice = [tool.function for tool in self.tools], self.tool_choice
        named = choice.function if isinstance(choice, NamedTool) else choice
        return self._conversation(
            {"messages": tuple(self.messages)},
            functions,
            named,
            "max_tokens" if new is None else "max_completion_tokens",
            old if new is None else new,
            self.logprobs,
            formats,
        )


class CompletionBody(ChoicesBody):
    prompt: Annotated[
        str
        | Annotated[FailFastList[int], Field(min_length=1)]
        | Annotated[FailFastList[str], Field(min_length=1, max_length=limits.PROMPTS_MAX)]
        | Annotated[
            FailFastList[FailFastList[int]], Field(min_length=1, max_length=limits.PROMPTS_MAX)
        ],
        must_be(
            f"a string, a list of 1 to {limits.PROMPTS_MAX} strings, a list of token ids, or a "
            f"list of 1 to {limits.PROMPTS_MAX} lists of token ids"
        ),
    ]
    logprobs: Logprobs | None = None
    echo: bool = False
    """Begin the answer with the prompt. If logprobs is given, the answer also has the
    log-probabilities of the prompt's tokens, and max_tokens may be 0."""

    def translate(self) -> TranslatedBody:
        given = self.prompt
        prompts: list[Any] = (
            [given] if isinstance(given, str) or isinstance(given[0], int) else given
        )
        names = [f"prompt[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
        each = [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
        translated = self._translated(
            dict(zip(names, each, strict=True)),
            "max_tokens",
            max_tokens=self.max_tokens,
            default_max_tokens=_COMPLETION_TOKENS,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )
        return replace(translated, echoes=self.echo)


class TokenizeBody(Body):
    """A text, or a conversation for the model's chat template."""

    unserved = GenerationBody.unserved

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a prompt. The default is true. In a
    conversation, only the template adds special tokens."""
    return_token_strs: bool = False
    tools: ToolList = []
    chat_template_kwargs: TemplateVariables = {}

    def translate(self) -> TranslatedBody:
        if (self.prompt is None) is (self.messages is None):
            raise BadRequest("prompt", "give either prompt or messages")
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs"):
                if getattr(self, name):
                    raise BadRequest(name, "is allowed only with messages; leave it out")
            return CompletionBody.model_construct(**dict(self)).translate()
        if self.add_special_tokens:
            raise BadRequest("add_special_tokens", "must be false or left out with messages")
        return ChatBody.model_construct(**dict(self)).translate()


class DetokenizeBody(Body):
    model: str = ""
    tokens: FailFastList[int]


@dataclass(frozen=True, slots=True)
class TranslatedBody:
    body: GenerationBody | ResumeBody
    requests: tuple[GenerateRequest, ...]
    """`n` requests for the first prompt, then `n` requests for the second prompt, and so on."""
    n: int = 1
    echoes: bool = False
    """Whether each answer begins with its prompt."""
    form: AnswerForm = PLAIN

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].logprobs is not None


def _kind(value: object) -> str:
    is_chat = isinstance(value, ChatBody) or (isinstance(value, dict) and "messages" in value)
    return _CHAT if is_chat else _RAW


NativeBody = Annotated[
    Annotated[ChatBody, pydantic.Tag(_CHAT)] | Annotated[CompletionBody, pydantic.Tag(_RAW)],
    pydantic.Discriminator(_kind),
]
