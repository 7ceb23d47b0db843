"""Redis in memory beside a real server: the same commands, in scripts and alone, have the same
answers, and leave the same keys. Times may differ by what a call takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, given, settings

from outrider.sessions.embedded import EmbeddedRedis
from tests.simulation.redis_data import RedisData, ReplyError, Status
from tests.simulation.redis_host import packed
from tests.simulation.redis_scripting import Scripts

pytestmark = pytest.mark.xdist_group("redis")

KEYS = ("k", "l")
TOLERANCE_MS = 5_000.0
"""A call takes less, also on a busy machine; times that are compared are longer."""
READS = {b"string": "GET", b"hash": "HGETALL", b"set": "SMEMBERS"}
run_each = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Both:
    """A real server, and the one in memory, whose clock is set by the other's before each call."""

    def __init__(self, client: redis.Redis) -> None:
        self.now_ms = 0.0
        self.data = RedisData(lambda: self.now_ms)
        self.scripts = Scripts(self.data)
        self._connection: Any = client.connection

    def empty(self) -> None:
        self.both("FLUSHALL")

    def real(self, *command: Any) -> Any:
        """Its answer, as it comes; an error is one, too."""
        self._connection.send_command(*command)
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            return error

    def memory(self, *command: Any) -> Any:
        words = packed(command)
        try:
            if words[0] == b"EVALSHA":
                number = int(words[2])
                reply = self.scripts.run(words[1], words[3 : 3 + number], words[3 + number :])
            else:
                reply = self.data.run(words)
        except ReplyError as error:
            return self._connection._parser.parse_error(str(error))
        return bytes(reply) if isinstance(reply, Status) else reply

    def both(self, *command: Any) -> Any:
        """The real answer, which must be the other's, too."""
        seconds, microseconds = self.real("TIME")
        self.now_ms = int(seconds) * 1e3 + int(microseconds) / 1e3
        expected, found = self.real(*command), self.memory(*command)
        if command[0] == "SMEMBERS" and isinstance(expected, list):
            expected, found = sorted(expected), sorted(found)
        assert same(expected, found), (command, expected, found)
        return expected

    def check_keys(self, keys: Sequence[Any]) -> None:
        for key in keys:
            kind = self.both("TYPE", key)
            if kind in READS:
                self.both(READS[kind], key)
            assert (self.real("PTTL", key) < 0) == (self.memory("PTTL", key) < 0), key


def same(expected: Any, found: Any) -> bool:
    """Whether answers are the same, but for times."""
    if isinstance(expected, redis.ResponseError):
        # Servers put scripts' errors into words of their own.
        return isinstance(found, redis.ResponseError) and code(expected) == code(found)
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(expected) == len(found)
            and all(same(e, f) for e, f in zip(expected, found, strict=True))
        )
    return bool(expected == found or (type(expected) is type(found) and is_close(expected, found)))


def is_close(expected: Any, found: Any) -> bool:
    """Whether these are times, and nearly the same."""
    try:
        one, other = float(expected), float(found)
    except (TypeError, ValueError):
        return False
    return min(one, other) > TOLERANCE_MS and abs(one - other) < TOLERANCE_MS


def code(error: Exception) -> str:
    return "WRONGTYPE" if "WRONGTYPE" in str(error) else "another"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    with (
        EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server,
        redis.Redis.from_url(server.url, protocol=2, single_connection_client=True) as connected,
    ):
        connected.config_set("hash-max-ziplist-value", 4096)  # Else fields have no order.
        yield connected


keys = st.sampled_from(KEYS)
texts = st.sampled_from(("", "a", "bc", "7", "-3", "1.5", "x y"))
numbers = st.integers(-3, 5)
fields = st.sampled_from(("f", "g", "h"))
lifetimes = st.sampled_from((-5, 0, 10**6))
commands = st.one_of(
    st.tuples(st.just("SET"), keys, texts),
    st.tuples(st.just("SET"), keys, texts, st.just("PX"), lifetimes),
    st.tuples(st.just("SET"), keys, texts, st.just("WRONG")),
    st.tuples(st.just("SETRANGE"), keys, numbers, texts),
    st.tuples(st.just("GETRANGE"), keys, numbers, numbers),
    st.tuples(st.just("HSET"), keys, fields, texts),
    st.tuples(st.just("HSET"), keys, fields, texts, fields, texts),
    st.tuples(st.just("HSET"), keys, fields),
    st.tuples(st.just("HMGET"), keys, fields, fields),
    st.tuples(st.just("HGET"), keys, fields),
    st.tuples(st.sampled_from(("SADD", "SREM")), keys, texts, texts),
    st.tuples(st.sampled_from(("EXPIRE", "PEXPIRE")), keys, lifetimes),
    st.tuples(st.sampled_from(("DEL", "EXISTS", "MGET")), keys, keys),
    st.tuples(
        st.sampled_from(("GET", "STRLEN", "HGETALL", "SMEMBERS", "TYPE", "PTTL")),
        keys,
    ),
    st.tuples(st.just("PING")),
    st.tuples(st.just("NOTHING"), keys),
)


@run_each
@given(st.lists(commands, min_size=5, max_size=30))
def test_commands_are_answered_as_by_a_server(client: redis.Redis, drawn: list[Any]) -> None:
    both = Both(client)
    both.empty()
    for command in drawn:
        both.both(*command)
    both.check_keys(KEYS)


CALL = "local answer = redis.call(unpack(ARGV)) return {answer, type(answer)}"
CAUGHT = "local answer = redis.pcall(unpack(ARGV)) return {type(answer)}"
CONVERTED = """return {1, 2.9, -2.9, 'text', true, {redis.call('HGETALL', KEYS[1])},
  redis.call('SET', KEYS[2], 3), redis.call('SET', KEYS[2], 1e15 + 0.5),
  redis.call('GET', KEYS[2]),
  1e15, false, 'unseen' , nil, 'cut off'}"""


@run_each
@given(st.lists(commands, min_size=3, max_size=15), st.sampled_from((CALL, CAUGHT)))
def test_scripts_are_answered_as_by_a_server(
    client: redis.Redis, drawn: list[Any], source: str
) -> None:
    both = Both(client)
    both.empty()
    for text in (source, CONVERTED):
        sha = both.real("SCRIPT LOAD", text)
        assert both.scripts.load(text.encode()) == sha
    for command in drawn:
        if command[0] not in ("SMEMBERS", "PING"):
            both.both("EVALSHA", sha_of(both, source), 2, *KEYS, *command)
    both.both("EVALSHA", sha_of(both, CONVERTED), 2, *KEYS)
    both.check_keys(KEYS)


def sha_of(both: Both, source: str) -> bytes:
    return both.scripts.load(source.encode())
