"""How requests by HTTP end that do not end by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_front import http_front
from openai import AsyncOpenAI
from stack import Stack, running_stack

from coordinator.http_api.server import HttpOptions, HttpServer
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.sessions.store import FinishReason

LONG: Any = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 4000, "seed": 1}
WAIT_S = 20.0
GRACE_S = 6.0
"""In which forty tokens come on a busy machine, too, and four thousand on no machine."""


@pytest.fixture
def engines() -> tuple[EmulatedEngine, EmulatedEngine]:
    """A target that takes 20 ms a step, and a draft."""
    spec = EmulatedSpec(vocab_size=16, support=8, verify_ms=20.0, draft_ms=1.0)
    return EmulatedEngine(spec, "target"), EmulatedEngine(spec, "draft")


@pytest.fixture
async def slow(
    engines: tuple[EmulatedEngine, EmulatedEngine], tmp_path: Path
) -> AsyncIterator[Stack]:
    """Three sessions at most, and clients that may come back: those by gRPC, for longer than a
    test lasts."""
    async with running_stack(
        *engines, tmp_path, target_gone_ms=1_000, max_sessions=3, resume_grace_ms=60_000
    ) as running:
        yield running


@contextlib.asynccontextmanager
async def calling(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.01)


async def ended_as(stack: Stack, session_id: str) -> FinishReason:
    async with asyncio.timeout(WAIT_S):
        while (found := await stack.coordinator.session(session_id)).finish_reason is None:
            await asyncio.sleep(0.01)
    assert found.finish_reason is not None
    return found.finish_reason


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_takes_its_sessions_with_it(
    slow: Stack, engines: tuple[EmulatedEngine, EmulatedEngine], stream: bool
) -> None:
    """At once, for nobody can resume them: they are recorded as cancelled, and neither replica
    holds anything of them."""
    async with http_front(slow) as url, httpx.AsyncClient(base_url=url) as http:
        body = {**LONG, "n": 2, "stream": stream}
        request = http.build_request("POST", "/v1/completions", json=body)
        calling = asyncio.create_task(http.send(request, stream=True))
        await until(lambda: slow.coordinator.num_running == 2)
        if stream:
            response = await calling
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
        ids = slow.coordinator._sessions.session_ids
        await until(lambda: all(engine.length(one) for engine in engines for one in ids))
        if stream:
            await response.aclose()
        else:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        await until(lambda: slow.coordinator.num_running == 0)
        for session_id in ids:
            assert await ended_as(slow, session_id) is FinishReason.CANCELLED
        await until(lambda: not any(engine.length(one) for engine in engines for one in ids))
        slow.coordinator.check_integrity()


async def test_more_than_may_run_is_refused_and_harms_nobody(slow: Stack) -> None:
    """`RateLimitError` with the time to try again; of a request for several texts none runs."""
    async with http_front(slow) as url, calling(url) as client:
        short: Any = {**LONG, "max_tokens": 30}
        running = [asyncio.create_task(client.completions.create(**short)) for _ in range(2)]
        await until(lambda: slow.coordinator.num_running == 2)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**LONG, n=2, stream=stream)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.code == "rate_limit_exceeded"
        answers = await asyncio.gather(*running)
        usages = [answer.usage for answer in answers]
        assert [usage and usage.completion_tokens for usage in usages] == [30, 30]


async def test_deadlines(slow: Stack) -> None:
    """Before the first token an error, also of a stream; after it the end of the answer."""
    async with http_front(slow) as url, calling(url) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="deadline_ms") as caught:
                await client.completions.create(
                    **LONG, stream=stream, extra_body={"deadline_ms": 5}
                )
            assert caught.value.status_code == 504
        answer: Any = await client.completions.create(**LONG, extra_body={"deadline_ms": 400})
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.stop_reason) == ("length", "deadline")
        assert answer.usage.completion_tokens > 0


async def test_a_target_that_dies(slow: Stack) -> None:
    """A stream that has begun ends with an error for an event and without the last one; what
    comes then is refused as unavailable, and so says the health."""
    async with http_front(slow) as url, httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        body = {**LONG, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in _stopping(slow, response) if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert response.status_code == 200
        health = await http.get("/health")
        assert health.status_code == 503
        assert "target" in health.json()["error"]["message"]
        refused = await http.post("/v1/completions", json={**LONG, "stream": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1


async def _stopping(stack: Stack, response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream whose target is stopped once it has begun."""
    begun = False
    async for line in response.aiter_lines():
        yield line
        if not begun:
            begun = True
            await stack.target_server.stop()


async def test_a_server_that_ends_lets_requests_end(slow: Stack) -> None:
    """As long as it was told to wait; then they are told why, and nothing of them is left."""
    server = HttpServer(slow.coordinator, HttpOptions())
    await server.start()
    async with calling(f"http://{server.address}") as client:
        whole = asyncio.create_task(client.completions.create(**LONG))
        texts = aiter(await client.completions.create(**LONG, stream=True))
        await until(lambda: slow.coordinator.num_running == 2)
        short = asyncio.create_task(client.completions.create(**{**LONG, "max_tokens": 40}))
        await until(lambda: slow.coordinator.num_running == 3)
        stopping = asyncio.create_task(server.stop(GRACE_S))
        usage = (await short).usage
        assert usage is not None
        assert usage.completion_tokens == 40
        assert not stopping.done()
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            await whole
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="shutting down"):
            while True:
                await anext(texts)
        async with asyncio.timeout(WAIT_S):
            await stopping
        await until(lambda: slow.coordinator.num_running == 0)
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()
