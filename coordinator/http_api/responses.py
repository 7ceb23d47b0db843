"""`POST /v1/responses`: what its body may hold, the chat completion that it stands for, and its
answer, as OpenAI's items and events. Nothing is kept of a response once it has been told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from coordinator.http_api.answers import ChatAnswer, Json
from coordinator.http_api.bodies import (
    ANY_VALUE,
    Body,
    CalledFunction,
    CalledTool,
    ChatBody,
    Described,
    FunctionTool,
    GenerationBody,
    Message,
    NamedFunction,
    NamedTool,
    Several,
    TemplateVariables,
    Tool,
    TranslatedBody,
    Unserved,
    asks_nothing,
    few_parts,
    must_be,
)
from coordinator.http_api.tool_parsers import Part, joined
from outrider.errors import BadRequest
from outrider.limits import CHAT_MESSAGES_MAX, TOOLS_MAX
from outrider.request import Event, Finished
from outrider.sessions.store import FinishReason

if TYPE_CHECKING:
    from outrider.tokenizer import TokenizerText

_REASONING = "reasoning_content"
_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
"""What the fields of a chat completion, or how they begin, are called here."""
_TOLD_AGAIN = {
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "text", "tool_choice",
    "tools", "top_logprobs",
}  # fmt: skip
"""What an answer has of the body."""
_ALWAYS: Json = {
    "background": False, "previous_response_id": None, "reasoning": None, "store": False,
    "truncation": "disabled",
}  # fmt: skip
"""What is the same in every answer."""


class ItemText(Body):
    """A part of a message, whether it was given or answered."""

    unserved = asks_nothing("annotations logprobs", ANY_VALUE)

    type: Literal["input_text", "output_text"]
    text: str


class MessageItem(Body):
    """A turn of the conversation."""

    unserved = asks_nothing("id status phase", ANY_VALUE)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Several[ItemText]

    def turn(self) -> Json:
        """The message of chat that it is, or a part of."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _lines(self.content)}


class CallItem(Body):
    """A call that a former answer made."""

    unserved = asks_nothing("id status namespace caller", ANY_VALUE)

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def turn(self) -> Json:
        """See `MessageItem.turn`."""
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return {"role": "assistant", "tool_calls": [CalledTool(id=self.call_id, function=function)]}


class OutputItem(Body):
    """What such a call has brought."""

    unserved = asks_nothing("id status name namespace caller", ANY_VALUE)

    type: Literal["function_call_output"]
    call_id: str
    output: str | Several[ItemText]

    def turn(self) -> Json:
        """See `MessageItem.turn`."""
        return {"role": "tool", "content": _lines(self.output), "tool_call_id": self.call_id}


class ReasoningText(Body):
    """A part of what came before a former answer."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What came before a former answer."""

    unserved = asks_nothing("id status summary encrypted_content", ANY_VALUE)

    type: Literal["reasoning"]
    content: Several[ReasoningText] = Field(default=[])

    def turn(self) -> Json:
        """See `MessageItem.turn`."""
        return {"role": "assistant", _REASONING: _lines(self.content)}


def _lines(content: str | Sequence[ItemText | ReasoningText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _kind(value: Any) -> str | None:
    """The tag of an item; those without a type are messages."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    return f"a {'message' if kind is None else kind}" if isinstance(kind, str | None) else None


# Tags that are no identifiers name no part of a field in an error.
Item = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a function_call")]
    | Annotated[OutputItem, Tag("a function_call_output")]
    | Annotated[ReasoningItem, Tag("a reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message=(
            "must be an item of the type message, function_call, function_call_output or reasoning"
        ),
    ),
]


def _few_items(given: Any) -> Any:
    if not isinstance(given, str | list):
        raise ValueError("must be a string or a list of items")
    return few_parts(given)


class ResponsesTool(Body):
    """A function that the answer may call."""

    unserved: ClassVar[Unserved] = {
        **asks_nothing("output_schema", ANY_VALUE),
        **asks_nothing("defer_loading async", False),
        **asks_nothing("allowed_callers", ["direct"]),
    }

    type: Literal["function"]
    name: str
    """1 to 64 letters, digits, - and _."""
    description: str = ""
    parameters: Described = Field(default={})
    """Their JSON schema; empty = it has none."""
    strict: bool = True
    """Not looked at: calls that must come meet the schema."""

    def nested(self) -> Tool:
        """As chat has it."""
        given = {name: getattr(self, name) for name in self.model_fields_set - {"type", "strict"}}
        return Tool(type="function", function=FunctionTool.model_construct(**given))


class NamedResponsesTool(Body):
    """The tool that an answer must call."""

    type: Literal["function"]
    name: str

    def nested(self) -> NamedTool:
        """As chat has it."""
        return NamedTool(type="function", function=NamedFunction(name=self.name))


class TextOptions(Body):
    """How the answer's text is to look."""

    unserved = asks_nothing("verbosity", "medium")

    format: Described = Field(default={"type": "text"})
    """text, json_object, or json_schema with its schema."""


class ReasoningOptions(Body):
    """How the model is to reason, of which nothing can be chosen."""

    unserved: ClassVar[Unserved] = {
        **asks_nothing("effort", "none"),
        **asks_nothing("summary generate_summary context mode"),
    }


class ResponsesBody(GenerationBody):
    """Of a response."""

    unserved: ClassVar[Unserved] = {
        **GenerationBody.unserved,
        **asks_nothing(
            "store safety_identifier prompt_cache_key prompt_cache_retention", ANY_VALUE
        ),
        **asks_nothing("context_management", []),
        **asks_nothing("background", False),
        **asks_nothing("truncation", "disabled"),
        **asks_nothing("stream_options", {}, {"include_obfuscation": False}),
        **asks_nothing("previous_response_id conversation prompt max_tool_calls moderation"),
    }

    input: Annotated[
        Annotated[
            Several[Item],
            Field(min_length=1, max_length=CHAT_MESSAGES_MAX - 1),  # Beside the instructions.
        ]
        | str,
        BeforeValidator(_few_items),
    ]
    """The user's text, or a conversation."""
    instructions: str | None = None
    """What the system says before it."""
    max_output_tokens: int | None = None
    text: TextOptions = TextOptions()
    include: Several[Literal["message.output_text.logprobs"]] = Field(default=[])
    """What the answer tells besides."""
    top_logprobs: int = 0
    metadata: dict[str, str] = Field(default={}, max_length=16)
    """Told again with the answer; not looked at."""
    reasoning: ReasoningOptions | None = None
    tools: Annotated[Several[ResponsesTool], Field(max_length=TOOLS_MAX)] = Field(default=[])
    """What the answer may call."""
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedResponsesTool,
        must_be('none, auto, required, or {"type": "function", "name": ...}'),
    ] = "auto"
    """Whether it may call something, must, or calls a certain tool."""
    parallel_tool_calls: bool = True
    """false = one call at most."""
    chat_template_kwargs: TemplateVariables = Field(default={})
    """Variables for the chat template, such as enable_thinking."""

    def translate(self) -> TranslatedBody:
        """As the chat completion that it stands for, with the names that fields have here."""
        (messages, places), choice = self._messages(), self.tool_choice
        given = self.model_fields_set & GenerationBody.model_fields.keys()
        chat = ChatBody.model_construct(
            **{name: getattr(self, name) for name in given},
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=self._response_format(),
            logprobs=bool(self.include or self.top_logprobs),
            top_logprobs=self.top_logprobs,
            tools=[tool.nested() for tool in self.tools],
            tool_choice=choice if isinstance(choice, str) else choice.nested(),
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        try:
            asked = chat.translate()
        except BadRequest as error:
            field = places.get(error.field) or _own_name(error.field)
            raise BadRequest(field, error.reason) from error
        # What has only reasoning, without its text, is an empty prompt.
        names = {"max_tokens": "max_tokens", "token_ids": "messages", **asked.names}
        return replace(asked, names={name: _own_name(field) for name, field in names.items()})

    def _messages(self) -> tuple[list[Message], dict[str, str]]:
        """What an assistant has thought, said and called in succession is one message. And what
        the arguments of calls are called in these messages and here."""
        turns, places = list[dict[str, Any]](), dict[str, str]()
        items = self.input
        if isinstance(items, str):
            items = [MessageItem(role="user", content=items)]
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        for index, item in enumerate(items):
            if isinstance(item, ReasoningItem) and not item.content:
                continue
            turn = item.turn()
            last = turns[-1] if turns and turns[-1]["role"] == turn["role"] == "assistant" else None
            if last is not None and isinstance(item, CallItem):
                last.setdefault("tool_calls", []).extend(turn["tool_calls"])
            elif last is not None and "content" in turn and last.keys() == {"role", _REASONING}:
                last.update(turn)
            else:
                turns.append(turn)
            if isinstance(item, CallItem):
                call = f"tool_calls[{len(turns[-1]['tool_calls']) - 1}]"
                place = f"messages[{len(turns) - 1}].{call}.function.arguments"
                places[place] = f"input[{index}].arguments"
        return [Message.model_construct(**turn) for turn in turns], places

    def _response_format(self) -> Json:
        form = self.text.format
        if form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _own_name(field: str) -> str:
    for theirs, own in _NAMES.items():
        if field.startswith(theirs):
            return own + field.removeprefix(theirs)
    return field.replace(".function", "")  # Of tools and what is chosen of them.


class _Item:
    """One of the items that an answer has, as far as it has come; each step to it is an event."""

    _TYPES: ClassVar = {
        "content": ("message", "msg", "output_text"),
        "reasoning": ("reasoning", "rs", "reasoning_text"),
        "name": ("function_call", "fc", "function_call_arguments"),
    }
    """By the kind of its parts: its type, what its id begins with, and what grows."""

    def __init__(
        self, kind: str, session_id: str, index: int, name: str = "", call_id: str = ""
    ) -> None:
        self.kind = kind
        self._type, prefix, self._grows = self._TYPES[kind]
        self._id = f"{prefix}_{session_id}_{index}"
        self._index, self._name, self._call_id = index, name, call_id
        self.status = "in_progress"
        self._texts: list[str] = []
        self.logprobs: list[Json] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def told(self) -> Json:
        own: Json = {"id": self._id, "type": self._type, "status": self.status}
        if self.kind == "name":
            call = {"call_id": self._call_id, "name": self._name, "arguments": self._text}
            return own | call
        own |= {"summary": list[Json]()} if self.kind == "reasoning" else {"role": "assistant"}
        return own | {"content": [] if self.status == "in_progress" else [self._part()]}

    def opened(self) -> list[Json]:
        events = [self._item_event("added")]
        if self.kind != "name":
            events.append(self._event("content_part.added", part=self._part()))
        return events

    def grown(self, text: str, logprobs: Sequence[Json]) -> list[Json]:
        self._texts.append(text)
        self.logprobs += logprobs
        more = {"logprobs": logprobs} if self.kind == "content" else {}
        told = [self._event(f"{self._grows}.delta", delta=text, **more)]
        return told if text or logprobs else []

    def closed(self, status: str) -> list[Json]:
        self.status = status
        done = f"{self._grows}.done"
        if self.kind == "name":
            whole = [self._event(done, name=self._name, arguments=self._text)]
        else:
            part = self._part()
            more = {"logprobs": part["logprobs"]} if self.kind == "content" else {}
            whole = [
                self._event(done, text=self._text, **more),
                self._event("content_part.done", part=part),
            ]
        return [*whole, self._item_event("done")]

    def _part(self) -> Json:
        own: Json = {"type": self._grows, "text": self._text}
        if self.kind == "content":
            own |= {"annotations": [], "logprobs": [*self.logprobs]}
        return own

    def _item_event(self, step: str) -> Json:
        return _event(f"output_item.{step}", output_index=self._index, item=self.told())

    def _event(self, name: str, /, **told: Any) -> Json:
        place: Json = {"item_id": self._id, "output_index": self._index}
        if self.kind != "name":
            place["content_index"] = 0
        return _event(name, **place, **told)


def _event(name: str, /, **told: Any) -> Json:
    return {"type": f"response.{name}", **told}


class ResponseAnswer(ChatAnswer):
    """To a response: the items that it has, and of a stream an event for each step to them."""

    id_prefix = "resp_"
    is_named = True
    last: ClassVar[bytes] = b""

    def __init__(
        self,
        body: ResponsesBody,
        asked: TranslatedBody,
        text: TokenizerText | None,
        num_draft_tokens: int,
        created: int,
    ) -> None:
        super().__init__(asked, text, num_draft_tokens, created)
        self._body = body
        self._items: list[_Item] = []
        self._num_events = 0

    def whole(self) -> Json | None:
        if self._asked.body.stream:
            return None
        self._grown()
        self._ended()
        return self._response(self._status)

    def failed(self, error: Json) -> Sequence[Json]:
        """A response that has failed, with the items that came before."""
        for item in self._items[-1:]:
            item.status = "incomplete"
        detail = error["error"]
        code = detail["code"] if detail["code"] == "rate_limit_exceeded" else "server_error"
        response = self._response("failed", {**detail, "code": code})
        return self._numbered([_event("failed", response=response)])

    def _parts(self, index: int, event: Event) -> Sequence[Json]:
        events = list[Json]()
        if not self._num_events:
            begun = self._response("in_progress")
            events = [_event(name, response=begun) for name in ("created", "in_progress")]
        events += self._grown()
        if isinstance(event, Finished):
            events += self._ended()
            events.append(_event(self._status, response=self._response(self._status)))
        return self._numbered(events)

    def _grown(self) -> list[Json]:
        """Adds what has come to the items, and tells of it. Log-probabilities are those of a
        message: the next part of one has all of them that came since the last, or since a call."""
        [choice], events = self._choices, list[Json]()
        for kind, text in joined(choice.parts):
            if kind == "name" or kind not in ("arguments", *(one.kind for one in self._items[-1:])):
                events += self._items[-1].closed("completed") if self._items else []
                self._items.append(self._next_item(kind, text))
                events += self._items[-1].opened()
            logprobs = self.logprobs(choice.scored)["content"] if kind == "content" else []
            choice.scored = []
            if kind != "name":
                events += self._items[-1].grown(text, logprobs)
        choice.parts, choice.token_ids = [], []
        return events

    def _next_item(self, kind: str, text: str) -> _Item:
        session_id, form = self._session_id, self._asked.form
        name = call_id = ""
        if kind == "name" and form is not None:
            num_calls = sum(item.kind == kind for item in self._items)
            name, call_id = text, form.call_id(session_id, num_calls)
        return _Item(kind, session_id, len(self._items), name, call_id)

    def _ended(self) -> list[Json]:
        [choice] = self._choices
        if not self._items or (choice.scored and self._items[-1].kind == "content"):
            choice.parts = [Part("content", "")]
        return [*self._grown(), *self._items[-1].closed(self._status)]

    def _numbered(self, events: Sequence[Json]) -> Sequence[Json]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

    @property
    def _session_id(self) -> str:
        return str(self._envelope["id"]).removeprefix(self.id_prefix)

    @property
    def _status(self) -> str:
        """Of a response whose events have all come."""
        [choice] = self._choices
        is_whole = choice.finished and choice.finished.finish_reason is FinishReason.STOP
        return "completed" if is_whole else "incomplete"

    def _response(self, status: str, error: Json | None = None) -> Json:
        sampling = self._asked.requests[0].sampling
        [choice] = self._choices
        told: Json = {
            "id": self._envelope["id"],
            "object": "response",
            "created_at": self._envelope["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "model": self._envelope["model"],
            "output": [item.told() for item in self._items],
            "usage": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **self._body.model_dump(include=_TOLD_AGAIN),
            **_ALWAYS,
        }
        if choice.finished:
            if status == "incomplete":  # Its other reasons are `stop_reason`, which clients ignore.
                told["incomplete_details"] = {"reason": "max_output_tokens"}
            usage = self._usage()
            told["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
            told["stop_reason"] = self._choice(0, {}, choice.finished)["stop_reason"]
            told["metrics"] = self._metrics()
        return told
