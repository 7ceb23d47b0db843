"""OpenAI's `POST /v1/responses`. A body becomes the same request as the equivalent body of
`POST /v1/chat/completions`. Responses are not stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from coordinator.http_api import bodies, schemas
from coordinator.http_api.answers import ChatAnswer, Json, stop_reason
from coordinator.http_api.bodies import (
    ANY_VALUE,
    Arguments,
    Body,
    FailFastList,
    Parts,
    at_most,
    converted,
    lines,
    without_effect,
)
from coordinator.http_api.tools import ChatFormats, Part, call_for_template, call_id_of
from outrider.grammar.constraint import Constraint
from outrider.interfaces.request import ChatMessage, Event, Finished, RoundReport, Started
from outrider.limits import CHAT_MESSAGES_MAX, TOOLS_MAX
from outrider.sessions.store import FinishReason

_REASONING = "reasoning_content"
_REPEATED = {
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
}
"""Fields of the body that the answer repeats."""
_ALWAYS: Json = {
    "background": False,
    "previous_response_id": None,
    "reasoning": None,
    "store": False,
    "truncation": "disabled",
}
"""Fields with the same value in every answer."""


class ItemText(Body):
    unserved = without_effect("annotations logprobs", ANY_VALUE)

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


_FIELDS = {
    "message": ("role content", ""),
    "function_call": ("call_id name arguments", ""),
    "function_call_output": ("call_id output", "name"),
    "reasoning": ("", "content"),
}
"""For each type of item: the fields that it must have, and the fields that it may have."""


class Item(Body):
    """A message (`role`, `content`), a call of an earlier answer (`call_id`, `name`, `arguments`),
    the result of a call (`call_id`, `output`), or an earlier answer's reasoning (`content`)."""

    unserved = without_effect(
        "id status phase namespace caller summary encrypted_content", ANY_VALUE
    )

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | Parts[ItemText] = ""
    call_id: str = ""
    name: str = ""
    arguments: Arguments = Field(default={})
    """A JSON object, as text."""
    output: str | Parts[ItemText] = ""

    @model_validator(mode="after")
    def _has_the_fields_of_its_type(self) -> Self:
        needed, optional = (names.split() for names in _FIELDS[self.type])
        for name in needed:
            if name not in self.model_fields_set:
                raise bodies.field_error(name, "is missing")
        for name in sorted(self.model_fields_set - {"type", *needed, *optional}):
            raise bodies.field_error(name, f"is not a field of a {self.type}")
        return self

    def turn(self) -> TurnPart:
        """Returns what the item adds to the conversation."""
        match self.type:
            case "message":
                role = "system" if self.role == "developer" else self.role
                return TurnPart(role=role, content=lines(self.content))
            case "function_call":
                call = call_for_template(self.call_id, self.name, self.arguments)
                return TurnPart(role="assistant", tool_calls=[call])
            case "function_call_output":
                output = lines(self.output)
                return TurnPart(role="tool", content=output, tool_call_id=self.call_id)
        return TurnPart({"role": "assistant", _REASONING: lines(self.content)})


class TurnPart(dict[str, Any]):
    """Fields of a `ChatMessage`."""


ItemTurn = Annotated[TurnPart, converted(Item, Item.turn, TurnPart)]
"""An `Item`, as a part of the conversation."""


class ResponsesTool(bodies.FunctionTool, bodies.OfFunction):
    unserved: ClassVar[bodies.Unserved] = {
        **without_effect("output_schema", ANY_VALUE),
        **without_effect("defer_loading async", False),
        **without_effect("allowed_callers", ["direct"]),
    }

    strict: bool = True
    """Ignored. If the answer must call a tool, the call always matches the schema."""


class NamedResponsesTool(bodies.NamedFunction, bodies.OfFunction):
    pass


class TextOptions(Body):
    unserved = without_effect("verbosity", "medium")

    format: dict[str, Any] = Field(default={"type": "text"})
    """`type` is text, json_object or json_schema. With json_schema, `schema` must be given."""


class ReasoningOptions(Body):
    """How the model reasons. Outrider accepts only values that have no effect."""

    unserved: ClassVar[bodies.Unserved] = {
        **without_effect("effort", "none"),
        **without_effect("summary generate_summary context mode"),
    }


class ResponsesBody(bodies.ConversationBody):
    unserved: ClassVar[bodies.Unserved] = {
        **bodies.GenerationBody.unserved,
        **without_effect("store", ANY_VALUE),
        **without_effect("stream_options", {}, {"include_obfuscation": False}),
    }

    input: (
        Annotated[
            FailFastList[ItemTurn],
            # `instructions` becomes one more message.
            Field(min_length=1, max_length=CHAT_MESSAGES_MAX - 1),
        ]
        | str
    )
    instructions: str | None = None
    """A system message before `input`."""
    max_output_tokens: int | None = None
    text: TextOptions = TextOptions()
    include: FailFastList[Literal["message.output_text.logprobs"]] = Field(default=[])
    metadata: Annotated[dict[str, str], at_most(16)] = Field(default={}, max_length=16)
    """Repeated in the answer. Has no other effect."""
    reasoning: ReasoningOptions | None = None
    tools: Annotated[FailFastList[ResponsesTool], Field(max_length=TOOLS_MAX)] = Field(default=[])
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedResponsesTool,
        bodies.must_be('none, auto, required, or {"type": "function", "name": ...}'),
    ] = "auto"
    """Whether the answer may call a tool, must call any tool, or must call the named tool."""

    def translate(self, formats: ChatFormats) -> bodies.TranslatedBody:
        """Like `ChatBody.translate`."""
        return self._conversation(
            {"input": self._turns()},
            self.tools,
            self.tool_choice,
            "max_output_tokens",
            self.max_output_tokens,
            bool(self.include or self.top_logprobs),
            formats,
        )

    def _turns(self) -> tuple[ChatMessage, ...]:
        """Returns the messages of the conversation. If reasoning, text and calls of the assistant
        follow each other in this order, they become one message."""
        items, turns = self.input, list[Json]()
        if isinstance(items, str):
            items = [TurnPart(role="user", content=items)]
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        for item in items:
            turn = dict(item)
            last = turns[-1] if turns and turns[-1]["role"] == turn["role"] == "assistant" else None
            if turn.get(_REASONING) == "":
                continue
            if last is not None and "tool_calls" in turn:
                last.setdefault("tool_calls", []).extend(turn["tool_calls"])
            elif last is not None and "content" in turn and last.keys() == {"role", _REASONING}:
                last.update(turn)
            else:
                turns.append(turn)
        return tuple(
            ChatMessage(turn.pop("role"), turn.pop("content", ""), more=turn) for turn in turns
        )

    def _format(self) -> Constraint | None:
        given = {**self.text.format, "json_schema": self.text.format}
        return bodies.format_constraint(given, "text.format", "text.format.schema")


_KINDS = {
    "content": ("message", "msg", "output_text"),
    _REASONING: ("reasoning", "rs", "reasoning_text"),
    "name": ("function_call", "fc", "function_call_arguments"),
}
"""For each kind of `Part` that begins an item: the item's type, the prefix of the item's id, and
the type of the item's text."""


class _Item:
    """One item of an answer. `opened`, `grown` and `closed` yield the events to send when the item
    begins, gets new text, and ends."""

    def __init__(self, kind: str, session_id: str, index: int, call: Json) -> None:
        """`call` has the `call_id` and `name` of a call, and is empty for other items."""
        self.kind, self._index, self._call = kind, index, call
        self._type, prefix, self._grows = _KINDS[kind]
        self._id = f"{prefix}_{session_id}_{index}"
        self.status, self._text = "in_progress", ""
        self._logprobs: list[schemas.ChatToken] = []

    def body(self) -> Json:
        own: Json = {"id": self._id, "type": self._type, "status": self.status}
        if self.kind == "name":
            return own | self._call | {"arguments": self._text}
        own |= {"summary": list[Json]()} if self.kind == _REASONING else {"role": "assistant"}
        return own | {"content": [] if self.status == "in_progress" else [self._part()]}

    def opened(self) -> Iterator[Json]:
        yield _event("output_item.added", output_index=self._index, item=self.body())
        if self.kind != "name":
            yield self._event("content_part.added", part=self._part())

    def grown(self, text: str, logprobs: Sequence[schemas.ChatToken]) -> Iterator[Json]:
        self._text += text
        self._logprobs += logprobs
        if text or logprobs:
            yield self._event(f"{self._grows}.delta", delta=text, **self._scored(logprobs))

    def closed(self, status: str) -> Iterator[Json]:
        self.status, done, text = status, f"{self._grows}.done", self._text
        if self.kind == "name":
            yield self._event(done, name=self._call["name"], arguments=text)
        else:
            yield self._event(done, text=text, **self._scored(self._logprobs))
            yield self._event("content_part.done", part=self._part())
        yield _event("output_item.done", output_index=self._index, item=self.body())

    def _part(self) -> Json:
        own: Json = {"type": self._grows, "text": self._text, **self._scored(self._logprobs)}
        return own | {"annotations": []} if self.kind == "content" else own

    def _scored(self, logprobs: Sequence[schemas.ChatToken]) -> Json:
        return {"logprobs": [*logprobs]} if self.kind == "content" else {}

    def _event(self, name: str, /, **fields: Any) -> Json:
        place: Json = {"item_id": self._id, "output_index": self._index}
        if self.kind != "name":
            place["content_index"] = 0
        return _event(name, **place, **fields)


def _event(name: str, /, **fields: Any) -> Json:
    return {"type": f"response.{name}", **fields}


class ResponseAnswer(ChatAnswer):
    id_prefix = "resp_"
    is_named = True
    last: ClassVar[bytes] = b""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._items: list[_Item] = []

    def whole(self) -> Json:
        return self._response(self._status)

    def failed(self, error: schemas.ErrorBody) -> Json:
        for item in self._items[-1:]:
            item.status = "incomplete"
        detail = error["error"]
        code = detail["code"] if detail["code"] == "rate_limit_exceeded" else "server_error"
        response = self._response("failed", {**detail, "code": code})
        return _event("failed", response=response)

    def take(self, index: int, event: Event) -> Sequence[Json]:
        self._note(self._choices[index], event)
        events = () if isinstance(event, Started | RoundReport) else (*self._changes(event),)
        return events if self.is_stream else ()

    def _changes(self, event: Event) -> Iterator[Json]:
        """Adds the choice's new parts to the items, and yields the events for these changes. A
        message's part gets the log-probabilities of all tokens since the previous part."""
        [choice], has_ended = self._choices, isinstance(event, Finished)
        if not choice.is_opened:
            choice.is_opened, begun = True, self._response("in_progress")
            yield _event("created", response=begun)
            yield _event("in_progress", response=begun)
        if has_ended and all(item.kind == "content" for item in self._items[-1:]):
            # An answer without text has an empty message.
            choice.parts = choice.parts or [Part("content", "")]
        for kind, text in choice.parts:
            if kind == "name" or kind not in (
                "arguments",
                *(item.kind for item in self._items[-1:]),
            ):
                if self._items:
                    yield from self._items[-1].closed("completed")
                self._begin(kind, text)
                yield from self._items[-1].opened()
            logprobs = self.logprobs(choice.scored)["content"] if kind == "content" else []
            choice.scored = []
            if kind != "name":
                yield from self._items[-1].grown(text, logprobs)
        choice.parts, choice.token_ids = [], []
        if has_ended:
            yield from self._items[-1].closed(self._status)
            yield _event(self._status, response=self.whole())

    def _begin(self, kind: str, text: str) -> None:
        session_id, call = self._choices[0].session_id, Json()
        if kind == "name":
            num_calls = sum(item.kind == kind for item in self._items)
            call = {"call_id": call_id_of(session_id, num_calls), "name": text}
        self._items.append(_Item(kind, session_id, len(self._items), call))

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        [choice] = self._choices
        is_whole = choice.finished and choice.finished.finish_reason is FinishReason.STOP
        return "completed" if is_whole else "incomplete"

    def _response(self, status: schemas.ResponseStatus, error: Json | None = None) -> Json:
        sampling = self._translated.requests[0].sampling
        [choice] = self._choices
        response: schemas.ResponseObject = {
            "id": self._envelope["id"],
            "object": "response",
            "model": self._envelope["model"],
            "created_at": self._envelope["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "usage": None,
            "output": [item.body() for item in self._items],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if choice.finished:
            if status == "incomplete":  # `stop_reason` has the exact reason.
                response["incomplete_details"] = {"reason": "max_output_tokens"}
            usage = self._usage()
            response["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
            response["stop_reason"] = stop_reason(choice.finished)
            response["metrics"] = self._metrics()
        return {**response, **self._translated.body.model_dump(include=_REPEATED), **_ALWAYS}
