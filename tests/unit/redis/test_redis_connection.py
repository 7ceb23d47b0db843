"""Addresses, passwords and failures of Redis, as seen by a client."""

import asyncio
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest
from redis.asyncio import SSLConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection
from redis.exceptions import (
    BusyLoadingError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from outrider import limits
from outrider.errors import ConfigError, DataLoss, InvariantError, SettingError, StoreUnavailable
from outrider.limits import PASSWORD_BYTES_MAX, REDIS_TIMEOUT_MS
from outrider.redis import connection as redis_connection
from outrider.redis.address import (
    SENTINEL_VARIABLE,
    VARIABLE,
    RedisAddress,
    with_password,
    without_password,
)
from outrider.redis.connection import Call, Script, ScriptRunner
from outrider.sessions.redis_store import decode_record

GOOD = {"redis_version": "6.2.0", "maxmemory_policy": "noeviction", "role": "master"}


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@host/1", "redis://:***@host/1"),
        ("rediss://user:se:c@ret@host", "rediss://user:***@host"),
        ("redis://:se/cr#et@host", "redis://:***@host"),
        ("redis+sentinel://:s@c:r@a:1,b:2/name", "redis+sentinel://:***@a:1,b:2/name"),
        ("redis+sentinel://a:1,b:2/name/0", "redis+sentinel://a:1,b:2/name/0"),
    ],
)
def test_passwords_are_masked(url: str, masked: str) -> None:
    assert redis_connection.masked_url(url) == masked


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "redis://:secret@host:po/rt",
        "redis+sentinel://:secret@host/",
        "redis+sentinel://:secret@host:port/name",
        "redis+sentinel://:secret@host:1,,host:2/name",
        "redis+sentinel://:secret@host/name?db=1",
        "redis+sentinel://:sec/secret@host/name",
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="Redis URL") as refused:
        redis_connection.new_client(RedisAddress(url=url, key_prefix=""))
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_ca_file_needs_tls() -> None:
    with pytest.raises(ConfigError, match="rediss://"):
        redis_connection.new_client(address(ca_file="/ca.pem"))


def test_a_url_of_sentinels_with_tls() -> None:
    """All have the same authority. The password of Redis is not used for Sentinels."""
    url = "rediss+sentinel://a:1,[::1]:2,c/my%20name/3"
    passwords = {"username": "u", "password": "p/", "sentinel_password": "watch"}
    address = RedisAddress(url=url, ca_file="/ca", key_prefix="", **passwords)
    pool: Any = redis_connection.new_client(address).connection_pool
    sentinels = [one.connection_pool for one in pool.sentinel_manager.sentinels]
    given = [one.connection_kwargs for one in (pool, *sentinels)]
    hosts = [(one["host"], one["port"]) for one in given[1:]]
    assert hosts == [("a", 1), ("::1", 2), ("c", 26_379)]
    assert (pool.service_name, given[0]["db"], given[0]["username"]) == ("my name", 3, "u")
    assert [one["password"] for one in given] == ["p/", "watch", "watch", "watch"]
    assert [one["ssl_ca_certs"] for one in given] == ["/ca"] * 4
    assert issubclass(pool.connection_class, SentinelManagedSSLConnection)
    assert all(issubclass(one.connection_class, SSLConnection) for one in sentinels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"redis_version": "6.0.16"}, "6.0.16; 6.2 or newer"),
        ({"redis_version": "5"}, "6.2 or newer"),
        ({"maxmemory_policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru"),
        ({"role": "slave"}, "read-only replica"),
        ({"cluster_enabled": 1}, "cluster mode"),
        ({"redis_mode": "sentinel"}, "is a Sentinel; give redis\\+sentinel://"),
    ],
)
def test_servers_that_cannot_keep_sessions(change: dict[str, Any], message: str) -> None:
    for version in ("6.2.0", "10.1.2"):
        redis_connection.check_info("Redis", {**GOOD, "redis_version": version})
    with pytest.raises(ConfigError, match=message):
        redis_connection.check_info("Redis", {**GOOD, **change})


SCRIPT = "Error running script (call to f_0): @user_script:3: "


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (RedisTimeoutError("slow"), StoreUnavailable),
        (ConnectionResetError(), StoreUnavailable),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), StoreUnavailable),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), StoreUnavailable),
        (ResponseError(f"{SCRIPT}-OOM command not allowed"), StoreUnavailable),
        (
            ResponseError(f"{SCRIPT}The user executing the script can't run this command"),
            StoreUnavailable,
        ),
        (redis_connection.NotReplicated("0 of 1 replicas have received a write"), StoreUnavailable),
        (ResponseError("wrong number of arguments"), InvariantError),
        (ResponseError("WRONGTYPE Operation against a key"), DataLoss),
    ],
)
def test_what_an_error_of_redis_means(error: Exception, becomes: type[Exception]) -> None:
    assert isinstance(redis_connection.to_our_error(error), becomes)


@pytest.mark.parametrize(
    ("num_closed", "error"),
    [
        (1, ReadOnlyError("You can't write against a read only replica.")),
        (1, BusyLoadingError("Redis is loading the dataset in memory")),
        (1, MasterDownError("MASTER is down and replica-serve-stale-data is set to 'no'.")),
        (1, ResponseError(f"{SCRIPT}-READONLY You can't write against a read only replica.")),
        (1, ResponseError("NOREPLICAS Not enough good replicas to write.")),
        (1, ResponseError("UNBLOCKED force unblock from blocking operation")),
        (0, OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")),
        (0, ResponseError("WRONGTYPE Operation against a key")),
    ],
)
async def test_a_server_that_may_be_replaced_is_left(num_closed: int, error: RedisError) -> None:
    """Its connections are closed, so that the next call asks again where the primary is."""
    client = AsyncMock()
    with pytest.raises((StoreUnavailable, DataLoss)) as raised:
        async with redis_connection.calling(client):
            raise error
    assert raised.value.__cause__ is error
    closed = client.connection_pool.disconnect.await_args_list
    assert closed == [call(inuse_connections=False)] * num_closed
    assert redis_connection.may_be_replaced(error) == bool(num_closed)


async def test_a_pause_of_this_process_is_not_a_slow_server() -> None:
    loop, client = asyncio.get_running_loop(), AsyncMock()
    answer = loop.create_future()
    reading, writing = socket.socketpair()
    loop.add_reader(reading, lambda: answer.done() or answer.set_result(None))
    with reading, writing:
        async with redis_connection.calling(client):
            loop.call_soon(writing.send, b"x")
            loop.call_soon(time.sleep, 1.5 * REDIS_TIMEOUT_MS / 1000)
            await answer
        loop.remove_reader(reading)
    start = loop.time()
    with pytest.raises(StoreUnavailable):
        async with redis_connection.calling(client):
            await loop.create_future()
    assert loop.time() - start > 0.9 * REDIS_TIMEOUT_MS / 1000


async def test_no_call_gets_the_late_answer_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends early closes its connection, on which an answer may still come."""
    monkeypatch.setattr(limits, "REDIS_TIMEOUT_MS", 100)
    num_connections, late = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        number, num_runs = num_connections, 0
        with suppress(ConnectionError):
            while line := await reader.readline():
                if line.strip() == b"EVALSHA":
                    num_runs += 1
                    if number == 1 and num_runs == 2:
                        await late.wait()
                    writer.write(b":%d\r\n" % (10 * number + num_runs))
                elif line.strip() == b"CLIENT":
                    writer.write(b"+OK\r\n")
        writer.close()

    path = str(tmp_path / "redis.sock")
    async with await asyncio.start_unix_server(serve, path):
        client = redis_connection.new_client(RedisAddress(url=f"unix://{path}"))
        runner, script = ScriptRunner(client), Script("append")
        calls: list[Call] = [(("key",), (1,))] * 2
        with pytest.raises(StoreUnavailable):
            await runner.run_all(script, calls)
        late.set()
        assert await runner.run_all(script, calls) == [21, 22]
        await client.aclose()


@pytest.mark.parametrize("text", ["READONLY You can't write against a read only replica.", "OOM"])
async def test_a_part_of_a_script_that_cannot_be_served_fails_the_script(text: str) -> None:
    client = AsyncMock()
    client.pipeline = Mock()
    answer = [7, ResponseError("WRONGTYPE"), ResponseError(text)]
    client.pipeline.return_value.execute = AsyncMock(side_effect=lambda **_: [answer])
    runner = ScriptRunner(client)
    calls: list[Call] = [(("key",), (1,))]
    with pytest.raises(StoreUnavailable, match=text[:8]):
        await runner.run_all(Script("append"), calls)
    assert client.connection_pool.disconnect.await_count == text.startswith("READONLY")
    answer.pop()
    [[length, error]] = await runner.run_all(Script("append"), calls)
    assert length == 7
    assert isinstance(error, DataLoss)


@pytest.mark.parametrize("fields", [{}, {b"opened": b"[1]"}, {b"opened": b"\xff"}])
def test_a_damaged_record_is_data_loss(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(DataLoss, match="unknown form"):
        decode_record("0" * 32, fields, b"", b"", None)


SECRET = "p@ss/w:rd"  # noqa: S105 (of no server)


def address(url: str = "redis://h:1/2", **others: Any) -> RedisAddress:
    return RedisAddress(url=url, key_prefix="p:", **others)


@pytest.mark.parametrize(
    ("url", "left", "username", "password"),
    [
        ("redis://:p%40ss%2Fw%3Ard@h:1/2", "redis://h:1/2", "", SECRET),
        ("rediss://me:p%40ss%2Fw%3Ard@h:1/2?a=b", "rediss://h:1/2?a=b", "me", SECRET),
        ("redis://me@h:1", "redis://h:1", "me", ""),
        ("unix://me:x@/run/redis.sock", "unix:///run/redis.sock", "me", "x"),
        ("redis://u:x@h:1,i:2/0", "redis://h:1,i:2/0", "u", "x"),
    ],
)
def test_no_password_is_left_in_a_url(url: str, left: str, username: str, password: str) -> None:
    found, secrets = without_password(address(url))
    assert (found.url, found.username, found.password) == (left, username, "")
    assert secrets == ({"password": password} if password else {})
    assert found.asks_for_password == bool(password)


def test_passwords_in_other_places_are_refused(tmp_path: Path) -> None:
    for url in ("redis://h:1?password=x", "redis://h:1?sentinel_password=x"):
        with pytest.raises(SettingError, match=r"redis_url: has a password among its options"):
            without_password(address(url))
    with pytest.raises(SettingError, match="redis_password_file: cannot be given if"):
        without_password(address("redis://:x@h:1", password_file=str(tmp_path)))
    with pytest.raises(ConfigError, match="is not a URL"):
        without_password(address("redis://[h:1"))


def test_the_password_is_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "another")
    path = tmp_path / "password"
    of_file = address(password_file=str(path))
    path.write_text(SECRET + "\r\n")
    assert with_password(of_file).password == SECRET
    for text in (b"\n", b"\xff\xfe", b"x" * (PASSWORD_BYTES_MAX + 1)):
        path.write_bytes(text)
        with pytest.raises(SettingError, match=f"redis_password_file: .*{path}"):
            with_password(of_file)
    path.unlink()
    with pytest.raises(SettingError, match="No such file"):
        with_password(of_file)


def test_elsewhere_each_password_is_a_variable_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, others = "redis+sentinel://me:x@h:1,i:2/sessions", {"username": "you", "password": "two"}
    sealed, secrets = without_password(address(url, sentinel_password=SECRET, **others))
    assert (sealed.url, sealed.sentinel_password) == ("redis+sentinel://h:1,i:2/sessions", "")
    assert sealed.username == "me", "what the URL says wins"
    assert secrets == {"password": "x", "sentinel_password": SECRET}
    with pytest.raises(SettingError, match=f"passwords are not sent through Ray.*{VARIABLE}"):
        with_password(sealed)
    monkeypatch.setenv(VARIABLE, "x")
    with pytest.raises(SettingError, match=f"redis_sentinel_password: .*{SENTINEL_VARIABLE}"):
        with_password(sealed)
    monkeypatch.setenv(SENTINEL_VARIABLE, SECRET)
    found = with_password(sealed)
    assert (found.password, found.sentinel_password) == ("x", SECRET)
    open_one, _ = without_password(address())
    assert with_password(open_one) == open_one


def test_idle_connections_are_closed_without_suspending() -> None:
    """Otherwise another task could take a connection that is half closed."""

    class Connection:
        is_open = True

        async def disconnect(self, nowait: bool) -> None:
            self.is_open = not nowait

    idle: Any = [Connection(), Connection()]
    pool = redis_connection.Pool()
    pool._available_connections = idle
    with pytest.raises(StopIteration):
        pool.disconnect(inuse_connections=False).send(None)
    assert not any(each.is_open for each in idle)
