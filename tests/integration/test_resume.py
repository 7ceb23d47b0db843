"""Two coordinators on one store: a session goes on at the other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from stack import CONFIG, Stack, coordinator_api, running_stack, serve

from coordinator.service import CoordinatorService
from outrider.client import Client, Finished, GenerateRequest, SamplingParams, Started, Tokens
from outrider.drafters.lookup import NgramDrafter
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.limits import SESSION_LEASE_MS
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule
from outrider.transport.grpc_link import draft_link, target_link
from outrider.transport.server import RpcServer

SPEC = EmulatedSpec(vocab_size=64, support=8, max_model_len=4096, verify_ms=10.0)
REQUEST = GenerateRequest(
    (1, 2, 3), max_tokens=120, seed=5, rule=Rule.COUPLED, sampling=SamplingParams(), logprobs=1
)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    target, draft = EmulatedEngine(SPEC, "target"), EmulatedEngine(SPEC, "draft")
    async with running_stack(target, draft, tmp_path, resume_grace_ms=5_000) as running:
        yield running


async def another_coordinator(exits: AsyncExitStack, stack: Stack) -> RpcServer:
    service = CoordinatorService(
        CONFIG,
        "another",
        store=await RedisStore.connect(RedisAddress(url=stack.redis.url)),
        targets={"t": target_link(stack.target_server.address)},
        drafts={"d": draft_link(stack.draft_server.address)},
        fallback=NgramDrafter(),
    )
    await service.start()
    exits.callback(service.check_integrity)
    exits.push_async_callback(service.close)
    return await serve(exits, coordinator_api(service))


@pytest.mark.parametrize(
    ("leaves", "gap_s_max"),
    [(False, 4.0), (True, SESSION_LEASE_MS / 1e3 * 0.6)],  # Or the lease, and time to ask again.
    ids=["gone", "a planned stop"],
)
async def test_when_its_coordinator_is_gone_a_generation_goes_on_at_the_other(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, leaves: bool, gap_s_max: float
) -> None:
    """After a planned stop at once: no client waits for its lease."""
    monkeypatch.setattr(secrets, "randbelow", lambda _: 0)  # Its client begins with the first.
    whole = await stack.client.complete(REQUEST)
    async with AsyncExitStack() as exits:
        server = await another_coordinator(exits, stack)
        client = Client(f"{stack.client.address},{server.address}")
        exits.push_async_callback(client.close)
        events, loop = [], asyncio.get_running_loop()
        gap_s, last_at = 0.0, loop.time()
        async for event in client.generate(REQUEST):
            events.append(event)
            gap_s, last_at = max(gap_s, loop.time() - last_at), loop.time()
            if isinstance(event, Tokens) and event.first_index <= 40 < (
                event.first_index + len(event.token_ids)
            ):
                if leaves:
                    stack.coordinator.hand_over()
                await stack.server.stop(0)
        tokens = [event for event in events if isinstance(event, Tokens)]
        assert tuple(v for event in tokens for v in event.token_ids) == whole.token_ids
        assert tuple(e for event in tokens for e in event.logprobs) == whole.logprobs
        assert sum(isinstance(event, Started) for event in events) == 1
        assert isinstance(events[-1], Finished)
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert gap_s < gap_s_max
        view = await client.get_session(events[0].session_id)
        assert view.epoch == 2
