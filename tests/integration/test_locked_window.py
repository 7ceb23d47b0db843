"""The window of a coordinator that asks for keys: its files are open, what it asks for is not, and
its generations count as all others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_front import http_front
from stack import Stack, running_stack

from coordinator.auth.access_control import access_control_of
from coordinator.auth.rate_limits import Limiter, RedisSlots
from coordinator.http_api.app import PAGE_PATHS
from coordinator.http_api.server import HttpOptions
from outrider.api_keys import Caller, add_key
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.sessions.redis_address import RedisAddress

SPEC = EmulatedSpec(vocab_size=64, support=8, max_model_len=4096, verify_ms=10.0)
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 2000}
WAIT_S = 20.0


@dataclass
class Locked:
    """A coordinator behind a gate, and headers by the names of their keys."""

    stack: Stack
    http: httpx.AsyncClient
    headers: dict[str, dict[str, str]]


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[Locked]:
    engines = EmulatedEngine(SPEC, "target"), EmulatedEngine(SPEC, "draft")
    callers = Caller("alice", "team"), Caller("one", "one", concurrency=1)
    headers = {
        caller.name: {"authorization": f"Bearer {add_key(tmp_path / 'keys', caller)}"}
        for caller in callers
    }
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(running_stack(*engines, tmp_path / "redis"))
        slots = RedisSlots(RedisAddress(url=stack.redis.url, key_prefix="outrider:"))
        gate = access_control_of("", str(tmp_path / "keys"), Limiter(slots))
        exits.push_async_callback(gate.close)
        url = await exits.enter_async_context(http_front(stack, HttpOptions(access=gate)))
        http = await exits.enter_async_context(httpx.AsyncClient(base_url=url, timeout=WAIT_S))
        yield Locked(stack, http, headers)


async def test_only_health_and_the_page_need_no_key(locked: Locked) -> None:
    """Whatever the server has, as it says itself, is refused without one, in OpenAI's shape; so is
    what it has not."""
    http, key = locked.http, locked.headers["alice"]
    described = (await http.get("/openapi.json", headers=key)).json()["paths"]
    calls = [(method, path) for path, methods in described.items() for method in methods]
    assert {("post", "/api/generate"), ("get", "/api/fleet")} <= set(calls)
    calls += [
        ("get", path) for path in ("/openapi.json", "/page", "/page/", "/api", "/page/none.js")
    ]
    for method, path in calls:
        if path == "/health":
            continue
        for headers in ({}, {"authorization": "Bearer some-other-key-1234"}):
            found = await http.request(method, path, headers=headers)
            assert found.status_code == 401, path
            assert found.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/", *PAGE_PATHS):
        found = await http.get(path)
        assert found.status_code == 200, path
        assert "emulated" not in found.text
    assert (await http.get("/api/fleet", headers=key)).status_code == 200
    assert "[DONE]" in (await http.post("/api/generate", json=BODY, headers=key)).text


async def test_what_is_generated_counts(locked: Locked) -> None:
    """Against the same limit, whichever way it is asked for; who goes, or has the last event, makes
    room. Looking at the fleet does not count."""
    http, one = locked.http, locked.headers["one"]
    paths = ("/api/generate", "/v1/completions")
    for path in paths:
        body = {**LONG, "stream": True}
        async with http.stream("POST", path, json=body, headers=one) as running:
            lines = running.aiter_lines()
            await anext(lines)
            for other in paths:
                found = await http.post(other, json=BODY, headers=one)
                assert found.status_code == 429, (path, other)
                assert found.json()["error"]["type"] == "rate_limit_error"
                assert int(found.headers["retry-after"]) > 0
            assert (await http.get("/api/fleet", headers=one)).status_code == 200
            free = await http.post("/api/generate", json=BODY, headers=locked.headers["alice"])
            assert free.status_code == 200
        async with asyncio.timeout(WAIT_S):
            while (await http.post(path, json=BODY, headers=one)).status_code == 429:
                await asyncio.sleep(0.05)
    for _ in range(10):  # One after the other, without a pause: each finds the place free.
        found = await http.post("/api/generate", json=BODY, headers=one)
        assert found.status_code == 200, found.text


async def test_a_session_is_its_keys_tenants(locked: Locked) -> None:
    """It comes from the key, as everywhere."""
    found = await locked.http.post("/api/generate", json=BODY, headers=locked.headers["alice"])
    session_id = found.text.partition('"session_id":"')[2][:32]
    assert (await locked.stack.coordinator.session(session_id, None)).tenant == "team"
