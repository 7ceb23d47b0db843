"""Leases and take-overs on a real server."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
import redis
from session_model import IDS, OWNERS, end_of, new_session, next_append

from outrider.errors import StaleEpoch, Unavailable
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_scripts import Call, Script, ScriptRunner
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.state import Session
from outrider.sessions.store import Counters, Lifetimes

pytestmark = pytest.mark.xdist_group("redis")


async def appended(store: RedisStore, session: Session, token_id: int) -> Any:
    session.decide([token_id], Counters())
    [answer] = await store.append([next_append(session)])
    return answer


async def test_redis_counts_a_lease_down(server: EmbeddedRedis, admin: redis.Redis) -> None:
    """Renewed for longer than it lasts, then left alone until the store says that it is over. No
    point in time is stored, of whatever clock."""
    lifetimes = Lifetimes(lease_ms=300)
    store = await RedisStore.connect(server.url, key_prefix="lease:", lifetimes=lifetimes)
    await store.hold_lease(OWNERS[0])
    await store.open(new_session())
    seen = await store.load(IDS[0])
    renew_until = time.monotonic() + 0.6
    while time.monotonic() < renew_until:
        await store.hold_lease(OWNERS[0])
        with pytest.raises(Unavailable) as refused:
            await store.take_over(seen, OWNERS[1])
        assert 0 < refused.value.retry_after_ms <= 300
    assert admin.get(f"lease:lease:{{{OWNERS[0]}}}") == b"1"
    assert not [name for name in admin.hgetall(f"lease:session:{{{IDS[0]}}}") if b"ms" in name]
    await asyncio.sleep(refused.value.retry_after_ms / 1000 + 0.05)
    record = await store.take_over(seen, OWNERS[1])
    assert (record.epoch, record.owner) == (2, OWNERS[1])
    assert isinstance(await appended(store, Session(new_session()), 7), StaleEpoch)
    await store.close()


async def test_a_lease_that_is_ended_is_gone_at_once(store: RedisStore) -> None:
    await store.hold_lease(OWNERS[0])
    await store.open(new_session())
    seen = await store.load(IDS[0])
    with pytest.raises(Unavailable):
        await store.take_over(seen, OWNERS[1])
    await store.end_lease(OWNERS[0])
    assert (await store.take_over(seen, OWNERS[1])).owner == OWNERS[1]


async def test_an_owner_learns_once_which_sessions_others_asked_for(store: RedisStore) -> None:
    await store.hold_lease(OWNERS[0])
    for session_id in IDS[:2]:
        await store.open(new_session(session_id))
        for _ in range(2):
            with pytest.raises(Unavailable):
                await store.take_over(await store.load(session_id), OWNERS[1])
    assert await store.hold_lease(OWNERS[1]) == []
    assert await store.hold_lease(OWNERS[0]) == sorted(IDS[:2])
    assert await store.hold_lease(OWNERS[0]) == []


async def test_a_lease_is_renewed_whatever_lies_beside_it(
    store: RedisStore, admin: redis.Redis
) -> None:
    await store.hold_lease(OWNERS[0])
    [lease] = admin.scan_iter(f"{store._key_prefix}lease:*")
    admin.set(f"{lease.decode()}:wanted", "no set")
    admin.pexpire(lease, 100_000)
    assert await store.hold_lease(OWNERS[0]) == []
    assert 0 < admin.pttl(lease) < 100_000 - 10_000


async def test_no_script_touches_keys_of_two_slots(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in braces chooses the slot."""
    sent: list[Call] = []
    run_all = ScriptRunner.run_all

    async def watched(self: ScriptRunner, script: Script, calls: Any) -> list[Any]:
        sent.extend(calls)
        return await run_all(self, script, calls)

    monkeypatch.setattr(ScriptRunner, "run_all", watched)
    await store.hold_lease(OWNERS[0])
    await store.open(new_session())
    session = Session(new_session())
    session.acknowledge(await appended(store, session, 7))
    await store.end_lease(OWNERS[0])
    await store.take_over(await store.load(IDS[0]), OWNERS[1])
    with pytest.raises(StaleEpoch):
        await store.finish(end_of(session))
    assert len(sent) == 10
    for keys, _ in sent:
        assert len({re.findall(r"\{(.*)\}", key)[0] for key in keys}) == 1


async def test_a_full_server_renews_leases(store: RedisStore, admin: redis.Redis) -> None:
    """Else others took the sessions of a coordinator over that runs them. It also says how long
    they last, though it cannot tell the owner that another one asked."""
    await store.hold_lease(OWNERS[0])
    await store.open(new_session())
    seen = await store.load(IDS[0])
    [lease] = admin.scan_iter(f"{store._key_prefix}lease:*")
    admin.pexpire(lease, 100_000)
    admin.config_set("maxmemory", 1)
    try:
        await store.hold_lease(OWNERS[0])
        assert 0 < admin.pttl(lease) < 100_000 - 10_000
        with pytest.raises(Unavailable, match="has an owner"):
            await store.take_over(seen, OWNERS[1])
    finally:
        admin.config_set("maxmemory", 0)
