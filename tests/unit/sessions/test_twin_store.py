from __future__ import annotations

import pytest
from session_model import IDS, OWNERS, end_of, new_session, next_append
from twin_store import TwinStore

from coordinator.decoding.sessions import COMMIT_GRACE_S
from outrider.config import WAIT_MS_MAX
from outrider.errors import DataLoss, NotFound, StaleEpoch, Unavailable
from outrider.limits import DEADLINE_MS_MAX, FINISHED_TTL_S, SESSION_LEASE_MS, SESSION_TTL_S
from outrider.sessions.state import Session
from outrider.sessions.store import Counters, Finish, FinishReason


class Clock:
    now_ms = 1_000.0

    def __call__(self) -> float:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> TwinStore:
    return TwinStore(clock)


async def test_a_lease_ends_exactly_when_it_ends(store: TwinStore, clock: Clock) -> None:
    """A millisecond before, another owner is told how long to wait; then the session is its own."""
    await store.hold_lease(OWNERS[0])
    await store.open(new_session())
    seen = await store.load(IDS[0])
    for _ in range(3):
        clock.now_ms += SESSION_LEASE_MS - 1
        with pytest.raises(Unavailable) as refused:
            await store.take_over(seen, OWNERS[1])
        assert refused.value.retry_after_ms == 1
        await store.hold_lease(OWNERS[0])
    clock.now_ms += SESSION_LEASE_MS
    assert (await store.take_over(seen, OWNERS[1])).epoch == 2


async def test_of_two_that_saw_a_lease_gone_one_takes_the_session_over(
    store: TwinStore,
) -> None:
    """The other one is asked to look again: it finds a new owner then."""
    await store.open(new_session())
    seen = await store.load(IDS[0])
    assert (await store.take_over(seen, OWNERS[1])).epoch == 2
    with pytest.raises(Unavailable, match="meanwhile"):
        await store.take_over(seen, "carl")
    assert (await store.load(IDS[0])).owner == OWNERS[1]


async def test_orphans_and_finished_sessions_expire(store: TwinStore, clock: Clock) -> None:
    await store.open(new_session(IDS[0]))
    await store.open(new_session(IDS[1]))
    await store.finish(end_of(Session(new_session(IDS[1]))))
    clock.now_ms += FINISHED_TTL_S * 1000 - 1
    assert (await store.load(IDS[1])).finish_reason is FinishReason.STOP
    clock.now_ms += 1
    with pytest.raises(NotFound):
        await store.load(IDS[1])
    clock.now_ms += (SESSION_TTL_S - FINISHED_TTL_S) * 1000 - 1
    await store.load(IDS[0])
    clock.now_ms += 1
    with pytest.raises(NotFound):
        await store.load(IDS[0])
    session = Session(new_session())
    session.decide([1], Counters())
    [answer] = await store.append([next_append(session)])
    assert isinstance(answer, DataLoss)


async def test_a_session_that_writes_nothing_does_not_expire_under_its_owner(
    store: TwinStore, clock: Clock
) -> None:
    """Nothing renews its time to live while its target is away for its whole deadline, and its
    client for as long as it may be waited for."""
    await store.open(new_session())
    clock.now_ms += DEADLINE_MS_MAX + WAIT_MS_MAX + COMMIT_GRACE_S * 1e3
    end = end_of(Session(new_session()), FinishReason.DEADLINE)
    assert await store.finish(end) == 3


async def test_expired_sessions_do_not_pile_up(store: TwinStore, clock: Clock) -> None:
    for k in range(100):
        await store.open(new_session(f"{k:032x}"))
        clock.now_ms += SESSION_TTL_S * 1000 / 10
    assert len(store.snapshot()) <= 11


async def test_a_lost_take_over_is_healed_by_its_owner(store: TwinStore) -> None:
    """Both owners have written other tokens after the same prefix; a restart loses the take-over.
    The newer owner's tokens replace the older one's, and the older one stays fenced off."""
    await store.open(new_session())
    old = Session(new_session())
    before = store.snapshot()
    new = Session(await store.take_over(await store.load(IDS[0]), OWNERS[1]))
    store.restore(before)
    old.decide([1, 2], Counters(1))
    [answer] = await store.append([next_append(old)])
    assert answer == 5
    new.decide([3, 4], Counters(1))
    answers = []
    while (append := new.next_append()) is not None:
        answers += await store.append([append])
        assert isinstance(answers[-1], int)
        new.acknowledge(answers[-1])
    assert answers == [0, 5]
    old.acknowledge(5)
    old.decide([3], Counters(2))
    [answer] = await store.append([next_append(old)])
    assert isinstance(answer, StaleEpoch)
    record = await store.load(IDS[0])
    assert (record.token_ids, record.owner) == ((*new_session().token_ids, 3, 4), OWNERS[1])


async def test_tokens_that_are_sent_again_in_parts_uncover_no_shorter_session(
    store: TwinStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is not read, and nothing is finished with it. What was never stored is not shown."""
    monkeypatch.setattr("outrider.sessions.state.APPEND_TOKENS_MAX", 2)
    await store.open(new_session())
    before = store.snapshot()
    new = Session(await store.take_over(await store.load(IDS[0]), OWNERS[1]))
    store.restore(before)
    new.decide([3, 4, 5], Counters(1))
    seen = []
    while (append := new.next_append()) is not None:
        [answer] = await store.append([append])
        assert isinstance(answer, int)
        new.acknowledge(answer)
        partial = Finish(IDS[0], 2, OWNERS[1], 2, FinishReason.STOP, Counters())
        if answer == 2:
            assert await store.finish(partial) == 2
        record = await store.load(IDS[0])
        assert record.finish_reason is None
        assert new.showable_length == len(record.token_ids)
        seen.append((answer, record.token_ids))
    prompt = new_session().token_ids
    assert seen == [
        (0, prompt), (2, prompt), (4, (*prompt, 3)), (6, (*prompt, 3, 4, 5)),
    ]  # fmt: skip


async def test_one_epoch_given_twice_has_one_owner(store: TwinStore) -> None:
    """A lost take-over lets a third coordinator have the same epoch: only one of both may write."""
    await store.open(new_session())
    before, seen = store.snapshot(), await store.load(IDS[0])
    first = Session(await store.take_over(seen, OWNERS[1]))
    store.restore(before)
    second = Session(await store.take_over(seen, "carl"))
    assert first.epoch == second.epoch
    for session in (first, second):
        session.decide([1], Counters())
    [of_first, of_second] = await store.append([next_append(first), next_append(second)])
    assert isinstance(of_first, StaleEpoch)
    assert of_second == 4
