"""A client by gRPC and a client of a coordinator in this process give the same results."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.client import ChatMessage, Client, Completion, GenerateRequest, InProcessTransport
from outrider.errors import BadRequest, DeadlineExceeded, NotFound, Unavailable
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.stack import Stack, toy_stack

PROMPT = (1, 2, 3)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    # With look-ahead, proposals would depend on timing.
    async with toy_stack(tmp_path, look_ahead=0) as running:
        yield running


def in_process(stack: Stack) -> Client:
    return Client(InProcessTransport(stack.coordinator))


def without_times(completion: Completion) -> Completion:
    metrics = replace(completion.metrics, time_to_first_token_ms=0.0, tokens_per_second=0.0)
    return replace(completion, session_id="", metrics=metrics)


ANSWERED: list[dict[str, Any]] = [
    {"sampling": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01)},
    {"rule": Rule.BLOCK, "logprobs": 2},
    {"prompt": "the quick brown", "stop": ("e",)},
    {"prompt": (ChatMessage("user", "hello"),), "num_draft_tokens": 0},
]


async def test_both_transports_give_the_same_answer(stack: Stack) -> None:
    for fields in ANSWERED:
        request = GenerateRequest(**({"prompt": PROMPT, "max_tokens": 12, "seed": 7} | fields))
        by_grpc = await stack.client.complete(request)
        here = await in_process(stack).complete(request)
        assert here.session_id != by_grpc.session_id
        assert without_times(here) == without_times(by_grpc)


async def test_an_ended_session_can_be_read(stack: Stack) -> None:
    client = in_process(stack)
    answer = await client.complete(GenerateRequest(PROMPT, max_tokens=5))
    view = await client.get_session(answer.session_id)
    assert view == await stack.client.get_session(answer.session_id)
    assert view.token_ids == (*PROMPT, *answer.token_ids)
    assert (view.state, view.finish_reason) == ("finished", FinishReason.LENGTH)
    assert await client.describe() == await stack.client.describe()
    assert await client.healthy()
    for missing, error in (("0" * 31 + "1", NotFound), ("no id", BadRequest)):
        for way in (client, stack.client):
            with pytest.raises(error):
                await way.get_session(missing)
    with pytest.raises(NotFound):
        await Client(InProcessTransport(stack.coordinator, "other")).get_session(answer.session_id)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await holds():
            await asyncio.sleep(0.005)


async def test_closing_a_client_ends_its_sessions_alone(slow: Stack) -> None:
    closed, other = in_process(slow), in_process(slow)
    long = GenerateRequest(PROMPT, max_tokens=2000)
    idle, kept = closed.generate(long), other.generate(long)
    started, kept_started = await anext(idle), await anext(kept)
    reading = asyncio.create_task(closed.complete(long))

    async def number_is(number: int) -> bool:
        return (await other.describe()).num_running == number

    async def is_cancelled(session_id: str) -> bool:
        found = (await other.get_session(session_id)).finish_reason
        return found is FinishReason.CANCELLED

    await until(lambda: number_is(3))
    await closed.close()
    for call in (reading, anext(idle), closed.complete(long)):
        with pytest.raises(Unavailable, match="closed"):
            await call
    await until(lambda: is_cancelled(started.session_id))
    assert (await anext(kept)).token_ids
    assert await number_is(1)
    await kept.aclose()
    await until(lambda: is_cancelled(kept_started.session_id))
    await until(lambda: number_is(0))


class StuckCoordinator:
    @property
    def streams(self) -> "StuckCoordinator":
        return self

    async def generate(self, request: GenerateRequest, tenant: str = "") -> Any:
        await asyncio.Event().wait()
        yield None

    async def session(self, session_id: str, tenant: str = "") -> Any:
        await asyncio.Event().wait()


async def test_a_stuck_coordinator_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(InProcessTransport(StuckCoordinator()))
    with monkeypatch.context() as patch:
        patch.setattr("outrider.client.transport.GENERATE_SLACK_S", 0.01)
        with pytest.raises(DeadlineExceeded):
            await client.complete(GenerateRequest(PROMPT, deadline_ms=10))
    with pytest.raises(DeadlineExceeded):
        await client.get_session("ab" * 16, 0.01)
    calls = client.complete(GenerateRequest(PROMPT)), client.get_session("ab" * 16)
    running = [asyncio.create_task(call) for call in calls]
    await asyncio.wait(running, timeout=0.01)
    await client.close()
    for call in running:
        with pytest.raises(Unavailable, match="closed"):
            await call
