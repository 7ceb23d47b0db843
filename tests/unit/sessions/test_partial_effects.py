"""Redis may abort a script at any write without undoing it. Here the simulation's server in memory
refuses each write of each script once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from outrider import errors
from outrider.redis.connection import Call, Script
from outrider.sessions import state
from outrider.sessions.state import Session
from outrider.sessions.store import Counters, FinishReason, SessionRecord, SharedText
from tests.simulation.redis_data import WRITES, RedisData, Reply, ReplyError
from tests.support.script_store import ScriptStore
from tests.support.session_model import IDS, OWNERS, end_of, new_session, next_append

KEY = f"session:{{{IDS[0]}}}".encode()
KEYS = (KEY, KEY + b":tokens", KEY + b":logprobs")


class RefusingData(RedisData):
    """Refuses the write with a given number."""

    num_writes = 0
    """Writes since the last script began."""
    refused_at: int | None = None

    def run(self, arguments: Sequence[bytes]) -> Reply:
        if arguments[0] in WRITES:
            self.num_writes += 1
            if self.num_writes - 1 == self.refused_at:
                raise ReplyError("OOM command not allowed when used memory > 'maxmemory'.")
        return super().run(arguments)


class Bench(ScriptStore):
    """A store whose data refuse a write, and checks of what it then holds."""

    def __init__(self) -> None:
        super().__init__(lambda: 1e12, RefusingData)

    async def run(self, script: Script, call: Call) -> Reply:
        self.data.num_writes = 0
        return await super().run(script, call)

    async def read(self) -> SessionRecord | None:
        """Raises `DataLoss` for a session that cannot be continued."""
        try:
            return await self.load(IDS[0])
        except errors.NotFound:
            return None

    async def is_refused(self, work: Work, at: int) -> bool:
        """Refuses write number `at` of `work`. Returns whether `work` reached this write."""
        self.data.refused_at = at
        try:
            await work(self)
        except errors.StoreUnavailable:
            return True
        finally:
            self.data.refused_at = None
        return False

    def check_expiries(self, above_ms: int = 0) -> None:
        assert all(self.data.ttl_ms(key) > above_ms for key in self.data.sorted_keys())


Work = Callable[[ScriptStore], Awaitable[Any]]


def written(session: Session, *token_ids: int) -> None:
    lines = [str(token_id) for token_id in token_ids]
    session.decide(token_ids, Counters(1, 2, 1), logprobs=lines)


async def send(store: ScriptStore, session: Session) -> Any:
    [answer] = await store.append([next_append(session)])
    if isinstance(answer, errors.OutriderError):
        raise answer
    return answer


async def opening(bench: Bench) -> Work:
    return lambda store: store.open(new_session())


def sharing() -> SessionRecord:
    return replace(new_session(), shared=SharedText.of("tenant", '{"constraint": 1}'))


async def opening_with_a_shared_text(bench: Bench) -> Work:
    return lambda store: store.open(sharing())


async def appending(bench: Bench) -> Work:
    """The first tokens of the answer, whose log-probabilities have no key yet."""
    await bench.open(new_session())
    session = Session(new_session())
    written(session, 7, 8)
    return lambda store: send(store, session)


async def appending_more(bench: Bench) -> Work:
    """An aborted script has left tokens after the end. The time to live is below its least."""
    await (await appending(bench))(bench)
    session = Session(await bench.load(IDS[0]))
    written(session, 9)
    for key, more in zip(KEYS[1:], (b"\1" * 12, b"left over\n"), strict=True):
        end = str(len(bench.data.get(key))).encode()
        bench.data.run((b"SETRANGE", key, end, more))
    for key in KEYS:
        bench.data.run((b"PEXPIRE", key, b"10000"))
    return lambda store: send(store, session)


async def rewriting(bench: Bench) -> Work:
    """The store has lost the take-over, and has the former owner's tokens."""
    work = await appending(bench)
    session = Session(replace(await bench.load(IDS[0]), epoch=2, owner=OWNERS[1]))
    await work(bench)
    written(session, 3, 4, 5)
    session.acknowledge(0)
    return lambda store: send(store, session)


async def finishing(bench: Bench) -> Work:
    await (await appending(bench))(bench)
    end = end_of(Session(await bench.load(IDS[0])), FinishReason.LENGTH)
    return lambda store: store.finish(end)


async def cancelling_what_was_lost(bench: Bench) -> Work:
    """The owner's take-over is lost, and it ends the session with whatever is stored."""
    await (await appending(bench))(bench)
    session = Session(replace(await bench.load(IDS[0]), epoch=2, owner=OWNERS[1]))
    end = replace(end_of(session, FinishReason.CANCELLED), length=None)
    return lambda store: store.finish(end)


async def releasing(bench: Bench) -> Work:
    await (await appending(bench))(bench)
    return lambda store: store.release(IDS[0], 1, OWNERS[0])


async def taking_over(bench: Bench) -> Work:
    """Takes over a session that a former owner has begun to reclaim."""
    assert await bench.is_refused(await rewriting(bench), at=1)
    bench.data.run((b"PEXPIRE", KEY, b"10000"))
    seen = await bench.load(IDS[0])
    return lambda store: store.take_over(seen, "carl")


ONCE = (releasing, taking_over)
"""These operations change the owner, so repeating them is refused."""


def seen(record: SessionRecord | None) -> Any:
    """What a reader sees of a record, without its owner."""
    if record is None:
        return None
    return record.token_ids, record.logprobs, record.counters, record.finish_reason


@pytest.mark.parametrize(
    "prepare",
    [
        opening,
        opening_with_a_shared_text,
        appending,
        appending_more,
        rewriting,
        finishing,
        cancelling_what_was_lost,
        *ONCE,
    ],
)
async def test_a_script_that_is_ended_at_any_write_leaves_a_whole_session(
    prepare: Callable[[Bench], Awaitable[Work]],
) -> None:
    """Readers and the next owner get the state before or after the operation. Repeating the
    operation completes it."""
    bench = Bench()
    work = await prepare(bench)
    kept, before = bench.data.snapshot(), await bench.read()
    answer, after = await work(bench), await bench.read()
    assert after != before
    bench.check_expiries(above_ms=10_000)
    for at in count():
        bench.data.restore(kept)
        if not await bench.is_refused(work, at):
            break
        found = await bench.read()
        assert seen(found) in (seen(before), seen(after))
        if prepare not in ONCE or found == before:
            assert await work(bench) == answer
            assert await bench.read() == after
            bench.check_expiries()
        bench.data.restore(kept)
        assert await bench.is_refused(work, at)
        if found is not None and found.finish_reason is None:
            session = Session(await bench.take_over(found, "dora"))
            assert seen(await bench.read()) == seen(found)
            written(session, 11) if session.length > 3 else session.decide([11], Counters())
            assert await send(bench, session) == session.length
            assert (await bench.load(IDS[0])).token_ids == tuple(session.tokens.ids)
            bench.check_expiries()
    assert at > 0


async def test_a_batch_that_is_stored_in_part_is_completed_by_its_repetition() -> None:
    bench = Bench()
    sessions = [Session(new_session(one)) for one in IDS]
    for session in sessions:
        await bench.open(new_session(session.session_id))
        written(session, 7, 8)

    async def append(store: ScriptStore) -> Any:
        return await store.append([next_append(session) for session in sessions])

    kept, found = bench.data.snapshot(), set[tuple[int, ...]]()
    for at in count():
        bench.data.restore(kept)
        if not await bench.is_refused(append, at):
            break
        records = [await bench.load(one) for one in IDS]
        found.add(tuple(len(record.token_ids) for record in records))
        assert await append(bench) == [5] * len(IDS)
    assert found == {(3, 5, 5), (5, 3, 5), (5, 5, 3)}


async def test_an_end_with_more_tokens_than_are_stored_is_not_recorded() -> None:
    bench = Bench()
    await (await appending(bench))(bench)
    session = Session(await bench.load(IDS[0]))
    written(session, 9)
    assert await bench.finish(end_of(session)) == session.length - 1
    assert (await bench.load(IDS[0])).finish_reason is None


async def test_an_append_of_a_higher_epoch_reopens_what_has_finished_a_release_does_not() -> None:
    bench = Bench()
    await (await finishing(bench))(bench)
    assert {bench.data.ttl_ms(key) for key in KEYS} == {bench.finished_ttl_ms}
    ended = await bench.load(IDS[0])
    await bench.release(IDS[0], 2, OWNERS[1])
    assert await bench.load(IDS[0]) == ended
    session = Session(replace(ended, epoch=2, owner=OWNERS[1], finish_reason=None))
    written(session, 9)
    assert await send(bench, session) == 0
    found = await bench.load(IDS[0])
    assert (found.epoch, found.owner, found.finish_reason) == (2, OWNERS[1], None)


async def test_tokens_that_are_sent_again_in_parts_are_read_once_all_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One owner begins to, under a take-over that the store has lost; the next one completes it."""
    bench = Bench()
    work = await appending(bench)
    opened = await bench.load(IDS[0])
    await work(bench)
    before = await bench.load(IDS[0])
    monkeypatch.setattr(state, "APPEND_TOKENS_MAX", 1)
    for epoch, num_parts in ((2, 2), (3, 3)):
        session = Session(replace(opened, epoch=epoch, owner=OWNERS[1]))
        written(session, 9)
        for num_stored in range(num_parts + 1):
            assert seen(await bench.read()) == seen(before)
            assert await send(bench, session) == num_stored
            session.acknowledge(num_stored)
    assert (await bench.load(IDS[0])).token_ids == opened.token_ids


async def test_an_owner_with_a_lease_is_told_once_what_another_asked_for() -> None:
    bench = Bench()
    await (await opening(bench))(bench)
    await bench.hold_lease(OWNERS[0])
    seen = await bench.load(IDS[0])
    for asked in ((False,), (False, True), (True, False)):
        for cancels in asked:
            with pytest.raises(errors.Unavailable):
                await bench.take_over(seen, OWNERS[1], cancels=cancels)
        heard = [await bench.hold_lease(OWNERS[0]) for _ in range(2)]
        assert heard == [{IDS[0]: any(asked)}, {}]


async def test_a_session_of_another_owner_under_the_same_epoch_is_not_taken_over() -> None:
    bench = Bench()
    await (await opening(bench))(bench)
    found = await bench.take_over(await bench.load(IDS[0]), OWNERS[0])
    with pytest.raises(errors.Unavailable):
        await bench.take_over(replace(found, owner=OWNERS[1]), "carl")


@pytest.mark.parametrize(("epoch", "owner"), [(1, OWNERS[0]), (2, OWNERS[0]), (2, "carl")])
async def test_only_the_stored_owner_writes_under_its_epoch(epoch: int, owner: str) -> None:
    bench = Bench()
    await (await appending(bench))(bench)
    found = await bench.take_over(await bench.load(IDS[0]), OWNERS[1])
    session = Session(replace(found, epoch=epoch, owner=owner))
    written(session, 9)
    for write in (
        send(bench, session),
        bench.release(IDS[0], epoch, owner),
        bench.finish(replace(end_of(session), length=None)),
    ):
        with pytest.raises(errors.StaleEpoch):
            await write
    assert await bench.load(IDS[0]) == found


async def test_a_session_is_opened_once() -> None:
    bench = Bench()
    for _ in range(2):
        await bench.open(new_session())
    for other in (new_session(owner=OWNERS[1]), replace(new_session(), seed=1)):
        with pytest.raises(errors.InvariantError, match="another session has the id"):
            await bench.open(other)
    assert await bench.load(IDS[0]) == new_session()


async def test_a_session_ends_once_and_with_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    await (await appending(bench))(bench)
    monkeypatch.setattr(state, "APPEND_TOKENS_MAX", 1)
    session = Session(replace(new_session(), epoch=2, owner=OWNERS[1]))
    written(session, 9)
    assert await send(bench, session) == 0
    session.acknowledge(0)
    assert await send(bench, session) == 1
    end = end_of(session)
    assert await bench.finish(replace(end, length=1)) == 1
    assert (await bench.load(IDS[0])).finish_reason is None, "its other tokens are under way"
    for reason in (FinishReason.CANCELLED, FinishReason.STOP):
        await bench.finish(replace(end, length=None, reason=reason))
    assert (await bench.load(IDS[0])).finish_reason is FinishReason.CANCELLED


async def test_a_key_keeps_its_first_value_until_that_is_replaced() -> None:
    bench, found = Bench(), []
    for value, replaces in (("", ""), ("a", ""), ("b", ""), ("b", "a"), ("c", "a"), ("", "b")):
        found.append(await bench.claim_key("k", value, replaces))
    assert found == ["", "a", "a", "b", "b", "b"]


async def test_sessions_share_one_copy_of_a_text_that_outlives_them() -> None:
    bench, records = Bench(), [replace(sharing(), session_id=one) for one in IDS]
    for record in records:
        await bench.open(record)
        assert await bench.load(record.session_id) == record
    [shared] = [key for key in bench.data.sorted_keys() if key.startswith(b"shared:")]
    await bench.finish(end_of(Session(records[0])))
    for key in (f"session:{{{IDS[0]}}}", f"session:{{{IDS[1]}}}"):
        assert bench.data.ttl_ms(key.encode()) < bench.data.ttl_ms(shared)
    other = replace(
        records[0], session_id="a" * 32, shared=SharedText.of("other", '{"constraint": 1}')
    )
    await bench.open(other)
    assert sum(key.startswith(b"shared:") for key in bench.data.sorted_keys()) == 2
    bench.data.drop(shared)
    with pytest.raises(errors.DataLoss, match=r"parameters of session .* are not stored any more"):
        await bench.load(IDS[1])


async def test_a_renewed_session_lives_on_with_its_shared_text() -> None:
    now_ms = 1e12
    bench = ScriptStore(lambda: now_ms)
    running, ended = sharing(), new_session(IDS[1])
    for record in (running, ended):
        await bench.open(record)
    await bench.finish(end_of(Session(ended)))
    for _ in range(10):
        now_ms += bench.session_ttl_ms / 2
        await bench.renew([running, ended])
    assert await bench.load(running.session_id) == running
    with pytest.raises(errors.NotFound):
        await bench.load(ended.session_id)
    now_ms += 2 * bench.session_ttl_ms
    await bench.renew([running])
    assert not [key for key in bench.data.sorted_keys() if not key.startswith(b"shared:")]
