"""Another server becomes Redis' primary while sessions are opened and extended."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
import redis

from coordinator.auth.access_control import RedisSlots
from coordinator.decoding.committer import Committer
from outrider.errors import ConfigError, DataLoss, StoreUnavailable
from outrider.foundation.api_keys import Caller
from outrider.limits import REDIS_SENTINEL_TIMEOUT_MS, REDIS_TIMEOUT_MS
from outrider.redis.address import RedisAddress
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ReplicaRecord
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.state import Session
from outrider.sessions.store import Counters, Finish, FinishReason, SessionRecord
from tests.chaos.proxy import FaultProxy
from tests.support.redis_servers import RedisServers
from tests.support.session_model import OWNERS, new_session, next_append
from tests.support.stack import until

pytestmark = pytest.mark.xdist_group("redis")

BACK_S = 10.0
"""Time until commits continue: `DOWN_AFTER_MS`, one or two seconds for Sentinel's election and
promotion, a timeout and a delay of the committer, and a reserve for busy machines."""
FOLLOWED_S = 30.0
"""If commits wait for a replica: Sentinel demotes a returning primary only after about 10 s."""
LOAD_S = 1.0
NUM_SESSIONS = 24
NO_COUNTS = Counters()


async def until_it_works(call: Callable[[], Awaitable[object]], within_s: float = BACK_S) -> int:
    """Repeats a call until it succeeds. Returns how often it raised `StoreUnavailable`."""
    failed = 0
    async with asyncio.timeout(within_s):
        while True:
            try:
                await call()
            except StoreUnavailable:
                failed += 1
                await asyncio.sleep(0.02)
            else:
                return failed


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[RedisServers]:
    async with RedisServers(tmp_path / "servers") as made:
        yield made


def decided(session_id: str, position: int) -> int:
    """The token of a session at a position. It is the same for every owner."""
    return random.Random(f"{session_id} {position}").randrange(1_000)


class Load:
    def __init__(self, store: RedisStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._committer = Committer(store, owner, random.Random(1).random)
        self.ending = asyncio.Event()
        self._last_shown = asyncio.get_running_loop().time()
        self.longest_gap_s = 0.0
        """The longest time in which no session showed a token."""
        self.shown: dict[str, int] = {}
        """Length of each session."""
        self.lost: set[str] = set()
        """Sessions that a new primary did not know."""
        self.ended: set[str] = set()

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._committer.run())
        self._tasks = [asyncio.create_task(self._sessions(i)) for i in range(NUM_SESSIONS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (*self._tasks, self._running):
            task.cancel()
        await asyncio.gather(*self._tasks, self._running, return_exceptions=True)

    async def finish(self, within_s: float) -> None:
        self.ending.set()
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self._tasks)

    async def until_shown(self, within_s: float) -> None:
        before = self.shown.copy()
        await until(lambda: self.shown != before, within_s)

    async def _sessions(self, number: int) -> None:
        """Opens sessions of 60 tokens, one after the other."""
        count = 0
        while not self.ending.is_set():
            session_id = f"{number:016x}{count:016x}"
            try:
                await self._session(new_session(session_id, owner=self._owner))
            except DataLoss:
                self.lost.add(session_id)
            count += 1

    async def _session(self, new: SessionRecord) -> None:
        loop = asyncio.get_running_loop()
        await until_it_works(lambda: self._store.open(new), FOLLOWED_S)
        session = Session(new)
        commits = self._committer.add(session)
        try:
            for _ in range(60):
                await commits.room()
                session.decide([decided(new.session_id, session.length)], NO_COUNTS)
                commits.notify()
                while session.showable_length < session.length:
                    await commits.change()
                self.shown[new.session_id] = session.showable_length
                now = loop.time()
                self.longest_gap_s = max(self.longest_gap_s, now - self._last_shown)
                self._last_shown = now
                await asyncio.sleep(0.005)
            await commits.finish(FinishReason.LENGTH)
            self.ended.add(new.session_id)
        finally:
            commits.remove()

    async def check(self, store: RedisStore, but: set[str]) -> None:
        """Checks that all shown tokens are stored, except in these sessions."""
        assert len(self.shown) >= NUM_SESSIONS
        assert not self.shown.keys() <= but
        for session_id in self.shown.keys() - but:
            record = await store.load(session_id)
            assert len(record.token_ids) >= self.shown[session_id]
            for place in range(record.prompt_length, len(record.token_ids)):
                assert record.token_ids[place] == decided(session_id, place)


async def kill(servers: RedisServers) -> None:
    """Kills the primary for good. Another replica is started."""
    await servers.replace(servers.primary_address)


async def pause(servers: RedisServers) -> None:
    """Stops the primary for a while. It returns as a primary, until Sentinel demotes it."""
    pid, before = servers.primary.pid, servers.primary_address
    os.kill(pid, signal.SIGSTOP)
    try:
        await servers.until_promoted(before)
    finally:
        os.kill(pid, signal.SIGCONT)


RARER = [(RedisServers.demote, 0), (pause, 0), (kill, 1), (RedisServers.demote, 1)]


@pytest.mark.parametrize(
    ("fault", "wait_replicas"),
    [(kill, 0), (pause, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in RARER)],
)
async def test_commits_go_on_at_the_promoted_replica(
    servers: RedisServers, fault: Callable[[RedisServers], Awaitable[None]], wait_replicas: int
) -> None:
    """No session is stuck, and shown tokens do not change. If commits wait for no replica, sessions
    that the new primary does not know, and last tokens of finished ones, may be lost."""
    within_s = FOLLOWED_S if wait_replicas else BACK_S
    address = RedisAddress(url=servers.url, key_prefix="outrider:")
    store = await RedisStore.connect(address, wait_replicas=wait_replicas)
    async with Load(store, OWNERS[0]) as load:
        await asyncio.sleep(LOAD_S)
        await fault(servers)
        await load.until_shown(within_s)
        ended = set() if wait_replicas else load.ended.copy()
        await asyncio.sleep(LOAD_S)
        await load.finish(within_s)
        await load.check(store, load.lost | ended)
    await store.close()
    assert load.longest_gap_s < within_s
    if wait_replicas:
        assert not load.lost
    print(f"gap {load.longest_gap_s:.2f} s, {len(load.shown)} sessions, {len(load.lost)} lost")


async def test_a_primary_that_is_cut_off_acknowledges_nothing(tmp_path: Path) -> None:
    """Only a coordinator still reaches the old primary, whose writes will be lost. If commits wait
    for a replica, these writes are not acknowledged."""
    proxy = FaultProxy()
    async with (
        RedisServers(tmp_path / "servers", forward=proxy.forward) as servers,
        AsyncExitStack() as exits,
    ):
        exits.callback(proxy.close)

        async def connect(url: str, wait_replicas: int = 0) -> RedisStore:
            store = await RedisStore.connect(RedisAddress(url=url), wait_replicas=wait_replicas)
            exits.push_async_callback(store.close)
            return store

        before = servers.primary_address
        url = f"redis://{servers.primary.address}/0"
        careful, careless = await connect(url, wait_replicas=1), await connect(url)
        elsewhere = await connect(servers.url)
        new = new_session("1" * 32)
        await careful.open(new)
        session = Session(new)
        session.decide([7, 8], NO_COUNTS)
        append = next_append(session)
        proxy.hold(before)
        await servers.until_promoted(before)
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            await careful.append([append])
        assert await careless.append([append]) == [session.length]
        assert await until_it_works(lambda: elsewhere.load(new.session_id)) == 1
        assert (await elsewhere.load(new.session_id)).token_ids == new.token_ids


async def test_a_full_primary_with_a_replica_stores_ends(servers: RedisServers) -> None:
    """Otherwise sessions that nobody runs would keep the server full."""
    address = RedisAddress(url=servers.url, key_prefix="outrider:")
    store = await RedisStore.connect(address, wait_replicas=1)
    ended, taken = (new_session(f"{number}" * 32) for number in (1, 2))
    for new in (ended, taken):
        await store.open(new)
    with redis.Redis.from_url(f"redis://{servers.primary.address}/0") as primary:
        primary.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="OOM"):
            await store.open(new_session("3" * 32))
        end = Finish(ended.session_id, 1, OWNERS[0], None, FinishReason.STOP, NO_COUNTS)
        await store.finish(end)
        await store.release(taken.session_id, 1, OWNERS[0])
        seen = await store.load(taken.session_id)
        assert (await store.take_over(seen, OWNERS[1])).epoch == 2
        primary.config_set("maxmemory", 0)
    assert (await store.load(ended.session_id)).finish_reason is FinishReason.STOP
    await store.close()


async def test_what_replicas_lack_does_not_count(servers: RedisServers) -> None:
    """While the replica is stopped, every call fails within a bounded time, even if the primary
    already has all of its data. After the replica has continued, all data is there once."""
    address = RedisAddress(url=servers.url, key_prefix="outrider:")
    store = await RedisStore.connect(address, wait_replicas=1)
    new = new_session("1" * 32)
    await store.open(new)
    session = Session(new)
    session.decide([7, 8], NO_COUNTS)
    append = next_append(session)
    seen = await store.load(new.session_id)
    end = Finish(new.session_id, 1, OWNERS[0], None, FinishReason.STOP, NO_COUNTS)
    pid = servers.replicas[0].pid
    os.kill(pid, signal.SIGSTOP)
    calls = (
        lambda: store.append([append]),
        lambda: store.append([append]),
        lambda: store.load(new.session_id),
        lambda: store.open(new_session("2" * 32)),
        lambda: store.finish(end),
        lambda: store.take_over(seen, OWNERS[0]),
    )
    try:
        for call in calls:
            began = time.monotonic()
            reason = "0 of 1 replicas have received a write after 500 ms"
            with pytest.raises(StoreUnavailable, match=reason):
                await call()
            assert time.monotonic() - began < 2 * REDIS_TIMEOUT_MS / 1000
        await store.hold_lease(OWNERS[0])
    finally:
        os.kill(pid, signal.SIGCONT)
    await until_it_works(lambda: store.append([append]))
    assert (await store.load(new.session_id)).token_ids == (*new.token_ids, 7, 8)
    with redis.Redis(port=servers.replicas[0].port, protocol=2) as replica:
        assert replica.exists("outrider:session:{" + "2" * 32 + "}")
    await store.close()


async def test_all_that_take_a_redis_url_take_sentinels(servers: RedisServers) -> None:
    address = RedisAddress(url=servers.url, key_prefix="outrider:")
    registry, slots = RedisRegistry(address, "d"), RedisSlots(address)
    record = ReplicaRecord(role="draft", name="d1", address="h:1", host="h", pid=1)
    await registry.announce(record)
    assert await registry.records("draft") == [record]
    await slots.take(Caller("me", concurrency=1), ["a"], 1)
    for one in (registry, slots):
        await one.close()


async def test_a_start_waits_for_a_sentinel_that_is_slow_to_answer(servers: RedisServers) -> None:
    """The Sentinel answers none of the first calls in time, as while it elects a primary."""
    pid = servers.sentinel.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        connecting = asyncio.create_task(RedisStore.connect(RedisAddress(url=servers.url)))
        await asyncio.sleep(5 * REDIS_SENTINEL_TIMEOUT_MS / 1000)
        assert not connecting.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    await (await connecting).close()


async def test_what_is_wrong_with_sentinels_is_said(tmp_path: Path) -> None:
    async with RedisServers(tmp_path, password="hu" + "sh", sentinel_password="qui" + "et") as made:
        right = RedisAddress(url=made.url, password="hu" + "sh", sentinel_password="qui" + "et")
        elsewhere = right.url.removesuffix("/outrider/0")
        unknown = "no Sentinel knows a running primary .* AuthenticationError"
        cases = {
            unknown: {"sentinel_password": "swordfish"},
            "no Sentinel knows a running primary .* service\\)": {"url": f"{elsewhere}/other"},
            "is a Sentinel": {"url": f"redis://:quiet@{made.sentinel.address}"},
            "invalid username-password": {"password": "swordfish"},
            "ConnectionError": {"url": "redis+sentinel://:hush@127.0.0.1:1/outrider"},
        }
        for message, change in cases.items():
            with pytest.raises(ConfigError, match=message) as refused:
                await RedisStore.connect(replace(right, **change))
            assert re.search(r"hush|quiet|swordfish|\n", refused.value.message) is None
        hosts = elsewhere.replace("127.0.0.1:", "127.0.0.1:1,127.0.0.1:")
        store = await RedisStore.connect(replace(right, url=f"{hosts}/outrider"))
        await store.open(new_session())
        await store.close()
