"""The committer on a virtual clock: what is shown, what is stored, which calls wait."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from coordinator.decoding.committer import Committer, SessionCommits
from outrider import limits
from outrider.errors import DataLoss, OutriderError, StaleEpoch, StoreUnavailable, Unavailable
from outrider.sessions.state import Session
from outrider.sessions.store import Append, Counters, Finish, FinishReason
from tests.support.script_store import ScriptStore
from tests.support.session_model import IDS, new_session

pytestmark = pytest.mark.virtual

NO_COUNTS = Counters()
LATENCY_S = 0.01


class UnreliableStore(ScriptStore):
    """Answers after `LATENCY_S`; not at all while `down` or if `fails` says so."""

    def __init__(self) -> None:
        super().__init__(lambda: asyncio.get_running_loop().time() * 1000)
        self.down = False
        self.fails: Callable[[], str] = lambda: ""
        """How calls fail: 'request' = not carried out, 'answer' = carried out, but the answer is
        lost."""
        self.appends: list[Sequence[Append]] = []
        self.append_times: list[float] = []
        self.num_renewals = 0
        self.num_finishes = 0

    async def _through(self, call: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(LATENCY_S)
        failure = "request" if self.down else self.fails()
        if failure == "request":
            raise StoreUnavailable("request lost")
        answer = await call()
        if failure == "answer":
            raise StoreUnavailable("answer lost")
        return answer

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        self.appends.append(appends)
        self.append_times.append(now())
        return await self._through(lambda: ScriptStore.append(self, appends))

    async def hold_lease(self, owner: str) -> Mapping[str, bool]:
        self.num_renewals += 1
        return await self._through(lambda: ScriptStore.hold_lease(self, owner))

    async def end_lease(self, owner: str) -> None:
        await self._through(lambda: ScriptStore.end_lease(self, owner))

    async def finish(self, finish: Finish) -> int:
        self.num_finishes += 1
        return await self._through(lambda: ScriptStore.finish(self, finish))


def now() -> float:
    return asyncio.get_running_loop().time()


class Bench:
    """A running committer and its sessions."""

    def __init__(self) -> None:
        self.store = UnreliableStore()
        self.committer = Committer(self.store, "anna", random.Random(7).random)
        self.made: dict[Session, SessionCommits] = {}
        self.running = asyncio.create_task(self.committer.run())

    async def session(self, k: int = 0) -> Session:
        new = new_session(f"{k:032x}")
        await self.store.open(new)
        session = Session(new)
        self.made[session] = self.committer.add(session)
        return session

    def of(self, session: Session) -> SessionCommits:
        return self.made[session]

    async def shown(self, session: Session, length: int) -> int:
        while session.showable_length < length:
            await self.of(session).change()
        return session.showable_length

    def decide(self, session: Session, num_tokens: int = 1) -> None:
        session.decide(range(session.length, session.length + num_tokens), NO_COUNTS)
        self.of(session).notify()

    async def stored(self, session: Session) -> tuple[int, ...]:
        return (await self.store.load(session.session_id)).token_ids


@pytest.fixture
async def b() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.committer.close()
    await made.running
    assert not made.committer.sessions


async def test_the_log_tells_when_commits_stop_and_go_on(
    b: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Once each, however often the store is asked meanwhile."""
    session = await b.session()
    b.store.down = True
    b.decide(session)
    await asyncio.sleep(5)
    assert len(b.store.appends) > 2
    assert [record.message for record in caplog.records] == [
        "no tokens are committed for now: request lost"
    ]
    b.store.down = False
    await b.shown(session, session.length)
    assert [record.message for record in caplog.records[1:]] == ["tokens are committed again"]


async def is_waiting(task: asyncio.Task[Any], seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return not task.done()


async def test_sessions_are_batched_up_to_a_bound_while_a_call_runs(b: Bench) -> None:
    sessions = [await b.session(k) for k in range(limits.APPENDS_PER_CALL_MAX + 1)]
    b.decide(sessions[0])
    await asyncio.sleep(LATENCY_S / 2)
    for session in sessions:
        b.decide(session)
        b.decide(session, 2)
    await asyncio.gather(*(b.shown(s, s.length) for s in sessions))
    assert [len(appends) for appends in b.store.appends] == [1, limits.APPENDS_PER_CALL_MAX, 1]
    assert [await b.stored(s) for s in sessions] == [tuple(s.tokens.ids) for s in sessions]
    b.committer.check_integrity()


async def test_unseen_tokens_stay_unseen_while_the_store_is_down(b: Bench) -> None:
    session = await b.session()
    b.store.down = True
    b.decide(session)
    shown = asyncio.create_task(b.shown(session, 4))
    assert await is_waiting(shown, 30)
    b.decide(session, 3)
    assert await is_waiting(shown, 30)
    assert session.showable_length == 3
    gaps = [b - a for a, b in zip(b.store.append_times, b.store.append_times[1:], strict=False)]
    assert gaps[0] < 0.04
    longest = limits.COMMIT_RETRY_MS_MAX / 1000
    assert all(longest / 2 <= gap <= longest + LATENCY_S + 1e-6 for gap in gaps[8:])
    assert len(set(gaps)) > len(gaps) / 2
    b.store.down = False
    before = len(b.store.appends)
    assert await shown == 7
    assert len(b.store.appends) == before + 1
    assert await b.stored(session) == tuple(session.tokens.ids)


@pytest.mark.parametrize(
    ("decided", "ahead", "seconds"),
    [(limits.UNCOMMITTED_TOKENS_MAX - 17, 17, 0.0), (1, 1, limits.UNCOMMITTED_MS_MAX / 1000)],
)
async def test_a_session_waits_while_too_many_or_too_old_tokens_are_uncommitted(
    b: Bench, decided: int, ahead: int, seconds: float
) -> None:
    session = await b.session()
    b.store.down = True
    b.decide(session, decided)
    await asyncio.sleep(seconds)
    await b.of(session).room(ahead)
    b.decide(session)
    await asyncio.sleep(0.001)
    room = asyncio.create_task(b.of(session).room(ahead))
    assert await is_waiting(room, 5)
    b.store.down = False
    await room
    assert session.num_uncommitted == 0


async def test_a_take_over_stops_one_session_alone(b: Bench) -> None:
    taken, kept = await b.session(0), await b.session(1)
    b.store.down = True
    b.decide(taken)
    b.decide(kept)
    shown = asyncio.create_task(b.shown(taken, 4))
    assert await is_waiting(shown, 3)
    b.store.down = False
    await b.store.end_lease("anna")
    seen = await b.store.load(taken.session_id)
    assert (await b.store.take_over(seen, "bert")).epoch == 2
    with pytest.raises(StaleEpoch):
        await shown
    assert taken.error is not None
    assert taken.showable_length == 3
    for call in (b.of(taken).room(), b.shown(taken, 4), b.of(taken).finish(FinishReason.STOP)):
        with pytest.raises(StaleEpoch):
            await call
    assert await b.shown(kept, 4) == 4
    b.committer.check_integrity()


@pytest.mark.parametrize("idle", [False, True])
async def test_a_record_that_is_gone_is_data_loss(b: Bench, idle: bool) -> None:
    session = await b.session()
    b.store.restore(({}, {}))
    with pytest.raises(DataLoss):
        if idle:
            await b.of(session).finish(FinishReason.DEADLINE)
        else:
            b.decide(session)
            await b.shown(session, 4)
    assert isinstance(session.error, DataLoss)
    with pytest.raises(DataLoss):
        await b.of(session).room()
    with pytest.raises(Exception, match="no session"):
        await b.store.load(session.session_id)


async def test_finish_waits_for_the_last_tokens(b: Bench) -> None:
    session = await b.session()
    b.store.down = True
    session.decide([1, 2], Counters(3, 2, 1))
    ended = asyncio.create_task(b.of(session).finish(FinishReason.LENGTH))
    assert await is_waiting(ended, 20)
    assert b.store.num_finishes == 0
    b.store.down = False
    await ended
    record = await b.store.load(session.session_id)
    assert record.finish_reason is FinishReason.LENGTH
    assert (record.token_ids[3:], record.counters) == ((1, 2), Counters(3, 2, 1))
    await b.of(session).finish(FinishReason.CANCELLED)
    assert (await b.store.load(session.session_id)).finish_reason is FinishReason.LENGTH


async def test_a_lost_take_over_is_sent_again_before_its_end(b: Bench) -> None:
    await b.store.open(new_session(owner="bert"))
    before = b.store.snapshot()
    session = Session(await b.store.take_over(await b.store.load(IDS[0]), "anna"))
    b.made[session] = b.committer.add(session)
    b.decide(session, 5)
    await b.shown(session, 8)
    b.store.restore(before)
    ended = asyncio.create_task(b.of(session).finish(FinishReason.LENGTH))
    while not ended.done():
        record = await b.store.load(IDS[0])
        whole = record.token_ids == tuple(session.tokens.ids)
        assert whole or record.finish_reason is None
        await asyncio.sleep(LATENCY_S / 4)
    await ended
    record = await b.store.load(IDS[0])
    assert (record.epoch, record.owner) == (2, "anna")
    assert record.token_ids == tuple(session.tokens.ids)
    assert record.finish_reason is FinishReason.LENGTH


async def test_waiting_for_a_removed_session_fails(b: Bench) -> None:
    session = await b.session()
    b.store.down = True
    b.decide(session)
    shown = asyncio.create_task(b.shown(session, 4))
    await asyncio.sleep(0.05)
    b.of(session).remove()
    b.of(session).remove()
    with pytest.raises(Unavailable):
        await shown
    b.of(session).notify()
    assert not b.committer.dirty


async def test_close_stores_what_it_can_and_ends_all_waits() -> None:
    b = Bench()
    session, other, sent = [await b.session(k) for k in range(3)]
    b.decide(session)
    b.decide(sent)
    await asyncio.sleep(LATENCY_S / 2)
    b.decide(session, 2)
    shown = asyncio.create_task(b.shown(session, 6))
    never = asyncio.create_task(b.shown(other, 4))
    await asyncio.sleep(0)
    b.committer.close()
    await b.running
    assert await shown == 6
    with pytest.raises(Unavailable):
        await never
    assert await b.stored(session) == tuple(session.tokens.ids)
    assert await b.stored(sent) == tuple(sent.tokens.ids)
    assert (await b.store.load(session.session_id)).finish_reason is None
    b.of(session).notify()
    for refused in (b.of(session).room(), b.of(session).finish(FinishReason.STOP)):
        with pytest.raises(Unavailable, match="not served here"):
            await refused
    with pytest.raises(Unavailable, match="shutting down"):
        b.committer.add(session)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_fails_all_is_stored_once_and_nothing_is_shown_early(
    b: Bench, seed: int
) -> None:
    """Requests and answers are lost, those of ends too, and the store loses its last writes. At
    every moment, everything that may be shown was stored before."""
    dice = random.Random(seed)
    sessions = [await b.session(k) for k in range(4)]
    old = b.store.snapshot()
    longest = {s.session_id: 3 for s in sessions}
    b.store.fails = lambda: dice.choices(["", "request", "answer"], [6, 1, 1])[0]

    async def watch() -> None:
        nonlocal old
        while True:
            for s in sessions:
                length = b.store.length(s.session_id)
                longest[s.session_id] = max(longest[s.session_id], length)
                assert s.showable_length <= longest[s.session_id]
                s.check_integrity()
            if dice.random() < 0.02:
                b.store.restore(old)
            if dice.random() < 0.1:
                old = b.store.snapshot()
            if dice.random() < 0.01:
                b.store.down = not b.store.down
            await asyncio.sleep(LATENCY_S / 10)

    async def generate(session: Session) -> None:
        for _ in range(60):
            await b.of(session).room(17)
            b.decide(session, dice.randint(1, 17))
            await asyncio.sleep(dice.random() / 50)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(generate(s) for s in sessions))
    watcher.cancel()
    [failure] = await asyncio.gather(watcher, return_exceptions=True)
    assert isinstance(failure, asyncio.CancelledError), f"seed {seed}"
    b.store.down = False
    b.store.fails = lambda: dice.choice(["", "request", "answer"])
    await asyncio.gather(*(b.of(s).finish(FinishReason.STOP) for s in sessions))
    for session in sessions:
        record = await b.store.load(session.session_id)
        assert record.token_ids == tuple(session.tokens.ids)
        assert record.finish_reason is FinishReason.STOP
    b.committer.check_integrity()


async def test_a_lease_is_renewed_by_one_call_per_period(b: Bench) -> None:
    sessions = [await b.session(k) for k in range(50)]
    start, before = now(), b.store.num_renewals
    await asyncio.sleep(10)
    periods = (now() - start) * 1000 / limits.SESSION_LEASE_RENEWAL_MS
    assert abs(b.store.num_renewals - before - periods) <= 1
    for session in sessions:
        with pytest.raises(Unavailable):
            await b.store.take_over(await b.store.load(session.session_id), "bert")
    assert not b.store.appends


async def test_a_lease_survives_short_outages_of_the_store_only(b: Bench) -> None:
    session = await b.session()
    seen = await b.store.load(session.session_id)
    await asyncio.sleep(1)
    b.store.down = True
    await asyncio.sleep(2 * limits.SESSION_LEASE_RENEWAL_MS / 1000)
    b.store.down = False
    with pytest.raises(Unavailable):
        await b.store.take_over(seen, "bert")
    b.store.down = True
    await asyncio.sleep(2 * limits.SESSION_LEASE_MS / 1000)
    b.store.down = False
    assert (await b.store.take_over(seen, "bert")).owner == "bert"
    b.decide(session)
    with pytest.raises(StaleEpoch):
        await b.shown(session, 4)
