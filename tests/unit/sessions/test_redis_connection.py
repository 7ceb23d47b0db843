from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

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
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from outrider.errors import ConfigError, DataLoss, InvariantError, StoreUnavailable
from outrider.limits import REDIS_TIMEOUT_MS
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_connection import (
    NotReplicated,
    answering,
    calling,
    check_info,
    masked_url,
    new_client,
    raise_if_replaced,
    to_our_error,
)
from outrider.sessions.redis_store import decode_record

GOOD = {"redis_version": "6.2.0", "maxmemory_policy": "noeviction", "role": "master"}


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@host/1", "redis://:***@host/1"),
        ("rediss://user:se:c@ret@host", "rediss://user:***@host"),
        ("redis://:se/cr#et@host", "redis://:***@host"),
        ("unix:///a/b.sock?db=1&password=secret", "unix:///a/b.sock?db=1&password=***"),
        ("redis+sentinel://:s@c:r@a:1,b:2/name", "redis+sentinel://:***@a:1,b:2/name"),
        ("redis+sentinel://a:1,b:2/name/0", "redis+sentinel://a:1,b:2/name/0"),
    ],
)
def test_passwords_are_masked(url: str, masked: str) -> None:
    assert masked_url(url) == masked


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://host",
        "redis://:secret@host:po/rt",
        "redis+sentinel://:secret@host",
        "redis+sentinel://:secret@host/",
        "redis+sentinel://:secret@host:port/name",
        "redis+sentinel://:secret@host:1,,host:2/name",
        "redis+sentinel://:secret@host/name/first",
        "redis+sentinel://:secret@host/name?db=1",
        "redis+sentinel://:sec/secret@host/name",
        "redis+sentinel:///name",
        "http+sentinel://host/name",
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="Redis URL") as refused:
        new_client(RedisAddress(url=url, key_prefix=""))
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_ca_file_needs_tls() -> None:
    with pytest.raises(ConfigError, match="rediss://"):
        new_client(RedisAddress(url="redis://localhost", ca_file="/ca.pem", key_prefix=""))


@pytest.mark.parametrize(
    ("url", "sentinels", "expected"),
    [
        (
            "rediss+sentinel://u:p%2F@a:1,[::1]:2,c/my%20name/3",
            [("a", 1), ("::1", 2), ("c", 26_379)],
            ("my name", 3, "u", "p/"),
        ),
        ("redis+sentinel://a/name", [("a", 26_379)], ("name", 0, None, None)),
    ],
)
def test_a_url_of_sentinels(url: str, sentinels: list[tuple[str, int]], expected: Any) -> None:
    pool: Any = new_client(RedisAddress(url=url, key_prefix="")).connection_pool
    found = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in found] == sentinels
    given = pool.connection_kwargs
    told = (given["db"], given.get("username"), given.get("password"))
    assert (pool.service_name, *told) == expected


def test_tls_reaches_servers_and_sentinels() -> None:
    """With the same authority; the password in the URL wins, and is not the Sentinels'."""
    url = "rediss+sentinel://:inner@a:1,b:2/name/3"
    passwords = {"password": "outer", "sentinel_password": "watch"}
    address = RedisAddress(url=url, ca_file="/ca", key_prefix="", **passwords)
    pool: Any = new_client(address).connection_pool
    assert issubclass(pool.connection_class, SentinelManagedSSLConnection)
    found = [pool, *(one.connection_pool for one in pool.sentinel_manager.sentinels)]
    assert [one.connection_kwargs["ssl_ca_certs"] for one in found] == ["/ca"] * 3
    assert issubclass(found[1].connection_class, SSLConnection)
    assert [one.connection_kwargs["password"] for one in found] == ["inner", "watch", "watch"]
    assert pool.connection_kwargs["db"] == 3


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
        check_info("Redis", {**GOOD, "redis_version": version})
    with pytest.raises(ConfigError, match=message):
        check_info("Redis", {**GOOD, **change})


PASSING = (
    RedisConnectionError("refused"),
    RedisTimeoutError("slow"),
    ConnectionResetError(),
    ReadOnlyError("You can't write against a read only replica."),
    OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    ResponseError("MISCONF Redis is configured to save RDB snapshots"),
    ResponseError("Error running script: @user_script:3: -OOM command not allowed"),
    ResponseError(
        "Error running script: @user_script: 1: The user executing the script can't run this "
        "command or subcommand"
    ),
    ResponseError("UNBLOCKED force unblock from blocking operation"),
    NotReplicated("0 of 1 replicas have a write after 500 ms"),
)


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        *((one, StoreUnavailable) for one in PASSING),
        (ResponseError("wrong number of arguments"), InvariantError),
        (ResponseError("WRONGTYPE Operation against a key"), DataLoss),
    ],
)
def test_what_an_error_of_redis_means(error: Exception, becomes: type[Exception]) -> None:
    assert isinstance(to_our_error(error), becomes)


class Idle:
    """A client with connections that nobody uses now."""

    def __init__(self) -> None:
        self.connection_pool: Any = self
        self.num_closed = 0

    async def disconnect(self, inuse_connections: bool) -> None:
        assert not inuse_connections
        self.num_closed += 1


SCRIPT = "Error running script (call to f_0): @user_script:3: "
LEAVING = [
    ReadOnlyError("You can't write against a read only replica."),
    BusyLoadingError("Redis is loading the dataset in memory"),
    MasterDownError("Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
    ResponseError(f"{SCRIPT}-READONLY You can't write against a read only replica."),
    ResponseError(f"{SCRIPT}-LOADING Redis is loading the dataset in memory"),
    ResponseError(f"{SCRIPT}-MASTERDOWN Link with MASTER is down"),
    ResponseError("NOREPLICAS Not enough good replicas to write."),
    ResponseError("UNBLOCKED force unblock from blocking operation"),
]
STAYING = [
    OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    ResponseError("MISCONF Redis is configured to save RDB snapshots"),
    ResponseError("WRONGTYPE Operation against a key"),
]


@pytest.mark.parametrize(
    ("error", "num_closed"), [(one, 1) for one in LEAVING] + [(one, 0) for one in STAYING]
)
async def test_a_server_that_may_be_replaced_is_left(error: RedisError, num_closed: int) -> None:
    """Its connections are closed, so that the next call asks again where the primary is; not those
    of one that is only full or asked something wrong. An error among the answers of a script's
    calls counts as one that is raised."""
    client: Any = Idle()
    with pytest.raises(type(error)):
        async with calling(client):
            raise error
    assert client.num_closed == num_closed
    if num_closed:
        with pytest.raises(type(error)):
            raise_if_replaced([b"OK", error])
    else:
        raise_if_replaced([b"OK", error])


async def test_a_pause_of_this_process_is_not_a_slow_server() -> None:
    """What came while nothing ran here is looked at; what never comes is given up in time."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    reading, writing = socket.socketpair()
    loop.add_reader(reading, lambda: answer.done() or answer.set_result(None))
    with reading, writing:
        async with answering():
            loop.call_soon(writing.send, b"x")
            loop.call_soon(time.sleep, 1.5 * REDIS_TIMEOUT_MS / 1000)
            await answer
        loop.remove_reader(reading)
    start = loop.time()
    with pytest.raises(TimeoutError):
        async with answering():
            await loop.create_future()
    assert loop.time() - start > 0.9 * REDIS_TIMEOUT_MS / 1000


@pytest.mark.parametrize("fields", [{}, {b"opened": b"[1]"}, {b"opened": b"\xff"}])
def test_a_damaged_record_is_data_loss(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(DataLoss, match="unknown form"):
        decode_record("0" * 32, fields, b"", b"")
