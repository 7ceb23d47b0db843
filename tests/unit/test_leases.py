"""The lease that a coordinator holds for all of its sessions."""

from __future__ import annotations

import asyncio

import pytest
from commit_bench import LATENCY_S, Bench, bench, now
from virtual_time import virtually

from outrider.errors import StaleEpoch, Unavailable
from outrider.limits import SESSION_LEASE_MS, SESSION_LEASE_RENEWAL_MS


@pytest.mark.parametrize("num_sessions", [0, 1, 50])
@virtually
async def test_a_lease_is_renewed_by_one_call_per_period(num_sessions: int) -> None:
    """However many sessions there are; no other coordinator gets one of them meanwhile."""
    async with bench() as b:
        sessions = [await b.session(k) for k in range(num_sessions)]
        start, before = now(), b.store.num_renewals
        await asyncio.sleep(10)
        periods = (now() - start) * 1000 / SESSION_LEASE_RENEWAL_MS
        assert abs(b.store.num_renewals - before - periods) <= 1
        for session in sessions:
            with pytest.raises(Unavailable):
                await b.store.take_over(await b.store.load(session.session_id), "bert")
        assert not b.store.appends


@virtually
async def test_a_lease_outlives_calls_that_fail_and_not_a_store_that_is_down_for_long() -> None:
    async with bench() as b:
        session = await b.session()
        seen = await b.store.load(session.session_id)
        await asyncio.sleep(1)
        b.store.down = True
        await asyncio.sleep(2 * SESSION_LEASE_RENEWAL_MS / 1000)
        b.store.down = False
        with pytest.raises(Unavailable):
            await b.store.take_over(seen, "bert")
        b.store.down = True
        await asyncio.sleep(2 * SESSION_LEASE_MS / 1000)
        b.store.down = False
        assert (await b.store.take_over(seen, "bert")).owner == "bert"
        b.decide(session)
        with pytest.raises(StaleEpoch):
            await b.committer.shown(session, 4)


@virtually
async def test_sessions_are_handed_over_at_once() -> None:
    """What runs goes on until another one takes it over; the lease does not come back."""
    async with bench() as b:
        taken, kept = await b.session(0), await b.session(1)
        await asyncio.sleep(1)
        b.committer.hand_over()
        await asyncio.sleep(2 * LATENCY_S)
        b.decide(kept)
        assert await b.committer.shown(kept, 4) == 4
        await asyncio.sleep(1)
        seen = await b.store.load(taken.session_id)
        assert (await b.store.take_over(seen, "bert")).epoch == 2
        b.decide(taken)
        with pytest.raises(StaleEpoch):
            await b.committer.shown(taken, 4)


@pytest.mark.parametrize("is_told", [False, True])
@virtually
async def test_a_committer_that_closes_leaves_no_lease(is_told: bool) -> None:
    b = Bench()
    session = await b.session()
    await asyncio.sleep(1)
    if is_told:
        b.committer.hand_over()
    b.committer.close()
    await b.running
    seen = await b.store.load(session.session_id)
    assert (await b.store.take_over(seen, "bert")).epoch == 2
