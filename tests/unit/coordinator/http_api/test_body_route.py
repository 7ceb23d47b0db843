"""Long bodies are validated in steps, between which the event loop does other work."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest

from coordinator.auth.access_control import AccessControl, watch_keys
from coordinator.http_api.body_route import Turns, _validate_items
from outrider import limits
from outrider.errors import BadRequest
from outrider.foundation.api_keys import given_keys
from outrider.interfaces.request import ChatMessage
from tests.support.http_front import Front
from tests.support.told_coordinator import FINISHED, STARTED, TOKENS, ToldCoordinator

CHAT = "/v1/chat/completions"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}


def message(index: int) -> dict[str, Any]:
    if index % 2:
        return {"role": "assistant", "content": [{"type": "text", "text": "a"}] * 2}
    return {"role": "assistant", "content": f"{index}", "tool_calls": [CALL]}


def long_body(num_messages: int, **other: Any) -> dict[str, Any]:
    """A body that is not short, whatever the number of its messages."""
    messages = [message(index) for index in range(num_messages)]
    return {"messages": messages, "user": "x" * limits.HTTP_BODY_INLINE_BYTES, **other}


@pytest.mark.parametrize("num_messages", [1, 64, 65, 500])
async def test_a_long_conversation_becomes_the_same_request_as_a_short_one(
    num_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, body = Front(ToldCoordinator(STARTED, TOKENS, FINISHED)), long_body(num_messages)
    assert (await front.send("POST", CHAT, json=body)).status_code == 200
    monkeypatch.setattr(limits, "HTTP_BODY_INLINE_BYTES", limits.HTTP_BODY_BYTES_MAX)
    assert (await front.send("POST", CHAT, json=body)).status_code == 200
    (stepwise, *_), (whole, *_) = front.service.calls
    assert stepwise == whole
    assert len(whole.prompt) == num_messages
    assert whole.prompt[0] == ChatMessage(
        "assistant",
        "0",
        {
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
            ]
        },
    )


@pytest.mark.parametrize(
    ("place", "field", "value", "param"),
    [
        (70, "content", 1, "messages[70].content"),
        (3, "odd", 1, "messages[3].odd"),
        (
            99,
            "tool_calls",
            [CALL | {"function": {"name": "f", "arguments": "["}}],
            "messages[99].tool_calls[0].function.arguments",
        ),
    ],
)
@pytest.mark.parametrize("num_messages", [100, 10])
async def test_the_wrong_item_of_a_long_list_is_named(
    num_messages: int, place: int, field: str, value: Any, param: str
) -> None:
    body = long_body(num_messages)
    index = min(place, num_messages - 1)
    body["messages"][index] |= {field: value}
    found = await Front(ToldCoordinator()).send("POST", CHAT, json=body)
    expected = param.replace(f"[{place}]", f"[{index}]")
    assert (found.status_code, found.json()["error"]["param"]) == (400, expected)


@pytest.mark.parametrize("size", [1, limits.HTTP_BODY_INLINE_BYTES])
@pytest.mark.parametrize("path", ["/v1/responses", CHAT])
async def test_arguments_are_bounded_together(path: str, size: int) -> None:
    """As texts, they do not count for the limits of the body."""
    arguments = json.dumps({"a": [[]] * (limits.HTTP_CONTAINERS_MAX // 2)})
    calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}] * 2
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    field = "input" if path == "/v1/responses" else "messages"
    items: list[Any] = [item] * 2
    if field == "messages":
        items = [{"role": "assistant", "tool_calls": calls}]
    body = {field: items, "user": "x" * size}
    error = (await Front(ToldCoordinator()).send("POST", path, json=body)).json()["error"]
    assert error["param"] == field
    assert "the arguments of the calls have more than 16384 lists" in error["message"]


async def test_tenants_take_turns() -> None:
    """Ten bodies of one tenant do not delay a body of another. Each step is in another turn of the
    event loop."""
    turns, order = Turns(), list[str]()
    num_turns, turns_of_steps = 0, list[int]()

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def validate(tenant: str) -> None:
        async with turns.begin(tenant) as step:
            for _ in range(3):
                async with step():
                    turns_of_steps.append(num_turns)
        order.append(tenant)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(validate("mallory") for _ in range(10)), validate("alice"))
    counting.cancel()
    assert order.index("alice") <= 1
    assert len({*turns_of_steps}) == len(turns_of_steps) == 33


@pytest.mark.parametrize("refuses", [False, True])
async def test_other_requests_have_time_between_the_steps(refuses: bool) -> None:
    """Many turns of the event loop follow each step, in which no tenant has a step. This also holds
    for the step that refuses a body."""
    turns, times = Turns(), list[float]()

    async def validate(tenant: str) -> None:
        async with turns.begin(tenant) as step:
            for _ in range(2):
                with suppress(BadRequest):
                    async with step():
                        times.append(time.monotonic())
                        began = time.thread_time()
                        while time.thread_time() < began + 0.02:
                            pass
                        if refuses:
                            raise BadRequest("messages", "is wrong")

    await asyncio.gather(validate("a"), validate("b"))
    assert min(later - earlier for earlier, later in pairwise(times)) >= 0.0245


async def test_few_large_items_are_validated_one_by_one() -> None:
    parts = [{"type": "text", "text": "a"}] * 4000
    value = {"messages": [{"role": "user", "content": parts} for _ in range(4)]}
    num_steps = 0

    @asynccontextmanager
    async def step() -> AsyncIterator[None]:
        nonlocal num_steps
        num_steps += 1
        yield

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "HTTP_BODY_STEP_MS", 0.01)
        await _validate_items(value, step)
    assert num_steps == 4
    assert all(isinstance(one, ChatMessage) for one in value["messages"])


async def test_a_body_that_is_given_up_lets_others_pass() -> None:
    """Whether it waits for its tenant's turn or for its next step."""
    turns = Turns()
    async with turns.begin("a") as step:
        async with step():
            waiting = [asyncio.create_task(turns.begin("a").__aenter__())]
            async with turns.begin("b") as other:
                waiting.append(asyncio.create_task(other().__aenter__()))
                await asyncio.sleep(0)
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(1), step():
            pass
    async with asyncio.timeout(1), turns.begin("a") as step, step():
        pass


async def test_short_bodies_do_not_wait_for_long_ones() -> None:
    """Nor do those of a tenant whose body is being validated."""
    key = "0123456789abcdef0123"
    access = AccessControl(watch_keys(None, given_keys(key)))
    front = Front(ToldCoordinator(STARTED, TOKENS, FINISHED), access, key)
    turns = front.app.state.admission.turns
    tenant = access.identify([f"Bearer {key}"]).tenant
    async with turns.begin(tenant) as step, step():
        async with asyncio.timeout(5):
            assert (await front.post()).status_code == 200
        long = asyncio.create_task(front.send("POST", CHAT, json=long_body(1)))
        await asyncio.sleep(0.05)
        assert not long.done()
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
