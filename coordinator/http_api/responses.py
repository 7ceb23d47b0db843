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
    _ANY,
    Body,
    ChatBody,
    Described,
    GenerationBody,
    Message,
    Several,
    TranslatedBody,
    Unserved,
    _idle,
    few_parts,
)
from outrider.errors import BadRequest
from outrider.limits import CHAT_MESSAGES_MAX
from outrider.request import Event, Finished
from outrider.sessions.store import FinishReason

if TYPE_CHECKING:
    from outrider.tokenizer import TokenizerText

_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
"""What the fields of a chat completion, or how they begin, are called here."""


class ItemText(Body):
    """A part of a message, whether it was given or answered."""

    unserved = _idle("annotations logprobs", _ANY)

    type: Literal["input_text", "output_text"]
    text: str


class MessageItem(Body):
    """A turn of the conversation."""

    unserved = _idle("id status phase", _ANY)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Several[ItemText]

    def message(self) -> Message:
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return Message.model_construct(role=role, content=content)


class ReasoningItem(Body):
    """What came before a former answer; not told to the model again."""

    unserved = _idle("id status summary content encrypted_content", _ANY)

    type: Literal["reasoning"]


def _kind(value: Any) -> str | None:
    """The tag of an item; those without a type are messages."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    return f"a {'message' if kind is None else kind}" if isinstance(kind, str | None) else None


# Tags that are no identifiers name no part of a field in an error.
Item = Annotated[
    Annotated[MessageItem, Tag("a message")] | Annotated[ReasoningItem, Tag("a reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="must be an item of the type message or reasoning",
    ),
]


def _few_items(given: Any) -> Any:
    if not isinstance(given, str | list):
        raise ValueError("must be a string or a list of items")
    return few_parts(given)


class TextOptions(Body):
    """How the answer's text is to look."""

    unserved = _idle("verbosity", "medium")

    format: Described = Field(default={"type": "text"})
    """text, json_object, or json_schema with its schema."""


class ReasoningOptions(Body):
    """How the model is to reason, of which nothing can be chosen."""

    unserved: ClassVar[Unserved] = {
        **_idle("effort", "none"),
        **_idle("summary generate_summary context mode"),
    }


class ResponsesBody(GenerationBody):
    """Of a response."""

    unserved: ClassVar[Unserved] = {
        **GenerationBody.unserved,
        **_idle("store safety_identifier prompt_cache_key prompt_cache_retention", _ANY),
        **_idle("parallel_tool_calls", _ANY),
        **_idle("tools context_management", []),
        **_idle("tool_choice", "none", "auto"),
        **_idle("background", False),
        **_idle("truncation", "disabled"),
        **_idle("stream_options", {}, {"include_obfuscation": False}),
        **_idle("previous_response_id conversation prompt max_tool_calls moderation"),
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

    def translate(self) -> TranslatedBody:
        """As the chat completion that it stands for, with the names that fields have here."""
        given = self.model_fields_set & GenerationBody.model_fields.keys()
        chat = ChatBody.model_construct(
            **{name: getattr(self, name) for name in given},
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            response_format=self._response_format(),
            logprobs=bool(self.include or self.top_logprobs),
            top_logprobs=self.top_logprobs,
        )
        try:
            asked = chat.translate()
        except BadRequest as error:
            raise BadRequest(_own_name(error.field), error.reason) from error
        names = {"max_tokens": "max_tokens", **asked.names}
        return replace(asked, names={name: _own_name(field) for name, field in names.items()})

    def _messages(self) -> list[Message]:
        items = self.input
        if isinstance(items, str):
            items = [MessageItem(role="user", content=items)]
        if self.instructions is not None:
            items = [MessageItem(role="system", content=self.instructions), *items]
        return [one.message() for one in items if isinstance(one, MessageItem)]

    def _response_format(self) -> Json:
        form = self.text.format
        if form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _own_name(field: str) -> str:
    for theirs, own in _NAMES.items():
        if field.startswith(theirs):
            return own + field.removeprefix(theirs)
    return field


class _Item:
    """One of the items that an answer has, as far as it has come."""

    def __init__(self, item_id: str, index: int) -> None:
        self.place: Json = {"item_id": item_id, "output_index": index, "content_index": 0}
        self.status = "in_progress"
        self.text = ""
        self.logprobs: list[Json] = []

    def part(self) -> Json:
        """Its content."""
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": [*self.logprobs],
        }

    def told(self, *content: Json) -> Json:
        return {
            "id": self.place["item_id"],
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": content,
        }


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
        self._closed(self._status)
        return self._response(self._status)

    def failed(self, error: Json) -> Sequence[Json]:
        """A response that has failed, with the items that came before."""
        self._items[-1].status = "incomplete"
        detail = error["error"]
        code = detail["code"] if detail["code"] == "rate_limit_exceeded" else "server_error"
        return [self._event("failed", response=self._response("failed", {**detail, "code": code}))]

    def _parts(self, index: int, event: Event) -> Sequence[Json]:
        events = list[Json]()
        if not self._items:
            for name in ("created", "in_progress"):
                events.append(self._event(name, response=self._response("in_progress")))
        events += self._grown()
        if isinstance(event, Finished):
            events += self._closed(self._status)
            events.append(self._event(self._status, response=self._response(self._status)))
        return events

    def _grown(self) -> list[Json]:
        """Adds what has come to the items, and tells of it."""
        [choice], events = self._choices, list[Json]()
        if not self._items:
            [item] = self._items = [_Item(f"msg_{self._session_id}", 0)]
            events = [
                self._event("output_item.added", output_index=0, item=item.told()),
                self._event("content_part.added", **item.place, part=item.part()),
            ]
        item = self._items[-1]
        text, logprobs = choice.text, self.logprobs(choice.scored)["content"]
        choice.forget()
        item.text += text
        item.logprobs += logprobs
        if text or logprobs:
            told = {**item.place, "delta": text, "logprobs": logprobs}
            events.append(self._event("output_text.delta", **told))
        return events

    def _closed(self, status: str) -> list[Json]:
        """Ends the last item."""
        item = self._items[-1]
        item.status, part = status, item.part()
        done = {**item.place, "text": item.text, "logprobs": part["logprobs"]}
        output_index = item.place["output_index"]
        return [
            self._event("output_text.done", **done),
            self._event("content_part.done", **item.place, part=part),
            self._event("output_item.done", output_index=output_index, item=item.told(part)),
        ]

    @property
    def _session_id(self) -> str:
        return str(self._envelope["id"]).removeprefix(self.id_prefix)

    @property
    def _status(self) -> str:
        """Of a response whose events have all come."""
        [choice] = self._choices
        is_whole = choice.finished and choice.finished.finish_reason is FinishReason.STOP
        return "completed" if is_whole else "incomplete"

    def _event(self, name: str, **told: Any) -> Json:
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{name}", "sequence_number": number, **told}

    def _response(self, status: str, error: Json | None = None) -> Json:
        body, sampling = self._body, self._asked.requests[0].sampling
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
            "output": [item.told(item.part()) for item in self._items],
            "usage": None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": body.text.format},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs,
            "top_p": sampling.top_p,
            "truncation": "disabled",
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
