"""Sessions that go on after their stream broke."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from coordinator_bench import REQUEST, Bench, SlowText, bench, failing
from session_links import described
from virtual_time import virtually

from outrider.errors import (
    BadRequest,
    DataLoss,
    Incompatible,
    NotFound,
    Overloaded,
    StaleEpoch,
    StoreUnavailable,
    Unavailable,
)
from outrider.limits import SESSION_LEASE_RENEWAL_MS, TAKE_OVER_RETRY_MS, TAKE_OVERS_MAX
from outrider.request import Event, Finished, ResumeRequest, Started, Tokens
from outrider.sessions.store import FinishReason, SessionRecord, released
from outrider.speculation.sampling_params import Rule
from outrider.tokens import TokenSequence

SEEDED = replace(REQUEST, seed=7, rule=Rule.COUPLED, max_tokens=30)
GRACE_S = 5.0
CANCELLED = FinishReason.CANCELLED


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [v for event in events if isinstance(event, Tokens) for v in event.token_ids]


@dataclass
class Broken:
    """A stream that was not read to its end."""

    heard: list[Event]

    @property
    def session_id(self) -> str:
        started = self.heard[0]
        assert isinstance(started, Started)
        return started.session_id

    @property
    def request(self) -> ResumeRequest:
        return ResumeRequest(self.session_id, len(tokens_of(self.heard)))

    async def goes_on(self, at: Bench) -> list[Event]:
        """It is resumed there, and whole then."""
        rest = [event async for event in at.service.resume(self.request)]
        assert len(tokens_of(self.heard) + tokens_of(rest)) == 30
        return rest

    async def record(self, at: Bench) -> SessionRecord:
        return await at.store.load(self.session_id)

    async def end(self, at: Bench) -> FinishReason | None:
        return (await self.record(at)).finish_reason


async def taken(events: Any, num_tokens: int = 3) -> Broken:
    """Events until so many tokens have come."""
    heard: list[Event] = []
    async for event in events:
        heard.append(event)
        if len(tokens_of(heard)) >= num_tokens:
            break
    return Broken(heard)


async def left(made: Bench, num_tokens: int = 3, **fields: Any) -> Broken:
    """A session whose client has gone, and which is released."""
    async with aclosing(made.service.generate(SEEDED, **fields)) as events:
        found = await taken(events, num_tokens)
    await asyncio.sleep(0.5)
    return found


async def drained(events: Any) -> None:
    async for _ in events:
        pass


def opened(**settings: Any) -> Any:
    return bench(**{"resume_grace_ms": int(GRACE_S * 1e3), **settings})


@asynccontextmanager
async def two(**settings: Any) -> AsyncIterator[tuple[Bench, Bench]]:
    """Coordinators of one store, which are called c and d, and of one target."""
    async with opened(**settings) as made:
        settings = {"resume_grace_ms": int(GRACE_S * 1e3), **settings}
        other = Bench(store=made.store, name="d", target=made.target, **settings)
        await other.service.start()
        yield made, other
        await other.service.close()


def planted(made: Bench, **calls: Any) -> None:
    """Its store answers these calls otherwise."""
    for name, call in calls.items():
        setattr(made.store, name, call)


async def nobody(owner: str) -> list[str]:
    """Its lease runs out."""
    return []


async def unheard(appends: Any) -> list[Any]:
    raise StoreUnavailable("the coordinator is dead")


@virtually
async def test_a_stream_that_broke_goes_on_where_it_was() -> None:
    """The whole is what an unbroken stream gives: noise is keyed by place. So is its text."""
    async with opened(text=SlowText()) as made:
        whole = tokens_of(await made.events(SEEDED))
        broken = await left(made, 10)
        rest = await broken.goes_on(made)
        assert isinstance(rest[0], Started)
        assert tokens_of(broken.heard) + tokens_of(rest) == whole
        told = [e.text_delta for e in (*broken.heard, *rest) if isinstance(e, Tokens)]
        assert "".join(told) == "x" * 30
        last = rest[-1]
        assert isinstance(last, Finished)
        assert last.usage.completion_tokens == 30
        record = await broken.record(made)
        assert (record.epoch, record.finish_reason) == (2, FinishReason.LENGTH)
        again = [e async for e in made.service.resume(ResumeRequest(record.session_id, 28))]
        assert tokens_of(again) == whole[28:]
        assert isinstance(again[-1], Finished)


@virtually
async def test_after_its_coordinator_died_a_session_needs_little_of_its_target() -> None:
    """The record says what the target holds, and nobody told it to forget that."""
    async with two() as (made, other):
        events = made.service.generate(SEEDED)
        broken = await taken(events, 10)
        planted(made, hold_lease=nobody, append=unheard)
        await asyncio.sleep(2.5)
        del made.store.append
        sent: list[Any] = []
        send = other.target_link.send
        other.target_link.send = lambda item: (sent.append(item), send(item))[1]  # type: ignore[method-assign]
        await broken.goes_on(other)
        assert max(len(item.head.append) for item in sent) <= 2 * (2 + 1)
        await events.aclose()


@virtually
async def test_it_goes_on_with_the_same_weights_alone() -> None:
    """And where no target is known another coordinator may have one, or itself once a target has
    said its name again."""
    async with opened() as made:
        broken = await left(made)
        replica = made.service.targets._replicas["t"]
        replica.description = replace(replica.description, dtype="bfloat16")
        with pytest.raises(Incompatible, match="other weights"):
            await broken.goes_on(made)
        await made.service.targets.leave("t")
        with pytest.raises(Unavailable, match="no target is known"):
            await broken.goes_on(made)
        assert (await broken.record(made)).epoch == 1


@virtually
async def test_a_target_of_another_length_is_for_new_sessions_alone() -> None:
    """As in an upgrade: those that have begun stay with targets that are as long as theirs."""
    async with opened() as made:
        broken = await left(made)
        before = made.service.targets._replicas["t"].description
        await made.service.targets.join("n", described(replace(before, max_model_len=8)))
        assert made.service.model.max_model_len == 8
        with pytest.raises(BadRequest, match="length of 8"):
            await drained(made.service.generate(replace(SEEDED, max_tokens=8)))
        await broken.goes_on(made)
        assert (await broken.record(made)).target.replica.endswith("t")


@virtually
async def test_a_session_begins_once_there_is_a_target_and_stays_with_its_weights() -> None:
    """So it can be resumed, also where none was known when it was asked for."""
    async with opened() as made:
        targets = made.service.targets
        replica = targets._replicas.pop("t")
        events = made.service.generate(SEEDED)
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(1.0)
        assert not first.done()
        targets._replicas["t"] = replica
        targets._tell_found()
        broken = Broken([await first])
        await drained(events)
        parameters = json.loads((await broken.record(made)).parameters)
        assert parameters["weights"] == replica.description.weights != ""
        targets._replicas.clear()
        with pytest.raises(Unavailable, match="no target is known"):
            await drained(made.service.generate(SEEDED))


@pytest.mark.parametrize("turns", range(6))
@virtually
async def test_of_two_resumes_at_once_one_goes_on(turns: int) -> None:
    async with opened() as made:
        old = made.service.generate(SEEDED)
        broken = await taken(old)
        waiting = asyncio.create_task(drained(old))
        first = asyncio.create_task(broken.goes_on(made))
        for _ in range(turns):
            await asyncio.sleep(0)
        second = asyncio.create_task(broken.goes_on(made))
        results = await asyncio.gather(first, second, return_exceptions=True)
        # The other one was superseded, or saw an owner that has changed since.
        assert {True, False} == {isinstance(one, StaleEpoch | Unavailable) for one in results}
        assert sum(isinstance(one, list) for one in results) == 1
        with pytest.raises(StaleEpoch):
            await waiting
        assert asyncio.get_running_loop().time() < 10
        assert await broken.end(made) is FinishReason.LENGTH


@pytest.mark.parametrize("turns", range(1, 8))
@virtually
async def test_a_resume_that_is_given_up_leaves_nothing_behind(turns: int) -> None:
    """The integrity of the coordinator is checked at the end; and it may be resumed again."""
    async with opened() as made:
        old = made.service.generate(SEEDED)
        broken = await taken(old)
        waiting = asyncio.create_task(drained(old))
        given_up = asyncio.ensure_future(anext(made.service.resume(broken.request)))
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, waiting, return_exceptions=True)
        assert asyncio.get_running_loop().time() < 10
        if await broken.end(made) is None:
            await broken.goes_on(made)


@virtually
async def test_a_request_that_cannot_be_met_harms_no_stream() -> None:
    async with opened() as made:
        events = made.service.generate(SEEDED, tenant="a")
        broken = await taken(events)
        with pytest.raises(DataLoss, match="num_tokens"):
            await anext(made.service.resume(replace(broken.request, num_tokens=999), tenant="a"))
        for session_id, tenant in ((broken.session_id, "b"), ("f" * 32, "a")):
            with pytest.raises(NotFound):
                await anext(made.service.resume(ResumeRequest(session_id), tenant=tenant))
        await drained(events)
        record = await broken.record(made)
        assert (record.epoch, record.finish_reason) == (1, FinishReason.LENGTH)


@virtually
async def test_a_coordinator_that_closes_leaves_its_sessions_to_others() -> None:
    """At once."""
    async with two() as (made, other):
        async with aclosing(made.service.generate(SEEDED)) as events:
            broken = await taken(events)
        await made.service.close()
        await broken.goes_on(other)


@virtually
async def test_what_is_left_of_the_deadline_counts() -> None:
    async with opened() as made:
        broken = await left(made)
        request = replace(broken.request, deadline_ms=60)
        *_, last = [event async for event in made.service.resume(request)]
        assert isinstance(last, Finished)
        assert last.finish_reason is FinishReason.DEADLINE


class Tailed(SlowText):
    """Holds a mark back until the end."""

    def stream(self) -> Any:
        return Tailed()

    def finish(self) -> str:
        return "!"


@virtually
async def test_text_that_was_held_back_comes_once_the_end_is_stored() -> None:
    """Before, a session that is resumed might tell it again."""
    async with opened(text=Tailed()) as made:
        finishes, finish, told = [], made.store.finish, []

        async def noted(*arguments: Any) -> int:
            finishes.append(arguments)
            return await finish(*arguments)

        planted(made, finish=noted)
        async for event in made.service.generate(replace(SEEDED, deadline_ms=105)):
            if isinstance(event, Tokens):
                told.append(event.text_delta)
                assert bool(finishes) == (event.text_delta == "!")
        assert isinstance(event, Finished)
        assert event.finish_reason is FinishReason.DEADLINE
        assert told.index("!") == len(told) - 1


@virtually
async def test_resumes_are_admitted_as_requests_are() -> None:
    async with opened(max_sessions=2) as made:
        each = [await left(made) for _ in range(3)]
        results = await asyncio.gather(*(one.goes_on(made) for one in each), return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) == 1
        assert sum(isinstance(result, list) for result in results) == 2


@virtually
async def test_only_so_many_sessions_are_taken_over_at_a_time() -> None:
    """A coordinator died with twice as many: those beyond the bound are told when to ask again,
    and all go on in the end."""
    async with two(resume_grace_ms=60_000, max_sessions=1_000) as (made, other):
        each = [await left(made) for _ in range(2 * TAKE_OVERS_MAX)]
        take_over = made.store.take_over
        under_way, most = 0, 0
        refused: list[int] = []

        async def slow(*arguments: Any) -> SessionRecord:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.02)
            under_way -= 1
            return await take_over(*arguments)

        planted(made, take_over=slow)

        async def resumed(one: Broken) -> None:
            while True:
                try:
                    await one.goes_on(other)
                    return
                except Unavailable as error:
                    refused.append(error.retry_after_ms)
                await asyncio.sleep(TAKE_OVER_RETRY_MS / 1e3)

        await asyncio.gather(*map(resumed, each))
        assert most == TAKE_OVERS_MAX
        assert refused.count(TAKE_OVER_RETRY_MS) == len(refused) >= TAKE_OVERS_MAX


@virtually
async def test_clients_that_do_not_read_finished_sessions_keep_no_others_out() -> None:
    async with opened(max_sessions=1_000) as made:
        done = Broken(await made.events(SEEDED))
        broken = await left(made)
        unread = [made.service.resume(done.request) for _ in range(TAKE_OVERS_MAX)]
        for one in unread:
            assert isinstance(await anext(one), Started)
        await broken.goes_on(made)
        for one in unread:
            await one.aclose()


@virtually
async def test_a_session_without_a_client_is_anyones_and_then_cancelled() -> None:
    """Its coordinator lives and holds its lease, but does not hold this session. Nothing is decoded
    for nobody; its client may still cancel it, or hear its end."""
    async with opened() as made:
        first, second, third = [await left(made) for _ in range(3)]
        taken_over = await made.store.take_over(await first.record(made), "other")
        assert taken_over.epoch == 2
        await made.service.cancel(third.session_id)
        assert await third.end(made) is CANCELLED
        length = len((await second.record(made)).token_ids)
        await asyncio.sleep(GRACE_S + 1.0)
        assert [await one.end(made) for one in (first, second)] == [None, CANCELLED]
        assert len((await second.record(made)).token_ids) == length
        *_, last = [event async for event in made.service.resume(second.request)]
        assert isinstance(last, Finished)
        assert last.finish_reason is CANCELLED


@virtually
async def test_another_coordinators_session_is_waited_for() -> None:
    """While it runs there: it may still decide tokens. When its client is gone, it is released."""
    async with two() as (made, other):
        async with aclosing(made.service.generate(SEEDED)) as events:
            broken = await taken(events)
            with pytest.raises(Unavailable) as refused:
                await broken.goes_on(other)
            with pytest.raises(Unavailable, match="has an owner"):
                await other.service.cancel(broken.session_id)
            assert 0 < refused.value.retry_after_ms <= 2000
        await asyncio.sleep(0.5)
        await broken.goes_on(other)


async def lose_release(made: Bench, broken: Broken) -> None:
    """The store forgets the release of a session, as one does that fails over."""
    kept = made.store.snapshot()
    one = kept[broken.session_id]
    assert one.record.owner == released("c")
    kept[broken.session_id] = replace(one, record=replace(one.record, owner="c"))
    made.store.restore(kept)
    await made.store.hold_lease("c")


async def want(made: Bench, broken: Broken) -> None:
    await made.service._sessions.release_wanted(broken.session_id)


async def ask(at: Bench, broken: Broken, *, by_cancel: bool) -> None:
    if by_cancel:
        await at.service.cancel(broken.session_id)
    else:
        await broken.goes_on(at)


@pytest.mark.parametrize("by_cancel", [False, True])
@virtually
async def test_a_session_whose_release_was_lost_is_released_when_it_is_wanted(
    by_cancel: bool,
) -> None:
    """The coordinator that lives and is stored as its owner learns it with its lease."""
    async with two(resume_grace_ms=60_000) as (made, other):
        broken = await left(made)
        await lose_release(made, broken)
        await asyncio.sleep(5.0)
        with pytest.raises(Unavailable, match="has an owner"):
            await ask(other, broken, by_cancel=by_cancel)
        await asyncio.sleep(SESSION_LEASE_RENEWAL_MS / 1e3)
        await ask(other, broken, by_cancel=by_cancel)
        assert await broken.end(made) is (CANCELLED if by_cancel else FinishReason.LENGTH)


@virtually
async def test_a_session_that_runs_stays_however_it_is_wanted() -> None:
    """So does one that is just being taken over: its stream would end with `StaleEpoch`."""
    async with opened(resume_grace_ms=60_000) as made:
        events = made.service.generate(SEEDED)
        broken = await taken(events)
        load = made.store.load
        planted(made, load=nobody)
        await want(made, broken)
        planted(made, load=load)
        await events.aclose()
        await asyncio.sleep(0.5)
        take_over, wanted = made.store.take_over, []

        async def watched(*arguments: Any) -> SessionRecord:
            record = await take_over(*arguments)
            wanted.append(await want(made, broken))
            return record

        planted(made, take_over=watched)
        await broken.goes_on(made)
        assert wanted


@virtually
async def test_a_cancellation_that_is_not_recorded_is_no_success() -> None:
    """It is recorded later, once the store answers, though the session is wanted meanwhile."""
    async with opened(resume_grace_ms=600_000) as made:
        broken = await left(made)
        until = asyncio.get_running_loop().time() + 60.0
        planted(made, finish=failing(made.store.finish, until))
        with pytest.raises(StoreUnavailable, match="once the session store answers"):
            await made.service.cancel(broken.session_id)
        await want(made, broken)
        await asyncio.sleep(61.0)
        assert await broken.end(made) is CANCELLED


@virtually
async def test_a_session_is_not_resumed_while_its_release_is_on_its_way() -> None:
    """Its epoch may be given once more by a store that has lost it, and the release would end what
    runs under it."""
    async with opened(resume_grace_ms=600_000) as made:
        broken = await left(made)
        before = made.store.snapshot()
        await made.store.take_over(await broken.record(made), "c")
        until = asyncio.get_running_loop().time() + 5.0
        planted(made, release=failing(made.store.release, until))
        await want(made, broken)
        await asyncio.sleep(0.5)
        made.store.restore(before)
        with pytest.raises(Unavailable, match="try again"):
            await broken.goes_on(made)
        await asyncio.sleep(10.0)
        await broken.goes_on(made)


@virtually
async def test_a_take_over_waits_for_the_release_of_the_one_before() -> None:
    """The store has not carried out the first one, so the second is given the same epoch: the
    release would end it."""
    async with opened(resume_grace_ms=60_000) as made:
        broken = await left(made)
        take_over, release = made.store.take_over, made.store.release

        async def lost(seen: SessionRecord, owner: str, note: Any) -> SessionRecord:
            note()
            raise StoreUnavailable("the question is lost")

        async def slow(*arguments: Any) -> None:
            await asyncio.sleep(1.0)
            await release(*arguments)

        planted(made, take_over=lost, release=slow)
        with pytest.raises(StoreUnavailable):
            await broken.goes_on(made)
        planted(made, take_over=take_over)
        with pytest.raises(Unavailable, match="try again"):
            await broken.goes_on(made)
        await asyncio.sleep(1.5)
        await broken.goes_on(made)


@virtually
async def test_a_take_over_that_is_refused_releases_nothing() -> None:
    """Another coordinator's lease lasts, or cannot be read: it runs the session."""
    async with two() as (made, other):
        releases: list[Any] = []

        async def noted(*arguments: Any) -> None:
            releases.append(arguments)

        events = made.service.generate(SEEDED)
        broken = await taken(events)
        take_over = made.store.take_over

        async def unread(*_: Any) -> SessionRecord:
            raise StoreUnavailable("no lease was read")

        async def refused(seen: Any, owner: str, note: Any) -> SessionRecord:
            note()
            raise Unavailable("taken over")

        planted(made, release=noted)
        for call in (take_over, unread, refused):
            planted(made, take_over=call)
            with pytest.raises(Unavailable):
                await broken.goes_on(other)
        await asyncio.sleep(0.1)
        assert not releases
        await drained(events)


@virtually
async def test_a_session_whose_end_was_not_recorded_is_given_up_later() -> None:
    async with opened(resume_grace_ms=1_000) as made:
        until = asyncio.get_running_loop().time() + 60.0
        planted(made, finish=failing(made.store.finish, until))
        broken = await left(made, resumable=False)
        await asyncio.sleep(61.0)
        assert await broken.end(made) is CANCELLED


@virtually
async def test_a_session_that_cannot_begin_is_recorded_as_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as made:

        def broken(*arguments: Any) -> None:
            raise Unavailable("nothing runs here")

        with monkeypatch.context() as patched:
            patched.setattr(made.service._committer, "add", broken)
            with pytest.raises(Unavailable):
                await anext(made.service.generate(SEEDED))
        await asyncio.sleep(0.1)
        [kept] = made.store.snapshot().values()
        assert kept.record.finish_reason is CANCELLED
        assert not made.service._committer._entries


@virtually
async def test_a_client_is_checked_against_the_record_that_is_taken_over() -> None:
    """Other tokens were stored after the record was read for the first time."""
    async with opened(resume_grace_ms=60_000) as made:
        broken = await left(made)
        take_over = made.store.take_over

        async def replaced(seen: SessionRecord, *arguments: Any) -> SessionRecord:
            kept = made.store.snapshot()
            first, *others = seen.token_ids[seen.prompt_length :]
            ids = (*seen.token_ids[: seen.prompt_length], (first + 1) % 8, *others)
            record = replace(seen, token_ids=ids, prefix_digest=TokenSequence(ids).digest())
            changed = replace(kept[seen.session_id], record=record)
            made.store.restore({**kept, seen.session_id: changed})
            return await take_over(seen, *arguments)

        planted(made, take_over=replaced)
        digest = TokenSequence(tokens_of(broken.heard)).digest()
        with pytest.raises(DataLoss, match="tokens_digest"):
            await anext(made.service.resume(replace(broken.request, tokens_digest=digest)))
        await asyncio.sleep(0.1)
        assert (await broken.record(made)).owner == released("c")
