"""Redis in memory beside a real server: the same calls have the same answers, and leave the same
keys. Where an answer contains a time, the two may differ by what a call takes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, given, settings

from outrider.errors import OutriderError
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ReplicaRecord
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_connection import to_our_error
from outrider.sessions.redis_scripts import Call, Script
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.store import (
    Append,
    CacheState,
    Counters,
    Finish,
    FinishReason,
    Lifetimes,
    SessionRecord,
)
from outrider.speculation.sampling_params import Rule
from tests.simulation.redis_data import RedisData, ReplyError, Status
from tests.simulation.redis_host import ADDRESS, packed
from tests.simulation.redis_scripting import Scripts

pytestmark = pytest.mark.xdist_group("redis")

KEYS = ("k", "l")
TOLERANCE_MS = 5_000.0
"""A call takes less, also on a busy machine; times that are compared are longer."""
LIFETIMES = Lifetimes(10**6, 10**7, 10**7)
READS = {b"string": "GET", b"hash": "HGETALL", b"set": "SMEMBERS"}
COUNTS = Counters(1, 2, 3)
run_each = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Both:
    """A real server, and the one in memory, whose clock is set by the other's before each call.
    In the place of a `ScriptRunner`."""

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

    async def run(self, script: Script, call: Call) -> Any:
        [answer] = await self.run_all(script, [call])
        if isinstance(answer, OutriderError):
            raise answer
        return answer

    async def run_all(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        answers = []
        for keys, arguments in calls:
            self.real("SCRIPT LOAD", script.source)
            self.scripts.load(script.source.encode())
            answer = self.both("EVALSHA", script.sha, len(keys), *keys, *arguments)
            self.check_keys(keys)
            answers.append(to_our_error(answer) if isinstance(answer, Exception) else answer)
        return answers

    async def close(self) -> None:
        pass


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


ids = st.sampled_from(("a" * 32, "b" * 32))
owners = st.sampled_from(("anna", "bert", "carl"))
epochs = st.integers(1, 4)
lengths = st.sampled_from((0, 2, 3, 4, 5, 6))
runs = st.lists(st.integers(0, 9), max_size=4).map(tuple)
calls = st.one_of(
    st.tuples(st.just("open"), ids, owners),
    st.tuples(st.just("append"), ids, epochs, owners, lengths, runs, st.sampled_from(("", "{}\n"))),
    st.tuples(st.just("look"), ids),
    st.tuples(st.just("take_over"), ids, owners),
    st.tuples(st.sampled_from(("hold_lease", "end_lease")), owners),
    st.tuples(st.just("release"), ids, epochs, owners),
    st.tuples(st.just("finish"), ids, epochs, owners, st.sampled_from((None, 2, 4, 6))),
    st.tuples(st.just("load"), ids),
)


async def call(store: RedisStore, seen: dict[str, SessionRecord], kind: str, *given: Any) -> None:
    """One call of the store; what it raises has been compared already. `seen` is what was read."""
    try:
        match kind, given:
            case "open", (name, owner):
                parameters = '{"max_tokens": 9}'
                new = SessionRecord.new(name, "t", owner, 2**64 - 1, Rule.BLOCK, parameters, (1, 2))
                await store.open(new)
            case "append", (name, epoch, owner, length, token_ids, lines):
                one = Append(
                    session_id=name, epoch=epoch, owner=owner, expected_length=length,
                    token_ids=token_ids, prefix_digest=epoch, draft=CacheState("d", 1),
                    target=CacheState("t", 2), counters=COUNTS, logprobs=lines,
                )  # fmt: skip
                await store.append([one, one])
            case "hold_lease", (owner,):
                await store.hold_lease(owner)
            case "end_lease", (owner,):
                await store.end_lease(owner)
            case "release", (name, epoch, owner):
                await store.release(name, epoch, owner)
            case "look", (name,):
                seen[name] = await store.load(name)
            case "take_over", (name, owner):
                await store.take_over(seen[name], owner)
            case "finish", (name, epoch, owner, length):
                end = Finish(name, epoch, owner, length, FinishReason.LENGTH, COUNTS)
                await store.finish(end)
            case "load", (name,):
                await store.load(name)
    except (KeyError, OutriderError):
        pass  # Of what was not seen, nothing is taken over.


@run_each
@given(st.lists(calls, min_size=5, max_size=30))
def test_the_store_is_answered_as_by_a_server(client: redis.Redis, drawn: list[Any]) -> None:
    both = Both(client)
    both.empty()
    seen: dict[str, SessionRecord] = {}
    store: Any = RedisStore(client, "p:", LIFETIMES)  # type: ignore[arg-type]
    store._scripts = both

    async def work() -> None:
        for one in drawn:
            await call(store, seen, *one)

    asyncio.run(work())


def test_the_registry_is_answered_as_by_a_server(client: redis.Redis) -> None:
    both = Both(client)
    both.empty()

    async def work() -> None:
        registry: Any = RedisRegistry(ADDRESS, "d")

        async def run(*commands: Any) -> list[Any]:
            answers = []
            for command in commands:
                answer = both.both(*command)
                both.check_keys(command[1:2])
                pairs = (
                    zip(answer[::2], answer[1::2], strict=True) if command[0] == "HGETALL" else ()
                )
                answers.append(dict(pairs) if command[0] == "HGETALL" else answer)
            return answers

        registry._run = run
        record = ReplicaRecord(role="target", name="t-1", address="h:1", host="h", pid=1)
        await registry.announce(record)
        assert await registry.records("target") == [record]
        both.both("DEL", registry._key("target", "t-1"))
        assert await registry.records("target") == []
        await registry.announce(record)
        await registry.withdraw("target", "t-1")
        await registry.want({"target": 2})
        assert await registry.wanted() == {"target": 2}
        await registry.note_started(3)
        assert await registry.started() == 3

    asyncio.run(work())
