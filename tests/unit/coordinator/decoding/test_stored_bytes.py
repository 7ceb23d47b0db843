"""What each tenant's sessions take in the session store."""

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from coordinator.decoding.sessions import RequestKey
from coordinator.decoding.stored_bytes import KEY_BYTES, SESSION_BYTES, TOKEN_BYTES, StoredBytes
from outrider import errors, limits
from outrider.interfaces.request import Event, Finished, ResumeRequest
from outrider.sessions.store import StoreMemory
from outrider.speculation.sampling_params import SamplingParams
from tests.support.coordinator_bench import REQUEST, Bench, bench, target_service

pytestmark = pytest.mark.virtual

LARGE = replace(
    REQUEST, sampling=SamplingParams(logit_bias=((1, 0.5), (2, -0.5))), shown_tokens=("x" * 2000,)
)


def stored(made: Bench) -> StoredBytes:
    return made.service._sessions.stored


async def run(made: Bench, request: Any = REQUEST, tenant: str = "a") -> list[Event]:
    return [event async for event in made.service.streams.generate(request, tenant)]


def fill(made: Bench, most: int, share: float) -> None:
    """The coordinator learns it within a second."""
    made.store.most, made.store.used = most, math.ceil(most * share)


async def told(call: Callable[[], Any]) -> str:
    with pytest.raises(errors.Overloaded) as refused:
        await call()
    assert refused.value.retry_after_ms > 0
    return refused.value.limit


async def test_a_session_counts_what_it_may_take_then_what_it_has_and_then_nothing() -> None:
    request = replace(REQUEST, max_tokens=60, stop=(), ignore_eos=True)
    async with bench() as made:
        async with aclosing(made.service.streams.generate(request, "a")) as events:
            await anext(events)
            running = stored(made).of("a")
            assert running > SESSION_BYTES + TOKEN_BYTES * (3 + 60)
            with_logprobs = made.service.streams.generate(replace(request, logprobs=20), "b")
            async with aclosing(with_logprobs) as others:
                await anext(others)
                assert stored(made).of("b") > 10 * running
        await asyncio.sleep(1.0)
        assert SESSION_BYTES < stored(made).of("a") < running
        assert stored(made).of("b") < running
        await asyncio.sleep(limits.FINISHED_TTL_S)
        assert stored(made).of("a") == stored(made).of("b") == 0


async def test_a_tenant_that_has_used_up_its_share_is_refused_and_no_other() -> None:
    async with bench() as made:
        await run(made)
        most = int(stored(made).of("a") * 2 / limits.STORE_TENANT_SHARE)
        fill(made, most, limits.STORE_SHARED_FROM)
        await asyncio.sleep(1.0)
        await run(made)
        await run(made)
        assert await told(lambda: run(made)) == "tenant_store_memory"
        await run(made, tenant="b")
        await run(made, tenant="")
        await asyncio.sleep(limits.FINISHED_TTL_S)
        await run(made)
        stored(made).learn(StoreMemory(most // 2, most), 4)  # There are more coordinators now.
        assert await told(lambda: run(made)) == "tenant_store_memory"


async def test_a_tenant_may_exceed_its_share_while_the_store_has_room() -> None:
    async with bench() as made:
        fill(made, 10_000, limits.STORE_SHARED_FROM - 0.01)
        await asyncio.sleep(1.0)
        for _ in range(10):
            await run(made)
            await asyncio.sleep(1.0)
        assert stored(made).of("a") > 10_000
        fill(made, 10_000, limits.STORE_SHARED_FROM)
        await asyncio.sleep(1.0)
        assert await told(lambda: run(made)) == "tenant_store_memory"


async def test_many_sessions_at_once_do_not_exceed_a_share_unseen() -> None:
    """Those that were opened since the store's memory was read count, too."""
    async with bench() as made:
        fill(made, 20_000, limits.STORE_SHARED_FROM - 0.2)
        await asyncio.sleep(1.0)
        ends = await asyncio.gather(*(run(made) for _ in range(10)), return_exceptions=True)
        refused = [one for one in ends if isinstance(one, errors.Overloaded)]
        assert {one.limit for one in refused} == {"tenant_store_memory"}
        assert len(refused) > 5


async def test_running_sessions_of_the_only_tenant_go_on() -> None:
    async with bench(target=target_service(step_s=0.1)) as made:
        large = replace(REQUEST, logprobs=20)
        running = asyncio.create_task(run(made, large))
        await asyncio.sleep(0.5)
        fill(made, 32_000, limits.STORE_PAUSED_FROM)
        await asyncio.sleep(30.0)
        assert isinstance((await running)[-1], Finished)


async def test_sessions_above_their_tenants_share_wait_until_the_store_has_room() -> None:
    async with bench(target=target_service(step_s=0.1)) as made:
        large = replace(REQUEST, logprobs=20)
        async with asyncio.TaskGroup() as running:
            waiting = running.create_task(run(made, large))
            others = [running.create_task(run(made, tenant=name)) for name in ("b", "")]
            await asyncio.sleep(0.5)
            fill(made, 32_000, limits.STORE_PAUSED_FROM)
            await asyncio.gather(*others)
            await asyncio.sleep(30.0)
            assert not waiting.done()
            fill(made, 32_000, limits.STORE_PAUSED_FROM - 0.01)
        assert isinstance((await waiting)[-1], Finished)


async def test_an_almost_full_store_opens_no_session_and_ends_those_that_run() -> None:
    async with bench() as made:
        running = asyncio.create_task(run(made))
        await asyncio.sleep(0.05)
        stored(made).learn(StoreMemory(90, 100), 1)
        assert await told(lambda: run(made, tenant="b")) == "store_memory"
        assert await told(lambda: run(made, tenant="")) == "store_memory"
        await running


async def test_large_parameters_are_stored_and_counted_once() -> None:
    async with bench(resume_grace_ms=5_000) as made:
        single = await run(made, LARGE)
        first = stored(made).of("a")
        await asyncio.gather(*(run(made, replace(LARGE, seed=seed)) for seed in range(3)))
        assert stored(made).of("a") < 4 * first - 3 * 2000
        texts = [key for key in made.store.data.sorted_keys() if key.startswith(b"shared:")]
        assert len(texts) == 1
        record = await made.store.load(single[0].session_id)
        assert json.loads(record.parameters) == {"seed": 1, "max_tokens": 20}
        found = await made.service.streams.stored_parameters(record.session_id, "a")
        assert (found.shown_tokens, found.sampling) == (LARGE.shown_tokens, LARGE.sampling)
        again = made.service.streams.resume(ResumeRequest(record.session_id), "a")
        assert [one async for one in again][1:-1]
        await asyncio.sleep(limits.FINISHED_TTL_S + 10)
        assert stored(made).of("a") == 0


async def test_sessions_of_other_requests_have_their_own_parameters() -> None:
    """The newest large parameters are remembered, and must not be taken for others."""
    async with bench() as made:
        other = replace(LARGE, shown_tokens=("y" * 2000,))
        for request in (LARGE, other, REQUEST, other, LARGE):
            [started, *_] = await run(made, request)
            found = await made.service.streams.stored_parameters(started.session_id, "a")
            assert found.shown_tokens == request.shown_tokens


async def test_ended_sessions_are_forgotten_without_a_request_that_asks() -> None:
    """Also those of callers without a key, who have no limit."""
    async with bench() as made:
        for _ in range(3):
            await run(made, LARGE, tenant="")
            await asyncio.sleep(limits.FINISHED_TTL_S + 60)
        assert len(stored(made)._held) == len(stored(made)._ends) == 1
        assert "x" * 2000 not in repr(stored(made)._held)


async def test_an_old_run_that_ends_late_does_not_end_the_count_of_its_session() -> None:
    """The client has resumed it here meanwhile."""
    async with bench() as made, aclosing(made.service.streams.generate(REQUEST, "a")) as events:
        await anext(events)
        [run_] = made.service._sessions.running.values()
        running = stored(made).of("a")
        held = stored(made)._held[run_.session.session_id]
        stored(made)._put(run_.session.session_id, replace(held, epoch=held.epoch + 1))
        stored(made).end(run_.session)
        assert stored(made).of("a") == running


async def test_an_idempotency_key_counts_as_long_as_it_is_stored() -> None:
    async with bench() as made:
        events = made.service.streams.generate(REQUEST, "a", key=RequestKey("k", "digest"))
        [_ async for _ in events]
        await asyncio.sleep(limits.FINISHED_TTL_S + 60)
        assert stored(made).of("a") == KEY_BYTES
        await asyncio.sleep(limits.KEY_TTL_S)
        assert stored(made).of("a") == 0


async def test_a_session_that_waits_for_long_stays_stored() -> None:
    """Its target is away, so nothing is appended. Its record lives on until its deadline."""
    async with bench(deadline_ms=3_600_000, target_gone_ms=600_000) as made:
        events = made.service.streams.generate(REQUEST, "a")
        [started] = [await anext(events)]
        for _ in range(5):
            made.store.data.run((b"PEXPIRE", made.store.key(started.session_id), b"100000"))
            await asyncio.sleep(limits.SESSION_RENEWAL_S)
        assert made.store.data.ttl_ms(made.store.key(started.session_id)) > 100_000
        await events.aclose()
