"""Requests by HTTP whose coordinator is killed: two coordinators, each a process, on one port."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio
from openai import AsyncOpenAI
from stack import CONFIG, Stack, slow_stack, toy_text

from coordinator.http_api.app import http_server
from coordinator.http_api.server import HttpOptions
from coordinator.service import CoordinatorService
from outrider.config import DraftConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_store import RedisStore
from outrider.transport.grpc_link import target_link

NUM_REQUESTS = 8
NUM_TOKENS = 80


def serve(redis_url: str, target: str, port: str) -> None:
    """A coordinator's process, whose owner's name in the store is its process's."""

    async def run() -> None:
        coordinator = CoordinatorService(
            replace(CONFIG, resume_grace_ms=20_000, lookup=DraftConfig()),
            str(os.getpid()),
            store=await RedisStore.connect(RedisAddress(url=redis_url)),
            targets={"t": target_link(target)},
            fallback=NgramDrafter(),
            text=toy_text(),
        )
        await coordinator.start()
        options = HttpOptions(port=int(port), shares_port=True, takes_over=True)
        server = http_server(coordinator, options)
        await server.start()
        print(server.address.rpartition(":")[2], flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


@asynccontextmanager
async def two_coordinators(stack: Stack) -> AsyncIterator[tuple[str, subprocess.Popen[str]]]:
    """Their URL, and the process of one of them."""
    processes, port = list[subprocess.Popen[str]](), "0"
    try:
        for _ in range(2):
            arguments = (stack.redis.url, stack.target_server.address, port)
            code = (
                f"import sys; sys.path[:] = {sys.path!r}\n"
                f"from test_http_survival import serve; serve{arguments!r}"
            )
            process = await asyncio.to_thread(
                subprocess.Popen, [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                cwd=Path(__file__).parent,
            )  # fmt: skip
            processes.append(process)
            assert process.stdout is not None
            port = (await asyncio.to_thread(process.stdout.readline)).strip()
        yield f"http://127.0.0.1:{port}/v1", processes[0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def stored_lengths(stack: Stack) -> list[int]:
    """Of the answers of all sessions."""
    store = await RedisStore.connect(RedisAddress(url=stack.redis.url))
    admin = redis.asyncio.Redis.from_url(stack.redis.url)
    keys = [key.decode() async for key in admin.scan_iter("*session:{*}")]
    records = [await store.load(key.partition("{")[2][:-1]) for key in keys]
    await admin.aclose()
    await store.close()
    return [len(one.token_ids) - one.prompt_length for one in records]


def body(number: int) -> dict[str, Any]:
    return {"model": "model", "prompt": f"{number}", "max_tokens": NUM_TOKENS, "seed": number}


async def streamed(url: str, number: int) -> tuple[str, int]:
    """The text of an answer, for a client that goes on wherever its stream ends; and how often it
    did."""
    text, part, num_breaks = "", "", 0
    headers = {"Idempotency-Key": f"stream {number}"}
    asked = {**body(number), "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=20.0) as client:
        while True:
            with suppress(httpx.HTTPError):
                async with client.stream(
                    "POST", "/completions", json=asked, headers=headers
                ) as response:
                    async for line in response.raise_for_status().aiter_lines():
                        name, _, value = line.partition(": ")
                        if value == "[DONE]":
                            return text, num_breaks
                        if name == "data":
                            [choice] = json.loads(value)["choices"]
                            part = choice["text"]
                        elif name == "id":
                            headers["Last-Event-ID"] = value
                            text += part
            num_breaks += 1
            await asyncio.sleep(0.2)


async def whole(client: AsyncOpenAI, number: int, key: str) -> str:
    headers = {"Idempotency-Key": key} if key else {}
    answer = await client.completions.create(**body(number), extra_headers=headers)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == NUM_TOKENS
    return answer.choices[0].text


async def test_a_killed_coordinator_costs_no_token(tmp_path: Path) -> None:
    """OpenAI's client, as it is, asks again by itself; of a stream, what it lacks. Nothing is
    decoded twice."""
    async with (
        slow_stack(tmp_path) as stack,
        two_coordinators(stack) as (url, process),
        AsyncOpenAI(base_url=url, api_key="none", max_retries=8) as client,
    ):
        numbers = range(NUM_REQUESTS)
        answering = asyncio.gather(*(whole(client, one, f"{one}") for one in numbers))
        streaming = asyncio.gather(*(streamed(url, one) for one in numbers))
        await asyncio.sleep(1.0)
        assert (answering.done(), streaming.done()) == (False, False)
        process.kill()
        answers, streams = await answering, await streaming
        assert await stored_lengths(stack) == [NUM_TOKENS] * 2 * NUM_REQUESTS
        assert sum(num_breaks for _, num_breaks in streams) > 0
        expected = await asyncio.gather(*(whole(client, one, "") for one in numbers))
        assert answers == [text for text, _ in streams] == expected
