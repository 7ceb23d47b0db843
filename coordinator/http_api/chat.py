"""Chat completions: conversations in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from outrider.errors import BadRequest
from outrider.limits import CHAT_MESSAGES_MAX
from outrider.request import ChatMessage

from .bodies import ChatBody, Message
from .logprobs import ScoredToken, Spelled, finite
from .translation import Asked, Wishes, translate

_SYSTEM: Final = "system"
_ASSISTANT: Final = "assistant"
_NAMES_OF_SYSTEM: Final = ("system", "developer")
_TOOLS: Final = ("tool", "function")


def translate_chat(body: ChatBody, draw_seed: Callable[[], int]) -> Asked:
    """See `translate`. Text parts of a message become lines of one text."""
    max_tokens, name = _max_tokens(body)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs", "needs logprobs to be true")
    wishes = Wishes(
        prompts=[_messages(body.messages)],
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        names={
            "chat": "messages",
            "chat.messages": "messages",
            "max_tokens": name,
            "logprobs": "top_logprobs",
        },
    )
    return translate(body, wishes, draw_seed)


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The bound, and the field that says it: OpenAI has two names for it."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest("max_completion_tokens", f"{new} is not the {old} of max_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _messages(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    if not 1 <= len(messages) <= CHAT_MESSAGES_MAX:
        raise BadRequest(
            "messages", f"got {len(messages)} messages; allowed: 1..{CHAT_MESSAGES_MAX}"
        )
    return tuple(_turn(index, message) for index, message in enumerate(messages))


def _turn(index: int, message: Message) -> ChatMessage:
    if message.role in _TOOLS:
        raise BadRequest(f"messages[{index}].role", f"{message.role!r} is not served")
    role = _SYSTEM if message.role in _NAMES_OF_SYSTEM else message.role
    content = message.content
    if content is None and role != _ASSISTANT:
        raise BadRequest(
            f"messages[{index}].content", f"is missing; only the {_ASSISTANT}'s may be left out"
        )
    if content is None or isinstance(content, str):
        return ChatMessage(role, content or "")
    return ChatMessage(role, "\n".join(part.text for part in content))


class ChatShape:
    """What the choices of a chat completion look like. Implements `Shape`."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        """See `Shape.opening`."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> dict[str, Any]:
        """See `Shape.delta`."""
        return {"delta": {"content": text}}

    def closing(self) -> dict[str, Any]:
        """See `Shape.closing`."""
        return {"delta": {}}

    def message(self, text: str) -> dict[str, Any]:
        """See `Shape.message`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """See `Shape.logprobs`."""
        content = [
            _scored(token.spelled, token.logprob)
            | {"top_logprobs": [_scored(*one) for one in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _scored(spelled: Spelled, logprob: float) -> dict[str, Any]:
    return {"token": spelled.text, "bytes": list(spelled.data), "logprob": finite(logprob)}
