"""The Redis store against a real server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from session_model import IDS, OWNERS, digest, end_of, new_session, next_append
from twin_store import TwinStore

from outrider.errors import (
    ConfigError,
    DataLoss,
    NotFound,
    OutriderError,
    StaleEpoch,
    StoreUnavailable,
)
from outrider.limits import FINISHED_TTL_S, SOCKET_PATH_BYTES_MAX
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_store import RedisStore, encode_tokens
from outrider.sessions.state import Session
from outrider.sessions.store import (
    Append,
    CacheState,
    Counters,
    Finish,
    FinishReason,
    Lifetimes,
    SessionRecord,
)

pytestmark = pytest.mark.xdist_group("redis")

NO_COUNTS = Counters()


async def appended(store: RedisStore, session: Session, *token_ids: int) -> Any:
    session.decide(token_ids, NO_COUNTS)
    [answer] = await store.append([next_append(session)])
    return answer


LEASE_MS = 2_000
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
ids = st.sampled_from(IDS)
owners = st.sampled_from(OWNERS)
caches = st.builds(CacheState, st.sampled_from(["", "r1"]), st.integers(0, 2**40))
counts = st.builds(Counters, *[st.integers(0, 2**40)] * 3)


class StoreMachine(RuleBasedStateMachine):
    """Whatever is asked of it, in whatever order, Redis answers as the memory store does."""

    server: ClassVar[EmbeddedRedis]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.seen: list[SessionRecord] = []
        self.now_ms = 0.0
        self.model = TwinStore(lambda: self.now_ms, Lifetimes(LEASE_MS, 10**12, 10**12))
        self.prefix = f"{uuid.uuid4()}:"
        lifetimes = Lifetimes(10**9, 10**9, 10**9)
        self.store = self.run(
            RedisStore.connect(self.server.url, key_prefix=self.prefix, lifetimes=lifetimes)
        )
        self.admin = redis.Redis.from_url(self.server.url, protocol=2)

    def teardown(self) -> None:
        self.admin.close()
        self.run(self.store.close())
        self.runner.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def outcome(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self.run(coroutine)
        except OutriderError as error:
            return type(error)

    @rule(session_id=ids, owner=owners, prompt=st.sampled_from([(1,), (7, 2**32 - 1)]))
    def open(self, session_id: str, owner: str, prompt: tuple[int, ...]) -> None:
        new = new_session(session_id, owner, prompt)
        assert self.outcome(self.store.open(new)) == self.outcome(self.model.open(new))

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        appends = []
        for session_id in data.draw(st.lists(ids, max_size=3, unique=True)):
            s = self.model.snapshot().get(session_id)
            stored = s.record.token_ids if s is not None else ()
            if s is not None and s.rewrite:
                stored = data.draw(st.sampled_from([stored, s.pending, s.pending]))
            lengths = st.sampled_from([len(stored), len(stored), 0, max(len(stored) - 1, 0), 9])
            epochs = st.sampled_from([s.record.epoch] * 2 + [1, 2, 3] if s is not None else [1])
            new = data.draw(tokens)
            expected = data.draw(lengths)
            appends.append(
                Append(
                    session_id, data.draw(epochs), data.draw(owners), expected, new,
                    digest((*stored[:expected], *new)), data.draw(caches), data.draw(caches),
                    data.draw(counts), data.draw(st.sampled_from(["", '{"é\u2028": 1}\n'])),
                    data.draw(st.booleans()),
                )
            )  # fmt: skip
        found, expected = (
            [
                type(a) if isinstance(a, OutriderError) else a
                for a in self.run(store.append(appends))
            ]
            for store in (self.store, self.model)
        )
        assert found == expected

    @rule(owner=owners)
    def hold_lease(self, owner: str) -> None:
        found = self.run(self.store.hold_lease(owner))
        assert sorted(found) == self.run(self.model.hold_lease(owner))

    @rule(owner=owners)
    def end_lease(self, owner: str) -> None:
        self.run(self.store.end_lease(owner))
        self.run(self.model.end_lease(owner))

    @rule(session_id=ids, epoch=st.integers(1, 3), owner=owners)
    def release(self, session_id: str, epoch: int, owner: str) -> None:
        found = self.outcome(self.store.release(session_id, epoch, owner))
        assert found == self.outcome(self.model.release(session_id, epoch, owner))

    @rule(session_id=ids)
    def look(self, session_id: str) -> None:
        """What is seen now may be taken over later."""
        found = self.outcome(self.store.load(session_id))
        if isinstance(found, SessionRecord):
            self.seen.append(found)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), owner=owners)
    def take_over(self, data: st.DataObject, owner: str) -> None:
        seen = data.draw(st.sampled_from(self.seen[-3:]))
        found = self.outcome(self.store.take_over(seen, owner))
        assert found == self.outcome(self.model.take_over(seen, owner))
        if isinstance(found, SessionRecord):
            self.seen.append(found)

    @rule(
        finish=st.builds(
            Finish,
            ids, st.integers(1, 3), owners, st.none() | st.integers(1, 9),
            st.sampled_from(FinishReason), counts,
        )
    )  # fmt: skip
    def finish(self, finish: Finish) -> None:
        """Beside the model's, the rules that hold of every end that is recorded."""
        before = self.outcome(self.store.load(finish.session_id))
        found = self.outcome(self.store.finish(finish))
        assert found == self.outcome(self.model.finish(finish))
        after = self.outcome(self.store.load(finish.session_id))
        if found is StaleEpoch:
            assert after == before
        elif isinstance(before, SessionRecord) and isinstance(after, SessionRecord):
            assert (after.epoch, after.owner) == (finish.epoch, finish.owner)
            assert before.epoch < after.epoch or before.owner == after.owner
            if after.finish_reason is not None and after != before:
                assert finish.length in (None, len(after.token_ids))

    @rule()
    def leases_run_out(self) -> None:
        self.now_ms += LEASE_MS
        for key in self.admin.keys(f"{self.prefix}lease:*"):
            self.admin.delete(key)

    @rule(session_id=ids, left=st.integers(0, 3))
    def tail_is_torn_off(self, session_id: str, left: int) -> None:
        kept = self.model.snapshot()
        found = kept.get(session_id)
        if found is None or found.rewrite:
            return
        self.leases_run_out()  # As `restore` does.
        record = replace(found.record, token_ids=found.record.token_ids[:left])
        self.model.restore({**kept, session_id: replace(found, record=record)})
        key = f"{self.prefix}session:{{{session_id}}}"
        start = int(self.admin.hget(key, "tokens_start"))
        before = self.admin.get(f"{key}:tokens") or b""
        torn = before[:start] + encode_tokens(record.token_ids)
        self.admin.set(f"{key}:tokens", torn, keepttl=True)

    @invariant()
    def loads_are_equal(self) -> None:
        for session_id in IDS:
            expected = self.outcome(self.model.load(session_id))
            assert self.outcome(self.store.load(session_id)) == expected

    @rule()
    def scripts_are_flushed(self) -> None:
        self.admin.script_flush()

    @invariant()
    def every_key_expires(self) -> None:
        for key in self.admin.keys(f"{self.prefix}*"):
            assert self.admin.pttl(key) > 0


def test_redis_answers_as_the_memory_store(server: EmbeddedRedis) -> None:
    StoreMachine.server = server
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


async def test_tokens_lie_in_redis_as_documented(store: RedisStore, admin: redis.Redis) -> None:
    await store.open(new_session())
    session = Session(new_session())
    session.decide([7], NO_COUNTS, logprobs=['{"a": 1}'])
    await store.append([next_append(session)])
    key = f"{store._key_prefix}session:{{{IDS[0]}}}"
    assert admin.get(f"{key}:tokens") == encode_tokens(session.tokens.ids)
    assert admin.get(f"{key}:logprobs") == b'{"a": 1}\n'
    assert admin.hget(key, "epoch") == b"1"
    assert admin.hget(key, "prefix_digest") == str(session.tokens.digest()).encode()


async def test_sessions_expire(server: EmbeddedRedis, admin: redis.Redis) -> None:
    """An orphan and a finished session are gone after their times; its owner hears of data loss."""
    lifetimes = Lifetimes(1, session_ttl_ms=200, finished_ttl_ms=100)
    store = await RedisStore.connect(server.url, key_prefix="ttl:", lifetimes=lifetimes)
    for session_id in IDS[:2]:
        await store.open(new_session(session_id))
    await store.finish(end_of(Session(new_session(IDS[1]))))
    wait_until(lambda: not admin.keys("ttl:*"), 10)
    for session_id in IDS[:2]:
        with pytest.raises(NotFound):
            await store.load(session_id)
    assert isinstance(await appended(store, Session(new_session()), 1), DataLoss)
    assert not admin.keys("ttl:*")
    await store.close()


async def test_a_session_that_lost_tokens_is_healed_before_it_is_finished_and_expires(
    store: RedisStore, admin: redis.Redis
) -> None:
    await store.open(new_session())
    session = Session(new_session())
    session.decide([7], NO_COUNTS, logprobs=["1"])
    key = f"{store._key_prefix}session:{{{IDS[0]}}}"
    admin.delete(f"{key}:tokens", f"{key}:logprobs")
    end = end_of(session)
    assert await store.finish(end) == 0
    session.acknowledge(0)
    assert await store.append([next_append(session)]) == [4]
    assert (await store.load(IDS[0])).finish_reason is None
    assert await store.finish(end) == 4
    record = await store.load(IDS[0])
    assert record.finish_reason is FinishReason.STOP
    assert (record.token_ids, record.logprobs) == (tuple(session.tokens.ids), "1\n")
    for name in (key, f"{key}:tokens", f"{key}:logprobs"):
        assert 0 < admin.pttl(name) <= FINISHED_TTL_S * 1000


async def test_a_server_that_evicts_is_refused(server: EmbeddedRedis, admin: redis.Redis) -> None:
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigError, match="maxmemory-policy allkeys-lru") as refused:
            await RedisStore.connect(server.url)
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("url", ["redis://:hush@127.0.0.1:1/0", "unix:///nowhere/redis.sock"])
async def test_an_unreachable_server_is_one_clear_line(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be reached") as refused:
        await RedisStore.connect(url)
    message = str(refused.value)
    assert "\n" not in message
    assert "hush" not in message
    assert url.replace("hush", "***") in message
    assert "--redis-url" in message


async def test_passwords(server: EmbeddedRedis, admin: redis.Redis) -> None:
    admin.config_set("requirepass", "hush")
    try:
        for password in ("", "wrong"):
            with pytest.raises(ConfigError) as refused:
                await RedisStore.connect(server.url, password=password)
            assert "wrong" not in str(refused.value)
        for store in (
            await RedisStore.connect(server.url, password="hu" + "sh"),
            await RedisStore.connect(f"{server.url}?password=hush"),
        ):
            with pytest.raises(NotFound):
                await store.load("f" * 32)
            await store.close()
    finally:
        admin.config_set("requirepass", "")


async def test_a_dead_server_is_noticed_and_comes_back_with_its_sessions(tmp_path: Path) -> None:
    """SIGKILL: what was stored a while ago is there again after a restart."""
    server = EmbeddedRedis(tmp_path)
    with server:
        store = await RedisStore.connect(server.url)
        await store.open(new_session())
        session = Session(new_session())
        assert await appended(store, session, 1) == 4
        with redis.Redis.from_url(server.url, protocol=2) as admin:
            admin.execute_command("BGREWRITEAOF")
            wait_until(lambda: not admin.info("persistence")["aof_rewrite_in_progress"], 10)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            await appended(store, session, 2)
        server.stop()
        assert not server.running
        server.start()
        [answer] = await store.append([next_append(session)])
        assert answer == 4
        assert (await store.load(IDS[0])).token_ids[:4] == session.tokens.since(0)[:4]
        await store.close()


async def test_a_hanging_server_is_noticed_within_a_second(tmp_path: Path) -> None:
    """A stopped process accepts connections but never answers. The bound is wider than a second
    only because the machine may be busy."""
    with EmbeddedRedis(tmp_path) as server:
        store = await RedisStore.connect(server.url)
        await store.open(new_session())
        os.kill(server.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await store.load(IDS[0])
            assert time.monotonic() - start < 3
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert (await store.load(IDS[0])).prompt_length == 3
        await store.close()


def test_only_one_server_keeps_its_data_in_a_directory(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with pytest.raises(ConfigError, match="another Redis"):
            EmbeddedRedis(tmp_path).start()
        assert server.running
    assert not server.running
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    EmbeddedRedis(tmp_path).stop()


def test_a_long_directory_has_its_socket_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * SOCKET_PATH_BYTES_MAX)
    server = EmbeddedRedis(long)
    for _ in range(2):
        with server, redis.Redis.from_url(server.url, protocol=2) as client:
            socket = Path(server.url.removeprefix("unix://"))
            assert socket.parent.stat().st_mode & 0o777 == 0o700
            assert client.ping()
            client.set("a", 1)
        assert not socket.parent.exists()
    assert EmbeddedRedis(Path("/a")).url == "unix:///a/redis.sock"
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter directory"):
        EmbeddedRedis(long)


def test_without_a_server_to_start_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="redis-server"):
        EmbeddedRedis(tmp_path / "data").start()


def test_a_server_that_does_not_start_says_where_its_log_is(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_text("this is no append-only file")
    with pytest.raises(ConfigError, match=r"redis\.log"):
        EmbeddedRedis(tmp_path).start()


def test_the_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """Nothing of the parent runs when it is killed; the server still stops and frees its lock."""
    program = (
        "import sys, time; from outrider.sessions.embedded import EmbeddedRedis;"
        "r = EmbeddedRedis(sys.argv[1]); r.start(); print(r.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10)
    wait_until(lambda: starts(tmp_path), 10)


def starts(directory: Path) -> bool:
    try:
        with EmbeddedRedis(directory):
            return True
    except ConfigError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
