"""Long session records in Redis: read in parts, and hashed on a thread."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis
from session_model import IDS, OWNERS, new_session

from outrider.errors import Unavailable
from outrider.sessions import redis_store
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.state import Session
from outrider.sessions.store import Counters

pytestmark = pytest.mark.xdist_group("redis")

NO_COUNTS = Counters()


LINES = [f"[-{number}.5, []]" for number in range(1, 1000)]


async def a_long_one(store: RedisStore) -> Session:
    """A session whose tokens and log-probabilities take many parts."""
    new = new_session(IDS[0])
    await store.open(new)
    session = Session(new)
    session.decide(range(5, 1004), NO_COUNTS, logprobs=LINES)
    append = session.next_append()
    assert append is not None
    [length] = await store.append([append])
    session.acknowledge(int(length))  # type: ignore[call-overload]
    return session


async def test_an_epoch_that_is_given_twice_while_a_record_is_read(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, parts: None
) -> None:
    """Redis lost a take-over and gave its epoch to another owner: tokens of both are not mixed."""
    await a_long_one(store)
    run, num_parts = store._scripts.run, 0
    others = "".join(f"{line}\n" for line in LINES).replace(".5", ".6")

    async def run_and_replace(script: Any, call: Any) -> Any:
        nonlocal num_parts
        answer = await run(script, call)
        num_parts += script is redis_store._READ_PART
        if num_parts == 3:
            key = f"{store._key_prefix}session:{{{IDS[0]}}}"
            await store._client.hset(key, "owner", "carl")
            await store._client.set(f"{key}:logprobs", others)
        return answer

    monkeypatch.setattr(store._scripts, "run", run_and_replace)
    record = await store.load(IDS[0])
    assert (record.owner, record.logprobs) == ("carl", others)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are read in parts of 100 bytes."""
    monkeypatch.setattr("outrider.sessions.redis_store.RECORD_PART_BYTES", 100)


async def test_a_long_record_is_read_in_parts(
    store: RedisStore, admin: redis.Redis, parts: None
) -> None:
    """No answer of Redis is long; the record is the same, read or taken over."""
    session = await a_long_one(store)
    sent = dict(admin.info("commandstats"))
    loaded = await store.load(IDS[0])
    for record in (loaded, await store.take_over(loaded, OWNERS[0])):
        assert record.token_ids == tuple(session.tokens.ids)
        assert record.logprobs == "".join(f"{line}\n" for line in LINES)
    told = admin.info("commandstats")
    size = 4 * session.length + sum(len(line) + 1 for line in LINES)
    read = told["cmdstat_getrange"]["calls"] - sent.get("cmdstat_getrange", {"calls": 0})["calls"]
    assert read >= 2 * size // 100
    assert told.get("cmdstat_get") == sent.get("cmdstat_get")


async def test_a_record_that_is_replaced_while_it_is_read(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, parts: None
) -> None:
    """By another owner, between two parts: what is handed out is of one owner alone. A take-over
    that another one has followed is refused."""
    session = await a_long_one(store)
    run, num_parts = store._scripts.run, 0
    replaced = f"session:{{{IDS[0]}}}"
    others = "".join(f"{line}\n" for line in LINES).replace(".5", ".6")

    async def run_and_replace(script: Any, call: Any) -> Any:
        nonlocal num_parts
        answer = await run(script, call)
        num_parts += script is redis_store._READ_PART
        if num_parts == 3:
            key = f"{store._key_prefix}{replaced}"
            await store._client.hincrby(key, "epoch", 1)
            await store._client.set(f"{key}:logprobs", others)
        return answer

    monkeypatch.setattr(store._scripts, "run", run_and_replace)
    record = await store.load(IDS[0])
    assert record.token_ids == tuple(session.tokens.ids)
    assert record.logprobs == others
    assert record.epoch == session.epoch + 1
    num_parts = 0
    with pytest.raises(Unavailable, match="taken over meanwhile"):
        await store.take_over(record, OWNERS[0])


async def test_hashing_a_long_record_leaves_the_event_loop(store: RedisStore) -> None:
    """The loop serves others meanwhile."""
    new = new_session(IDS[0], prompt_ids=tuple(range(300_000)))
    await store.open(new)
    loading = asyncio.create_task(store.load(IDS[0]))
    began = last = time.perf_counter()
    longest = 0.0
    while not loading.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    taken = time.perf_counter() - began
    assert (await loading).token_ids == new.token_ids
    assert longest < taken / 3, f"the event loop stood still for {longest} of {taken} s"
