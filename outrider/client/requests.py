"""What is checked before a request is sent, and how long its call may last."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from outrider.errors import BadRequest
from outrider.limits import API_KEY_CHARS_MAX, DEADLINE_MS_DEFAULT, DEADLINE_MS_MAX, SEED_MAX
from outrider.request import ChatMessage, GenerateRequest

CALL_TIMEOUT_S: Final = 10.0
"""Of a call that does no generation."""
GENERATE_SLACK_S: Final = 10.0
"""What the call of a generation may last longer than the generation's own deadline."""
RESUMED_TIMEOUT_S: Final = DEADLINE_MS_MAX / 1000 + GENERATE_SLACK_S
"""Of the call that goes on with one, whose deadline only the coordinator knows."""
_VISIBLE: Final = re.compile("[!-~]+")
_INT32: Final = (-(2**31), 2**31 - 1)


def generate_timeout_s(request: GenerateRequest) -> float:
    """Seconds that the call of a generation may last: the coordinator ends it before."""
    return (request.deadline_ms or DEADLINE_MS_DEFAULT) / 1000 + GENERATE_SLACK_S


def addresses_of(server: object) -> list[str]:
    """Each HOST:PORT of those with commas between them. Raises `BadRequest` where one is empty, or
    it is no text."""
    each = [one.strip() for one in server.split(",")] if isinstance(server, str) else [""]
    if not all(each):
        raise BadRequest(
            "server", f"{server!r} is wrong; it must be HOST:PORT, or several with commas between"
        )
    return each


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """What each call shows of a key; nothing where there is none. Raises `BadRequest`, which does
    not repeat it."""
    if not api_key:
        return ()
    if not _VISIBLE.fullmatch(api_key) or len(api_key) > API_KEY_CHARS_MAX:
        raise BadRequest(
            "api_key", f"is wrong; it must be up to {API_KEY_CHARS_MAX} visible ASCII characters"
        )
    return (("authorization", f"Bearer {api_key}"),)


def check_timeout(timeout_s: float) -> float:
    """The timeout itself. Raises `BadRequest` unless it is a positive number of seconds."""
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise BadRequest("timeout_s", f"{timeout_s} is wrong; it must be a number above 0")
    return timeout_s


def check_sendable(request: GenerateRequest) -> None:
    """Raises `BadRequest` for what no message holds, and so cannot even be sent to be refused. All
    other limits are the coordinator's to check."""
    _check_prompt(request)
    for name, text in _texts(request):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(name, f"is not Unicode text: {error.reason}") from None
    for name, value, lowest, highest in _integers(request):
        if not lowest <= value <= highest:
            raise BadRequest(name, f"{value} is wrong; it must be from {lowest} to {highest}")


def _check_prompt(request: GenerateRequest) -> None:
    if not isinstance(request.prompt, str) and len({type(part) for part in request.prompt}) > 1:
        raise BadRequest("prompt", "mixes kinds; give text, chat messages or token ids")


def _texts(request: GenerateRequest) -> Iterator[tuple[str, str]]:
    yield "model", request.model
    if isinstance(request.prompt, str):
        yield "text", request.prompt
    else:
        for index, turn in enumerate(request.prompt):
            if isinstance(turn, ChatMessage):
                yield f"chat.messages[{index}].role", turn.role
                yield f"chat.messages[{index}].content", turn.content
    for index, text in enumerate(request.stop):
        yield f"stop[{index}]", text


def _integers(request: GenerateRequest) -> Iterator[tuple[str, int, int, int]]:
    for name in (
        "max_tokens", "num_draft_tokens", "deadline_ms", "logprobs", "draft_deadline_ms"
    ):  # fmt: skip
        value: int | None = getattr(request, name)
        if value is not None:
            yield name, value, *_INT32
    if request.seed is not None:
        yield "seed", request.seed, 0, SEED_MAX
    yield "sampling.top_k", request.sampling.top_k, *_INT32
    for token_id, _ in request.sampling.logit_bias:
        yield "sampling.logit_bias", token_id, *_INT32
    if not isinstance(request.prompt, str):
        for index, part in enumerate(request.prompt):
            if isinstance(part, int):
                yield f"token_ids.ids[{index}]", part, *_INT32
