"""Redis ends a script at some call, and does not undo what it has done: a whole session is left.

Redis 6.2 and 7.0 check memory, disk and replicas at a script's first write alone, but rights at
each call, and servers that speak its protocol may do otherwise. So each call of each script is
refused here once."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import lupa.lua51
import pytest
import redis
from session_model import IDS, OWNERS, end_of, new_session

from outrider.errors import NotFound, OutriderError, StoreUnavailable
from outrider.sessions import redis_store
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_scripts import Call, Script
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.state import Session
from outrider.sessions.store import Counters, FinishReason, SessionRecord

pytestmark = pytest.mark.xdist_group("redis")

WRITES = (b"SET", b"SETRANGE", b"HSET", b"PEXPIRE")
"""All that the scripts use."""
REFUSALS = (
    "OOM command not allowed when used memory > 'maxmemory'.",
    "MISCONF Redis is configured to save RDB snapshots, but it is unable to persist to disk.",
    "NOREPLICAS Not enough good replicas to write.",
)


class LuaRuntime:
    """Runs scripts in this process, each of their commands on a server, as Redis does inside; ends
    them at the write that it is told."""

    def __init__(self, admin: redis.Redis) -> None:
        self.admin = admin
        self.num_writes = 0
        self.refused_at: int | None = None
        self.refusal = ""

    def run(self, script: Script, call: Call) -> Any:
        self.num_writes = 0
        lua = lupa.lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        table = lua.table_from
        keys, arguments = call

        def command(*words: Any) -> Any:
            name = words[0]
            if name in WRITES:
                self.num_writes += 1
                if self.num_writes - 1 == self.refused_at:
                    raise redis.ResponseError(self.refusal)
            texts = [f"{w:.17g}" if isinstance(w, float | int) else w for w in words]
            return to_lua(self.admin.execute_command(*texts, NEVER_DECODE=True))

        def to_lua(answer: Any) -> Any:
            if answer is None:
                return False
            if isinstance(answer, dict):
                answer = [part for pair in answer.items() for part in pair]
            if isinstance(answer, list | tuple):
                return table([to_lua(one) for one in answer])
            return 1 if answer is True else answer

        lua.globals()[b"redis"] = table({b"call": command})
        lua.globals()[b"KEYS"] = table([key.encode() for key in keys])
        lua.globals()[b"ARGV"] = table(
            [a if isinstance(a, bytes) else str(a).encode() for a in arguments]
        )
        return from_lua(lua.execute(script.source.encode()))


def from_lua(answer: Any) -> Any:
    if lupa.lua51.lua_type(answer) == "table":
        return [from_lua(answer[i + 1]) for i in range(len(answer))]
    return int(answer) if isinstance(answer, float) else answer


@dataclass
class Bench:
    """A store, and one whose scripts run in this process."""

    store: RedisStore
    broken: RedisStore
    runtime: LuaRuntime
    admin: redis.Redis

    def snapshot(self) -> dict[bytes, tuple[bytes, int]]:
        return {
            key: (self.admin.dump(key), max(self.admin.pttl(key), 0))
            for key in self.admin.scan_iter()
        }

    def restore(self, kept: dict[bytes, tuple[bytes, int]]) -> None:
        self.admin.flushdb()
        for key, (value, ttl_ms) in kept.items():
            self.admin.restore(key, ttl_ms, value)

    async def read(self) -> SessionRecord | None:
        """Raises `DataLoss` for what cannot be continued."""
        try:
            return await self.store.load(IDS[0])
        except NotFound:
            return None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def bench(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    prefix = f"{uuid.uuid4()}:"
    store, broken = [await RedisStore.connect(server.url, key_prefix=prefix) for _ in range(2)]
    with redis.Redis.from_url(server.url, protocol=2) as admin:
        admin.flushdb()
        runtime = LuaRuntime(admin)

        async def run(script: Script, call: Call) -> Any:
            try:
                return runtime.run(script, call)
            except redis.ResponseError as error:
                raise StoreUnavailable(str(error)) from error

        async def run_all(script: Script, calls: Any) -> list[Any]:
            return [await run(script, call) for call in calls]

        monkeypatch.setattr(broken._scripts, "run", run)
        monkeypatch.setattr(broken._scripts, "run_all", run_all)
        yield Bench(store, broken, runtime, admin)
    await store.close()
    await broken.close()


StepRequest = Callable[[RedisStore], Awaitable[Any]]


async def opening(bench: Bench) -> StepRequest:
    return lambda store: store.open(new_session())


def written(session: Session, *token_ids: int) -> None:
    lines = [str(token_id) for token_id in token_ids]
    session.decide(token_ids, Counters(1, 2, 1), logprobs=lines)


async def send(store: RedisStore, session: Session) -> Any:
    append = session.next_append()
    assert append is not None
    [answer] = await store.append([append])
    if isinstance(answer, OutriderError):
        raise answer
    return answer


async def appending(bench: Bench) -> StepRequest:
    """The first tokens of the answer, whose log-probabilities have no key yet."""
    await bench.store.open(new_session())
    session = Session(new_session())
    written(session, 7, 8)
    return lambda store: send(store, session)


async def appending_more(bench: Bench) -> StepRequest:
    """Other tokens lie behind the end, as a script leaves them that was ended earlier. The time to
    live is below its least."""
    work = await appending(bench)
    await work(bench.store)
    session = Session(await bench.store.load(IDS[0]))
    written(session, 9)
    key = f"{bench.store._key_prefix}session:{{{IDS[0]}}}"
    bench.admin.append(f"{key}:tokens", b"\1" * 12)
    bench.admin.append(f"{key}:logprobs", b"left over\n")
    for name in (key, f"{key}:tokens", f"{key}:logprobs"):
        bench.admin.pexpire(name, 10_000)
    return lambda store: send(store, session)


async def rewriting(bench: Bench) -> StepRequest:
    """The store has lost the take-over, and its tokens are the former owner's."""
    work = await appending(bench)
    session = Session(replace(await bench.store.load(IDS[0]), epoch=2, owner=OWNERS[1]))
    await work(bench.store)
    written(session, 3, 4, 5)
    session.acknowledge(0)
    return lambda store: send(store, session)


async def finishing(bench: Bench) -> StepRequest:
    await (await appending(bench))(bench.store)
    end = end_of(Session(await bench.store.load(IDS[0])), FinishReason.LENGTH)
    return lambda store: store.finish(end)


async def cancelling_what_was_lost(bench: Bench) -> StepRequest:
    """The owner's take-over is lost, and it ends the session with whatever is stored."""
    await (await appending(bench))(bench.store)
    session = Session(replace(await bench.store.load(IDS[0]), epoch=2, owner=OWNERS[1]))
    end = replace(end_of(session, FinishReason.CANCELLED), length=None)
    return lambda store: store.finish(end)


async def taking_over(bench: Bench) -> StepRequest:
    """Of a session that a former owner has begun to claim back."""
    work = await rewriting(bench)
    bench.runtime.refused_at = 1
    with pytest.raises(StoreUnavailable):
        await work(bench.broken)
    key = f"{bench.store._key_prefix}session:{{{IDS[0]}}}"
    bench.admin.pexpire(key, 10_000)
    seen = await bench.store.load(IDS[0])
    return lambda store: store.take_over(seen, "carl")


async def releasing(bench: Bench) -> StepRequest:
    await (await appending(bench))(bench.store)
    return lambda store: store.release(IDS[0], 1, OWNERS[0])


WORKS = (
    opening, appending, appending_more, rewriting, finishing, cancelling_what_was_lost, releasing,
    taking_over,
)  # fmt: skip

ONCE = (releasing, taking_over)
"""Done again, they are refused: the owner has changed."""


def seen(record: SessionRecord | None) -> Any:
    """What a reader has of a record, but for whose it is."""
    if record is None:
        return None
    return record.token_ids, record.logprobs, record.counters, record.finish_reason


def check_expiries(bench: Bench) -> None:
    assert all(bench.admin.pttl(key) > 0 for key in bench.admin.scan_iter())


async def is_refused(bench: Bench, work: StepRequest) -> bool:
    """Whether the write that is to be refused was reached. How many there are depends on the time:
    a script prolongs what has long not been prolonged."""
    try:
        await work(bench.broken)
    except StoreUnavailable:
        return True
    assert bench.runtime.refused_at is not None
    assert bench.runtime.num_writes <= bench.runtime.refused_at
    return False


@pytest.mark.parametrize("prepare", WORKS)
async def test_a_script_that_is_ended_at_any_write_leaves_a_whole_session(
    bench: Bench, prepare: Callable[[Bench], Awaitable[StepRequest]]
) -> None:
    """What is read is as before or as after, for the next owner too; done again, it is done."""
    work = await prepare(bench)
    bench.runtime.refused_at = None
    kept, before = bench.snapshot(), await bench.read()
    answer, after = await work(bench.broken), await bench.read()
    assert after != before
    for at in count():
        bench.restore(kept)
        bench.runtime.refused_at, bench.runtime.refusal = at, REFUSALS[at % len(REFUSALS)]
        if not await is_refused(bench, work):
            break
        found = await bench.read()
        assert seen(found) in (seen(before), seen(after))
        if prepare not in ONCE or found == before:
            assert await work(bench.store) == answer
            assert await bench.read() == after
            check_expiries(bench)
        bench.restore(kept)
        if not await is_refused(bench, work):
            break
        if found is not None and found.finish_reason is None:
            session = Session(await bench.store.take_over(found, "dora"))
            assert seen(await bench.read()) == seen(found)
            written(session, 11) if session.length > 3 else session.decide([11], Counters())
            assert await send(bench.store, session) == session.length
            assert (await bench.read()).token_ids == tuple(session.tokens.ids)  # type: ignore[union-attr]
            check_expiries(bench)
    assert at > 0


@pytest.mark.parametrize("word", WRITES)
@pytest.mark.parametrize("prepare", WORKS)
async def test_a_server_that_withdraws_the_right_to_a_command_leaves_a_whole_session(
    bench: Bench, prepare: Callable[[Bench], Awaitable[StepRequest]], word: bytes
) -> None:
    """As above, by Redis itself."""
    work = await prepare(bench)
    before = await bench.read()
    bench.admin.execute_command("ACL", "SETUSER", "default", b"-" + word)
    try:
        await work(bench.store)
    except OutriderError:
        refused = True
    else:
        refused = False
    finally:
        bench.admin.execute_command("ACL", "SETUSER", "default", "+@all")
    found = await bench.read()
    assert refused or found != before
    if prepare not in ONCE or found == before:
        await work(bench.store)
    after = await bench.read()
    assert seen(found) in (seen(before), seen(after))
    assert refused or found == after


def test_the_scripts_write_by_no_other_commands() -> None:
    """Else some call would not be refused above."""
    scripts = [one for one in vars(redis_store).values() if isinstance(one, Script)]
    assert len(scripts) >= 5
    reads = {"HMGET", "HGETALL", "HGET", "GETRANGE", "STRLEN", "EXISTS", "PTTL"}
    for script in scripts:
        used = {part.split("'")[0] for part in script.source.split("redis.call('")[1:]}
        ends = {"DEL"} if script is redis_store._HOLD_LEASE else set()  # Its one write.
        assert used <= reads | {word.decode() for word in WRITES} | ends
