"""Sessions that share a round trip to Redis do not share their fate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from session_model import OWNERS, end_of, new_session, next_append

from outrider.errors import DataLoss, InvariantError
from outrider.limits import CALLS_PER_PIPELINE_MAX, REDIS_CONNECTIONS_MAX
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_address import DEFAULT_KEY_PREFIX
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.state import Session
from outrider.sessions.store import Counters

pytestmark = pytest.mark.xdist_group("redis")

NO_COUNTS = Counters()


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[tuple[RedisStore, redis.Redis]]:
    """A store, and a client that looks into it."""
    with EmbeddedRedis(tmp_path) as server:
        store = await RedisStore.connect(server.url)
        with redis.Redis.from_url(server.url, protocol=2) as admin:
            yield store, admin
        await store.close()


@pytest.mark.parametrize("kind", ["session", "tokens"])
async def test_a_damaged_session_is_lost_alone(
    stored: tuple[RedisStore, redis.Redis], kind: str
) -> None:
    """Its key holds something else: it is data loss, and the sessions beside it are appended to in
    the same call."""
    store, admin = stored
    sessions = [Session(new_session(f"{k:032x}")) for k in range(3)]
    keys = [f"{DEFAULT_KEY_PREFIX}session:{{{session.session_id}}}" for session in sessions]
    for session in sessions:
        await store.open(new_session(session.session_id))
        session.decide([7], NO_COUNTS)
    broken = keys[1] if kind == "session" else f"{keys[1]}:tokens"
    admin.delete(broken)
    admin.lpush(broken, "something else")
    first, damaged, last = await store.append([next_append(s) for s in sessions])
    assert (first, last) == (4, 4)
    assert isinstance(damaged, DataLoss)
    with pytest.raises(DataLoss):
        await store.finish(end_of(sessions[1]))


async def test_a_bug_leaves_no_caller_waiting(
    stored: tuple[RedisStore, redis.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of the round trip nor those behind it; the next one is made as ever."""
    store, _ = stored

    async def broken(*_: object) -> None:
        raise RuntimeError

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # It is logged, too.
    with monkeypatch.context() as patched:
        patched.setattr("outrider.sessions.redis_scripts._answer", broken)
        opening = [store.open(new_session(f"{k:032x}")) for k in range(CALLS_PER_PIPELINE_MAX + 2)]
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*opening, return_exceptions=True)
    assert {repr(answer) for answer in answers} == {
        "InvariantError('a script was not run: RuntimeError()')"
    }
    await store.open(new_session("f" * 32))


async def test_many_sessions_are_opened_at_once(
    stored: tuple[RedisStore, redis.Redis],
) -> None:
    """They share round trips; one that is refused, and callers that gave up, do not matter."""
    store, admin = stored
    before = admin.info("stats")["total_connections_received"]
    ids = [f"{k:032x}" for k in range(20 * CALLS_PER_PIPELINE_MAX)]
    await store.open(new_session(ids[5], owner=OWNERS[1]))
    opening = [asyncio.ensure_future(store.open(new_session(session_id))) for session_id in ids]
    await asyncio.sleep(0)
    opening[0].cancel()
    answers = await asyncio.gather(*opening, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert isinstance(answers[5], InvariantError)
    assert all(answer is None for i, answer in enumerate(answers) if i not in (0, 5))
    for session_id in (ids[1], ids[-1]):
        assert (await store.load(session_id)).owner == OWNERS[0]
    assert admin.info("stats")["total_connections_received"] - before <= REDIS_CONNECTIONS_MAX
