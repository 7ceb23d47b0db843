"""The Redis store against a real server."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
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
from made_certificates import Made
from session_model import IDS, OWNERS, digest, end_of, new_session, next_append
from twin_store import TwinStore

from outrider.errors import (
    ConfigError,
    DataLoss,
    InvariantError,
    NotFound,
    OutriderError,
    StaleEpoch,
    StoreUnavailable,
    Unavailable,
)
from outrider.limits import CALLS_PER_PIPELINE_MAX, REDIS_CONNECTIONS_MAX, SOCKET_PATH_BYTES_MAX
from outrider.sessions import redis_store
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_store import RedisStore, encode_tokens
from outrider.sessions.state import Session
from outrider.sessions.store import (
    Append,
    CacheState,
    Counters,
    Finish,
    FinishReason,
    SessionRecord,
)
from tests.chaos.proxy import FaultProxy

pytestmark = pytest.mark.xdist_group("redis")
NO_COUNTS = Counters()


async def connected(url: str, **address: str) -> RedisStore:
    return await RedisStore.connect(RedisAddress(url=url, **address))


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
    """For any operations in any order, Redis answers as the in-memory twin."""

    server: ClassVar[EmbeddedRedis]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.seen: list[SessionRecord] = []
        self.now_ms = 0.0
        self.model = TwinStore(lambda: self.now_ms)
        self.model.lease_ms, self.model.session_ttl_ms = LEASE_MS, 10**12
        self.model.finished_ttl_ms = 10**12
        self.prefix = f"{uuid.uuid4()}:"
        self.store = self.run(connected(self.server.url, key_prefix=self.prefix))
        self.store.lease_ms = self.store.session_ttl_ms = self.store.finished_ttl_ms = 10**9
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

    def writer(self, data: st.DataObject, session_id: str) -> tuple[int, str]:
        """Epoch and owner of a write, mostly admissible ones."""
        found = self.model.snapshot().get(session_id)
        kept = [] if found is None else [found.record] * 5
        epochs = [*(one.epoch for one in kept), 1, 2, 3]
        names = [*(one.owner for one in kept), *OWNERS]
        return data.draw(st.sampled_from(epochs)), data.draw(st.sampled_from(names))

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
            epoch, owner = self.writer(data, session_id)
            new = data.draw(tokens)
            expected = data.draw(lengths)
            appends.append(
                Append(
                    session_id, epoch, owner, expected, new,
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

    @rule(key=ids, value=st.sampled_from(["", "a", "b"]), replaces=st.sampled_from(["", "a"]))
    def claim_key(self, key: str, value: str, replaces: str) -> None:
        found = self.run(self.store.claim_key(key, value, replaces))
        assert found == self.run(self.model.claim_key(key, value, replaces))
        assert not found or self.admin.pttl(f"{self.prefix}key:{{{key}}}") > 0

    @rule(owner=owners)
    def hold_lease(self, owner: str) -> None:
        assert self.run(self.store.hold_lease(owner)) == self.run(self.model.hold_lease(owner))

    @rule(owner=owners)
    def end_lease(self, owner: str) -> None:
        self.run(self.store.end_lease(owner))
        self.run(self.model.end_lease(owner))

    @rule(session_id=ids, data=st.data())
    def release(self, session_id: str, data: st.DataObject) -> None:
        epoch, owner = self.writer(data, session_id)
        found = self.outcome(self.store.release(session_id, epoch, owner))
        assert found == self.outcome(self.model.release(session_id, epoch, owner))

    @rule(session_id=ids)
    def look(self, session_id: str) -> None:
        """Records that may be taken over later."""
        found = self.outcome(self.store.load(session_id))
        if isinstance(found, SessionRecord):
            self.seen.append(found)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), owner=owners, cancels=st.booleans())
    def take_over(self, data: st.DataObject, owner: str, cancels: bool) -> None:
        seen = data.draw(st.sampled_from(self.seen[-3:]))
        found, expected = (
            self.outcome(store.take_over(seen, owner, cancels=cancels))
            for store in (self.store, self.model)
        )
        assert found == expected
        if isinstance(found, SessionRecord):
            self.seen.append(found)

    @rule(session_id=ids, data=st.data(), reason=st.sampled_from(FinishReason), counters=counts)
    def finish(
        self, session_id: str, data: st.DataObject, reason: FinishReason, counters: Counters
    ) -> None:
        """Also checks the rules for every recorded end."""
        epoch, owner = self.writer(data, session_id)
        stored = self.model.snapshot().get(session_id)
        lengths = [None, 1, 9] if stored is None else [None, stored.length, stored.length + 1]
        length = data.draw(st.sampled_from(lengths))
        finish = Finish(session_id, epoch, owner, length, reason, counters)
        before = self.outcome(self.store.load(session_id))
        found = self.outcome(self.store.finish(finish))
        assert found == self.outcome(self.model.finish(finish))
        after = self.outcome(self.store.load(session_id))
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


async def test_sessions_expire(server: EmbeddedRedis, admin: redis.Redis) -> None:
    """An orphaned and a finished session are gone after their times; the owner gets data loss."""
    store = await connected(server.url, key_prefix="ttl:")
    store.lease_ms, store.session_ttl_ms, store.finished_ttl_ms = 1, 200, 100
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


async def test_redis_counts_a_lease_down(server: EmbeddedRedis, admin: redis.Redis) -> None:
    """Renewed for longer than it lasts, then left alone until the store reports its end. No point
    in time is stored."""
    store = await connected(server.url, key_prefix="lease:")
    store.lease_ms = 300
    await store.hold_lease(OWNERS[0])
    await store.open(new_session())
    seen = await store.load(IDS[0])
    renew_until = time.monotonic() + 0.6
    while time.monotonic() < renew_until:
        await store.hold_lease(OWNERS[0])
        with pytest.raises(Unavailable) as refused:
            await store.take_over(seen, OWNERS[1])
        assert 0 < refused.value.retry_after_ms <= 300
    assert not [name for name in admin.hgetall(f"lease:session:{{{IDS[0]}}}") if b"ms" in name]
    await asyncio.sleep(refused.value.retry_after_ms / 1000 + 0.05)
    record = await store.take_over(seen, OWNERS[1])
    assert (record.epoch, record.owner) == (2, OWNERS[1])
    assert isinstance(await appended(store, Session(new_session()), 7), StaleEpoch)
    await store.close()


async def test_a_full_server_renews_leases(store: RedisStore, admin: redis.Redis) -> None:
    """Otherwise others would take over the sessions of a running coordinator. It also reports the
    remaining time, though it cannot tell the owner that another one asked."""
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


async def test_a_damaged_session_is_lost_alone(store: RedisStore, admin: redis.Redis) -> None:
    """Other sessions are appended to in the same call."""
    sessions = [Session(new_session(session_id)) for session_id in IDS]
    for session in sessions:
        await store.open(new_session(session.session_id))
        session.decide([7], NO_COUNTS)
    broken = f"{store._key_prefix}session:{{{IDS[1]}}}:tokens"
    admin.delete(broken)
    admin.lpush(broken, "something else")
    first, damaged, last = await store.append([next_append(s) for s in sessions])
    assert (first, last) == (4, 4)
    assert isinstance(damaged, DataLoss)
    with pytest.raises(DataLoss):
        await store.finish(end_of(sessions[1]))


async def test_many_sessions_are_opened_at_once(store: RedisStore, admin: redis.Redis) -> None:
    """They share round trips; a refused one, and cancelled callers, do not matter."""
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


LINES = [f"[-{number}.5, []]" for number in range(1, 1000)]


async def test_a_long_record_is_read_in_parts(
    store: RedisStore, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer of Redis is long; the record is the same, read or taken over. If another owner
    replaces it between two parts, the result is of one owner alone, and a take-over is refused."""
    monkeypatch.setattr("outrider.sessions.redis_store.RECORD_PART_BYTES", 100)
    await store.open(new_session())
    session = Session(new_session())
    session.decide(range(5, 1004), NO_COUNTS, logprobs=LINES)
    assert await store.append([next_append(session)]) == [session.length]
    sent = dict(admin.info("commandstats"))
    loaded = await store.load(IDS[0])
    for record in (loaded, await store.take_over(loaded, OWNERS[0])):
        assert record.token_ids == tuple(session.tokens.ids)
        assert record.logprobs == "".join(f"{line}\n" for line in LINES)
    told = admin.info("commandstats")
    read = told["cmdstat_getrange"]["calls"] - sent.get("cmdstat_getrange", {"calls": 0})["calls"]
    assert read >= 2 * (4 * session.length + sum(len(line) + 1 for line in LINES)) // 100
    assert told.get("cmdstat_get") == sent.get("cmdstat_get")

    run, num_parts = store._scripts.run, 0
    others = "".join(f"{line}\n" for line in LINES).replace(".5", ".6")

    async def run_and_replace(script: Any, call: Any) -> Any:
        nonlocal num_parts
        answer = await run(script, call)
        num_parts += script is redis_store._READ_PART
        if num_parts == 3:
            key = f"{store._key_prefix}session:{{{IDS[0]}}}"
            await store._client.hincrby(key, "epoch", 1)
            await store._client.set(f"{key}:logprobs", others)
        return answer

    monkeypatch.setattr(store._scripts, "run", run_and_replace)
    replaced = await store.load(IDS[0])
    assert replaced.token_ids == tuple(session.tokens.ids)
    assert (replaced.logprobs, replaced.epoch) == (others, record.epoch + 1)
    num_parts = 0
    with pytest.raises(Unavailable, match="taken over meanwhile"):
        await store.take_over(replaced, OWNERS[0])


async def test_an_unreachable_server_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot be reached.*--redis-url") as refused:
        await connected("redis://:hush@127.0.0.1:1/0")
    message = str(refused.value)
    assert "redis://:***@127.0.0.1:1/0" in message
    assert "hush" not in message
    assert "\n" not in message


async def test_passwords(server: EmbeddedRedis, admin: redis.Redis) -> None:
    admin.config_set("requirepass", "hush")
    try:
        for password in ("", "wrong"):
            with pytest.raises(ConfigError) as refused:
                await connected(server.url, password=password)
            assert "wrong" not in str(refused.value)
        await (await connected(server.url, password="hu" + "sh")).close()
        await (await connected(f"{server.url}?password=hush")).close()
    finally:
        admin.config_set("requirepass", "")


async def test_a_dead_server_is_noticed_and_comes_back_with_its_sessions(tmp_path: Path) -> None:
    """After SIGKILL and a restart, earlier data are there again."""
    server = EmbeddedRedis(tmp_path)
    with server:
        store = await connected(server.url)
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
        assert await store.append([next_append(session)]) == [4]
        assert (await store.load(IDS[0])).token_ids[:4] == session.tokens.since(0)[:4]
        await store.close()


def test_a_server_starts_while_a_thread_sets_environment_variables(tmp_path: Path) -> None:
    """As Ray does in the launcher: `environ` moves during `execv`, which then fails with EFAULT."""
    server, stop = EmbeddedRedis(tmp_path), threading.Event()

    def set_variables() -> None:
        names = [f"OUTRIDER_TEST_{number}" for number in range(8_000)]
        while not stop.is_set():
            os.environ.update(dict.fromkeys(names, "value"))
            for name in names:
                del os.environ[name]

    with ThreadPoolExecutor(1) as threads:
        threads.submit(set_variables)
        try:
            for _ in range(12):
                with server:
                    pass
        finally:
            stop.set()


async def test_a_hanging_server_is_noticed_within_a_second(tmp_path: Path) -> None:
    """A stopped process accepts connections but never answers. The bound is above a second only for
    busy machines."""
    with EmbeddedRedis(tmp_path) as server:
        store = await connected(server.url)
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


def test_a_directory_has_one_server_for_its_user_alone(tmp_path: Path) -> None:
    """With a long path its socket is elsewhere."""
    long = tmp_path / ("d" * SOCKET_PATH_BYTES_MAX)
    for directory in (tmp_path, long):
        with EmbeddedRedis(directory) as server:
            with pytest.raises(ConfigError, match="another Redis"):
                EmbeddedRedis(directory).start()
            socket = Path(server.url.removeprefix("unix://"))
            for private in (directory, socket.parent):
                assert private.stat().st_mode & 0o777 == 0o700
            with redis.Redis.from_url(server.url, protocol=2) as client:
                assert client.ping()
        assert not server.running
    assert not socket.parent.exists()


def test_a_server_that_cannot_be_started_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "appendonly.aof").write_text("this is no append-only file")
    with pytest.raises(ConfigError, match=r"redis\.log"):
        EmbeddedRedis(tmp_path).start()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="redis-server"):
        EmbeddedRedis(tmp_path / "data").start()


def test_the_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """No code of the killed parent runs; the server still stops and frees its lock."""
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


async def test_tls_is_checked_against_the_given_authority(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    """With a TLS proxy before the server: its authority is accepted, others are refused."""
    made = Made(tmp_path, "localhost", "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.file, made.key_file)
    path = server.url.removeprefix("unix://")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await FaultProxy()._join(path, path, reader, writer, b"")
        writer.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as proxy:
        url = f"rediss://localhost:{proxy.sockets[0].getsockname()[1]}/0"
        store = await connected(url, ca_file=str(made.file))
        await store.open(new_session("e" * 32))
        await store.close()
        with pytest.raises(ConfigError, match="cannot be reached"):
            await connected(url)
        with pytest.raises(ConfigError, match="cannot be reached"):
            await connected(url.replace("localhost", "127.0.0.1"), ca_file=str(made.file))
