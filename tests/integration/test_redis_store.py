"""The Redis store against a real server."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from outrider import errors
from outrider.limits import CALLS_PER_PIPELINE_MAX, REDIS_CONNECTIONS_MAX, SOCKET_PATH_BYTES_MAX
from outrider.redis.address import RedisAddress
from outrider.redis.embedded import EmbeddedRedis
from outrider.sessions import redis_store
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.state import Session
from outrider.sessions.store import Counters
from tests.chaos.proxy import FaultProxy
from tests.support.made_certificates import Made
from tests.support.session_model import IDS, OWNERS, end_of, new_session, next_append
from tests.support.stack import until

pytestmark = pytest.mark.xdist_group("redis")
NO_COUNTS = Counters()


async def connected(url: str, **address: str) -> RedisStore:
    return await RedisStore.connect(RedisAddress(url=url, **address))


async def appended(store: RedisStore, session: Session, *token_ids: int) -> Any:
    session.decide(token_ids, NO_COUNTS)
    [answer] = await store.append([next_append(session)])
    return answer


async def test_sessions_expire(server: EmbeddedRedis, admin: redis.Redis) -> None:
    store = await connected(server.url, key_prefix="ttl:")
    store.lease_ms, store.session_ttl_ms, store.finished_ttl_ms = 1, 200, 100
    for session_id in IDS[:2]:
        await store.open(new_session(session_id))
    await store.finish(end_of(Session(new_session(IDS[1]))))
    await until(lambda: not admin.keys("ttl:*"))
    for session_id in IDS[:2]:
        with pytest.raises(errors.NotFound):
            await store.load(session_id)
    assert isinstance(await appended(store, Session(new_session()), 1), errors.DataLoss)
    assert not admin.keys("ttl:*")
    await store.close()


async def test_redis_counts_a_lease_down(server: EmbeddedRedis, admin: redis.Redis) -> None:
    """The lease is renewed for longer than its length. Redis stores no point in time."""
    store = await connected(server.url, key_prefix="lease:")
    store.lease_ms = 1000
    await store.hold_lease(OWNERS[0])
    await store.open(new_session())
    seen = await store.load(IDS[0])
    renew_until = time.monotonic() + 2.0
    while time.monotonic() < renew_until:
        await store.hold_lease(OWNERS[0])
        with pytest.raises(errors.Unavailable) as refused:
            await store.take_over(seen, OWNERS[1])
        assert 0 < refused.value.retry_after_ms <= 1000
    assert not [name for name in admin.hgetall(f"lease:session:{{{IDS[0]}}}") if b"ms" in name]
    await asyncio.sleep(refused.value.retry_after_ms / 1000 + 0.05)
    record = await store.take_over(seen, OWNERS[1])
    assert (record.epoch, record.owner) == (2, OWNERS[1])
    assert isinstance(await appended(store, Session(new_session()), 7), errors.StaleEpoch)
    await store.close()


async def test_a_full_server_renews_leases(store: RedisStore, admin: redis.Redis) -> None:
    """Otherwise others would take over the sessions of a running coordinator. A refused take-over
    is told the remaining time, although the server cannot store that it was attempted."""
    await store.hold_lease(OWNERS[0])
    await store.open(new_session())
    seen = await store.load(IDS[0])
    [lease] = admin.scan_iter(f"{store._key_prefix}lease:*")
    admin.pexpire(lease, 100_000)
    admin.config_set("maxmemory", 1)
    try:
        await store.hold_lease(OWNERS[0])
        assert 0 < admin.pttl(lease) < 100_000 - 10_000
        with pytest.raises(errors.Unavailable, match="has an owner"):
            await store.take_over(seen, OWNERS[1])
    finally:
        admin.config_set("maxmemory", 0)


async def test_a_full_server_stores_ends(store: RedisStore, admin: redis.Redis) -> None:
    """Otherwise sessions that nobody runs would keep the server full."""
    for session_id in IDS:
        await store.open(new_session(session_id))
    admin.config_set("maxmemory", 1)
    try:
        assert (await store.memory()).used > (await store.memory()).most == 1
        with pytest.raises(errors.StoreUnavailable, match="OOM"):
            await store.open(new_session("f" * 32))
        with pytest.raises(errors.StoreUnavailable, match="OOM"):
            await appended(store, Session(new_session(IDS[1])), 7)
        assert await store.finish(end_of(Session(new_session(IDS[0])))) == 3
        await store.release(IDS[1], 1, OWNERS[0])
        assert (await store.take_over(await store.load(IDS[1]), OWNERS[1])).epoch == 2
        lost = replace(end_of(Session(new_session(IDS[2]))), epoch=2, owner=OWNERS[1], length=None)
        await store.finish(lost)
    finally:
        admin.config_set("maxmemory", 0)
    for session_id in (IDS[0], IDS[2]):
        assert (await store.load(session_id)).finish_reason is not None


async def test_a_damaged_session_is_lost_alone(store: RedisStore, admin: redis.Redis) -> None:
    sessions = [Session(new_session(session_id)) for session_id in IDS]
    for session in sessions:
        await store.open(new_session(session.session_id))
        session.decide([7], NO_COUNTS)
    broken = f"{store._key_prefix}session:{{{IDS[1]}}}:tokens"
    admin.delete(broken)
    admin.lpush(broken, "something else")
    first, damaged, last = await store.append([next_append(s) for s in sessions])
    assert (first, last) == (4, 4)
    assert isinstance(damaged, errors.DataLoss)
    with pytest.raises(errors.DataLoss):
        await store.finish(end_of(sessions[1]))


async def test_many_sessions_are_opened_at_once(store: RedisStore, admin: redis.Redis) -> None:
    before = admin.info("stats")["total_connections_received"]
    ids = [f"{k:032x}" for k in range(20 * CALLS_PER_PIPELINE_MAX)]
    await store.open(new_session(ids[5], owner=OWNERS[1]))
    opening = [asyncio.ensure_future(store.open(new_session(session_id))) for session_id in ids]
    await asyncio.sleep(0)
    opening[0].cancel()
    answers = await asyncio.gather(*opening, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert isinstance(answers[5], errors.InvariantError)
    assert all(answer is None for i, answer in enumerate(answers) if i not in (0, 5))
    for session_id in (ids[1], ids[-1]):
        assert (await store.load(session_id)).owner == OWNERS[0]
    assert admin.info("stats")["total_connections_received"] - before <= REDIS_CONNECTIONS_MAX


LINES = [f"[-{number}.5, []]" for number in range(1, 1000)]


async def test_a_long_record_is_read_in_parts(
    store: RedisStore, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer of Redis is long. If another owner replaces the record between two parts, the
    result is of one owner only, and a take-over is refused."""
    monkeypatch.setattr("outrider.limits.RECORD_PART_BYTES", 100)
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
    with pytest.raises(errors.Unavailable, match="while it was read; try again"):
        await store.take_over(replaced, OWNERS[0])


async def test_a_dead_server_is_noticed_and_comes_back_with_its_sessions(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    with server:
        store = await connected(server.url)
        await store.open(new_session())
        session = Session(new_session())
        assert await appended(store, session, 1) == 4
        with redis.Redis.from_url(server.url, protocol=2) as admin:
            admin.execute_command("BGREWRITEAOF")
            await until(lambda: not admin.info("persistence")["aof_rewrite_in_progress"])
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(errors.StoreUnavailable):
            await appended(store, session, 2)
        server.stop()
        assert not server.running
        server.start()
        assert await store.append([next_append(session)]) == [4]
        assert (await store.load(IDS[0])).token_ids[:4] == session.tokens.since(0)[:4]
        await store.close()


def test_a_server_starts_while_a_thread_sets_environment_variables(tmp_path: Path) -> None:
    """A thread of Ray does so. `environ` moves during `execv`, which then fails with EFAULT."""
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
    """It accepts connections. The bound is above a second because of busy machines."""
    with EmbeddedRedis(tmp_path) as server:
        store = await connected(server.url)
        await store.open(new_session())
        os.kill(server.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(errors.StoreUnavailable):
                await store.load(IDS[0])
            assert time.monotonic() - start < 3
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert (await store.load(IDS[0])).prompt_length == 3
        await store.close()


def test_a_directory_has_one_server_for_its_user_alone(tmp_path: Path) -> None:
    """If the directory's path is long, the socket is in another directory."""
    long = tmp_path / ("d" * SOCKET_PATH_BYTES_MAX)
    for directory in (tmp_path, long):
        with EmbeddedRedis(directory) as server:
            with pytest.raises(errors.ConfigError, match="another Redis"):
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
    with pytest.raises(errors.ConfigError, match=r"redis\.log"):
        EmbeddedRedis(tmp_path).start()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.ConfigError, match="redis-server"):
        EmbeddedRedis(tmp_path / "data").start()


def test_the_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """A killed parent runs no code. The server still stops and releases its lock."""
    program = (
        "import sys, time; from outrider.redis.embedded import EmbeddedRedis;"
        "r = EmbeddedRedis(sys.argv[1]); r.start(); print(r.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    asyncio.run(until(lambda: not Path(f"/proc/{pid}").exists()))
    asyncio.run(until(lambda: starts(tmp_path)))


def starts(directory: Path) -> bool:
    try:
        with EmbeddedRedis(directory):
            return True
    except errors.ConfigError:
        return False


async def test_tls_is_checked_against_the_given_authority(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
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
        with pytest.raises(errors.ConfigError, match="cannot be reached"):
            await connected(url)
        with pytest.raises(errors.ConfigError, match="cannot be reached"):
            await connected(url.replace("localhost", "127.0.0.1"), ca_file=str(made.file))
