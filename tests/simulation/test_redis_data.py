"""Compares Redis in memory with a real server: the same commands, in scripts and alone, give the
same answers and leave the same keys. Times may differ by the duration of a call."""

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, given, settings

from outrider.redis.embedded import EmbeddedRedis
from tests.simulation.redis_data import RedisData, ReplyError, Status, packed

pytestmark = pytest.mark.xdist_group("redis")

KEYS = ("k", "l")
TOLERANCE_MS = 5_000.0
"""A call takes less, also on a busy machine; compared times are longer."""
SCRIPT = """local answer = redis.pcall(unpack(ARGV))
if type(answer) == 'table' and answer.err then return answer end
return {answer, type(answer), 1, 2.9, -2.9, 'text', true, false, nil, 'cut off'}"""


class Both:
    """A real server and the one in memory, whose clock is set to the other's before each call."""

    def __init__(self, client: redis.Redis) -> None:
        self.now_ms = 0.0
        self.data = RedisData(lambda: self.now_ms)
        self.connection: Any = client.connection

    def real(self, *command: Any) -> Any:
        """Its answer; an error is one, too."""
        self.connection.send_command(*command)
        try:
            return self.connection.read_response()
        except redis.ResponseError as error:
            return error

    def memory(self, *command: Any) -> Any:
        try:
            reply = self.data.run(packed(command))
        except ReplyError as error:
            return self.connection._parser.parse_error(str(error))
        return bytes(reply) if isinstance(reply, Status) else reply

    def check(self, *command: Any) -> None:
        seconds, microseconds = self.real("TIME")
        self.now_ms = int(seconds) * 1e3 + int(microseconds) / 1e3
        expected, found = self.real(*command), self.memory(*command)
        if "SMEMBERS" in command and isinstance(expected, list):
            expected, found = (sorted(map(str, flat(one))) for one in (expected, found))
        assert same(expected, found), (command, expected, found)


def flat(reply: Any) -> list[Any]:
    return [part for one in reply for part in flat(one)] if isinstance(reply, list) else [reply]


def same(expected: Any, found: Any) -> bool:
    """Whether answers are equal, except for times and the words of errors."""
    if isinstance(expected, redis.ResponseError):
        each = ["WRONGTYPE" in str(error) for error in (expected, found)]
        return isinstance(found, redis.ResponseError) and each[0] == each[1]
    if isinstance(expected, list):
        if not isinstance(found, list) or len(expected) != len(found):
            return False
        return all(same(*pair) for pair in zip(expected, found, strict=True))
    if isinstance(expected, int) and isinstance(found, int) and min(expected, found) > TOLERANCE_MS:
        return abs(expected - found) < TOLERANCE_MS
    return bool(expected == found)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    with (
        EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server,
        redis.Redis.from_url(server.url, protocol=2, single_connection_client=True) as connected,
    ):
        connected.config_set("hash-max-ziplist-value", 4096)  # Else fields have no order.
        yield connected


keys, one_of = st.sampled_from(KEYS), st.sampled_from
texts = one_of(("", "a", "bc", "7", "-3", "1.5", "x y"))
numbers = st.integers(-3, 5)
fields = one_of(("f", "g", "h"))
scores = one_of(("-inf", "-3", "2", "2.25", "1764450000000", "x"))
lifetimes = one_of((-5, 0, 10**6))
commands = st.one_of(
    st.tuples(st.just("SET"), keys, texts),
    st.tuples(st.just("SETRANGE"), keys, numbers, texts),
    st.tuples(st.just("SET"), keys, texts, one_of(("PX", "WRONG")), lifetimes),
    st.tuples(st.just("GETRANGE"), keys, numbers, numbers),
    st.tuples(st.just("HSET"), keys, fields, texts, fields, texts),
    st.tuples(st.just("HSET"), keys, fields, texts),
    st.tuples(one_of(("HGET", "HSET")), keys, fields),
    st.tuples(one_of(("HMGET", "HSET")), keys, fields, fields),
    st.tuples(one_of(("SADD", "SREM")), keys, texts, texts),
    st.tuples(st.just("ZADD"), keys, scores, texts, scores, texts),
    st.tuples(st.just("ZADD"), keys, scores, texts),
    st.tuples(st.just("ZREM"), keys, texts, texts),
    st.tuples(st.just("ZSCORE"), keys, texts),
    st.tuples(st.just("ZREMRANGEBYSCORE"), keys, scores, scores),
    st.tuples(one_of(("EXPIRE", "PEXPIRE")), keys, lifetimes),
    st.tuples(one_of(("DEL", "EXISTS", "MGET")), keys, keys),
    st.tuples(one_of(("GET", "STRLEN", "HGETALL", "SMEMBERS", "ZCARD", "PTTL", "NOTHING")), keys),
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(commands, st.booleans()), min_size=5, max_size=30))
def test_commands_are_answered_as_by_a_server(client: redis.Redis, drawn: list[Any]) -> None:
    """`drawn` says of each whether a script runs it."""
    both = Both(client)
    both.check("FLUSHALL")
    sha = both.real("SCRIPT LOAD", SCRIPT)
    assert both.memory("SCRIPT LOAD", SCRIPT) == sha
    for command, by_script in drawn:
        if not by_script:
            both.check(*command)
        elif command[0] != "NOTHING":
            both.check("EVALSHA", sha, 2, *KEYS, *command)
    for key in KEYS:
        for command in ("GET", "HGETALL", "SMEMBERS", "ZCARD", "PTTL"):
            both.check(command, key)
