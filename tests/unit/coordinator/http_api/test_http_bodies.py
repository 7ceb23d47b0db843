"""Bodies that would take long to look at: the event loop goes on meanwhile, and renews leases."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from told_coordinator import ToldCoordinator

from coordinator.http_api.app import build_app
from coordinator.http_api.reading import read_body
from outrider.errors import BadRequest
from outrider.limits import (
    CHAT_MESSAGES_MAX,
    CHAT_PARTS_MAX,
    HTTP_BODY_BYTES_MAX,
    HTTP_CONTAINERS_MAX,
    HTTP_FIELDS_MAX,
    HTTP_VALUES_MAX,
    LOGIT_BIAS_ENTRIES_MAX,
)

GAP_S = 0.25
"""CPU that may pass between two turns of the loop; a lease wants to be renewed every 0.5 s."""
CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/api/generate"
CONVERSATION = '"messages":[{"role":"user","content":"a"}]'


def filled(before: str, item: Callable[[int], str], after: str) -> bytes:
    """As many items as a body has room for."""
    room = HTTP_BODY_BYTES_MAX - len(before) - len(after)
    number = room // (len(item(10**6)) + 1)
    return (before + ",".join(item(index) for index in range(number)) + after).encode()


BODIES: dict[str, tuple[str, Callable[[], bytes], str | None]] = {
    "messages": (NATIVE, lambda: filled('{"messages":[', lambda _: '{"role":"a"}', "]}"), None),
    "biases": (
        CHAT,
        lambda: filled("{" + CONVERSATION + ',"logit_bias":{', lambda n: f'"{n:020d}":1', "}}"),
        "logit_bias",
    ),
    "a schema": (
        CHAT,
        lambda: filled(
            "{" + CONVERSATION + ',"response_format":{"enum":[',
            lambda _: "[" + " " * 80 + "]",
            "]}}",
        ),
        "response_format",
    ),
    "parts": (
        CHAT,
        lambda: filled(
            '{"messages":[{"role":"user","content":[',
            lambda _: '{"type":"text","text":"' + "a" * 60 + '"}',
            "]}]}",
        ),
        "messages",
    ),
    "half characters": (
        COMPLETIONS, lambda: filled('{"prompt":["', lambda _: "\\u00e9" * 50, '\\ud800"]}'), None
    ),
    "prompts": (COMPLETIONS, lambda: filled('{"prompt":[', lambda _: '"aaaaaa"', "]}"), "prompt"),
    "tokens": (COMPLETIONS, lambda: filled('{"prompt":[', lambda _: "1234567", "]}"), "model"),
    "fewer brackets": (COMPLETIONS, lambda: b"[" * HTTP_VALUES_MAX, None),
    "text with marks": (
        COMPLETIONS, lambda: filled('{"prompt":"', lambda _: '[{\\"a\\":1}]', '"}'), "model"
    ),
}  # fmt: skip


async def called(app: Any, path: str, body: bytes) -> tuple[int, dict[str, Any], float]:
    """Status and error that a call is answered with, and the most CPU between two turns of the
    loop, in seconds."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "client": ("127.0.0.1", 1), "server": ("here", 80),
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    pieces = [body[start : start + 65_536] for start in range(0, len(body) or 1, 65_536)]
    sent: list[Any] = []
    gaps: list[float] = []

    async def receive() -> Any:
        await asyncio.sleep(0)
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def tick() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            gaps.append(now - last)
            last = now

    gc.collect()
    gc.freeze()  # What other tests have left is not looked through again meanwhile.
    try:
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        await app(scope, receive, send)
        await asyncio.sleep(0)
        ticking.cancel()
    finally:
        gc.unfreeze()
    told = json.loads(b"".join(message.get("body", b"") for message in sent))
    return sent[0]["status"], told["error"], max(gaps)


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_up_the_loop(name: str) -> None:
    """Neither one that is refused nor one that a coordinator might take; it is refused by the name
    of its field, or as a whole."""
    path, make, param = BODIES[name]
    body = make()
    assert len(body) <= HTTP_BODY_BYTES_MAX
    service = ToldCoordinator(BadRequest("model", "is none"))
    app = build_app(service, asyncio.Event(), None)  # type: ignore[arg-type]
    status, error, gap_s = await called(app, path, body)
    assert (status, error["param"]) == (400, param)
    assert gap_s < GAP_S


TURN = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({f"f{n}": 1 for n in range(HTTP_FIELDS_MAX)}, None, "the body has 129 fields"),
        ({"messages": [TURN] * (CHAT_MESSAGES_MAX + 1)}, "messages", "at most 4096 items"),
        ({"messages": [{"content": [{}] * (CHAT_PARTS_MAX + 1)}]}, "messages", "8192 parts"),
        (
            {"logit_bias": {str(n): 1 for n in range(LOGIT_BIAS_ENTRIES_MAX + 1)}},
            "logit_bias",
            "should have at most 1024 items",
        ),
        ({"stop": ["a"] * 17}, "stop", "must be a string or a list of at most 16 strings"),
        ({"structured_outputs": {"json": [[1] * 1000] * 33}}, "structured_outputs", "more values"),
        ({"n": 17}, "n", "should be less than or equal to 16; got 17"),
        ({"tools": [{}]}, "tools", "is not served; leave it out, or give []"),
        ({"prompt": "a"}, "prompt", "is given beside messages; allowed: one of the two"),
        ({"n": 2}, "n", "asks for 2 answers; allowed: 1"),
        ({"stream": False}, "stream", "must be true, or be left out"),
        ({"speculation": {"rule": "odd"}}, "speculation.rule", "coupled"),
        ({"wild": 1}, "wild", "there is no such field"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_what_is_allowed_is_told(
    fields: dict[str, Any], param: str | None, words: str
) -> None:
    app = build_app(ToldCoordinator(), asyncio.Event(), None)  # type: ignore[arg-type]
    body = json.dumps({"messages": [TURN], **fields}).encode()
    status, error, _ = await called(app, NATIVE, body)
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "is not JSON: EOF while parsing an object at line 1 column 1"),
        (b'"\xff"', "unicode"),
        (b"[" * 60_000, "recursion limit"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "number out of range"),
        (b"", "must be a JSON object, with Content-Type: application/json"),
        (b"[1]", "must be a JSON object, with Content-Type: application/json"),
    ],
    ids=["no end", "bytes", "depth", "digits", "empty", "list"],
)
async def test_what_is_no_json_object_is_said_to_be_none(body: bytes, words: str) -> None:
    app = build_app(ToldCoordinator(), asyncio.Event(), None)  # type: ignore[arg-type]
    status, error, _ = await called(app, COMPLETIONS, body)
    assert (status, error["param"]) == (400, None)
    assert error["message"].startswith("the body ")
    assert words in error["message"]


@pytest.mark.parametrize(
    "text",
    ["[" * 600_000, '","' * 200_000, "\\" * 300_000 + ",:[{" * 150_000],
    ids=["brackets", "quotes", "backslashes"],
)
def test_marks_inside_of_texts_are_no_values(text: str) -> None:
    body = {"prompt": text, "stop": ['\\"', '"', "\\"]}
    assert read_body(json.dumps(body).encode()) == body
    for value, words in (
        ([1] * (HTTP_VALUES_MAX + 1), "values"), ([[]] * (HTTP_CONTAINERS_MAX + 1), "lists"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=f"more than .* {words}"):
            read_body(json.dumps({"prompt": text, "x": value}).encode())


def test_a_mark_at_the_front_of_the_file_is_no_part_of_it() -> None:
    assert read_body(b"\xef\xbb\xbf{}") == {}
