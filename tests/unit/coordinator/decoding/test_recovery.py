"""Sessions that go on after their stream broke."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
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
from outrider.sessions.store import FinishReason, SessionRecord, SessionState, released
from outrider.speculation.sampling_params import Rule
from outrider.tokens import TokenSequence


async def taken(events: Any, num_tokens: int) -> tuple[list[Event], str, int]:
    """Events until so many tokens have come; the session, and how many those were."""
    heard: list[Event] = []
    session_id, num = "", 0
    async for event in events:
        heard.append(event)
        if isinstance(event, Started):
            session_id = event.session_id
        if isinstance(event, Tokens):
            num += len(event.token_ids)
            if num >= num_tokens:
                break
    return heard, session_id, num


async def left(made: Bench) -> tuple[list[Event], str, int]:
    """As `taken`, of a session whose client has gone behind three tokens and which is released."""
    async with aclosing(made.service.generate(SEEDED)) as events:
        found = await taken(events, 3)
    await asyncio.sleep(0.5)
    return found


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [v for event in events if isinstance(event, Tokens) for v in event.token_ids]


SEEDED = replace(REQUEST, seed=7, rule=Rule.COUPLED, max_tokens=30)


@virtually
async def test_a_stream_that_broke_goes_on_where_it_was() -> None:
    """The whole is what an unbroken stream gives: noise is keyed by place."""
    async with bench(resume_grace_ms=5_000) as made:
        whole = tokens_of(await made.events(SEEDED))
        async with aclosing(made.service.generate(SEEDED)) as events:
            heard, session_id, num = await taken(events, 10)
        rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
        assert isinstance(rest[0], Started)
        assert tokens_of(heard) + tokens_of(rest) == whole
        last = rest[-1]
        assert isinstance(last, Finished)
        assert last.usage.completion_tokens == 30
        record = await made.store.load(session_id)
        assert record.epoch == 2
        assert record.finish_reason is FinishReason.LENGTH
        again = [e async for e in made.service.resume(ResumeRequest(session_id, 28))]
        assert tokens_of(again) == whole[28:]
        assert isinstance(again[-1], Finished)


@virtually
async def test_after_its_coordinator_died_a_session_needs_little_of_its_target() -> None:
    """The record says what the target holds, and nobody told it to forget that."""
    async with bench(resume_grace_ms=5_000) as made:
        other = Bench(resume_grace_ms=5_000, store=made.store, name="d", target=made.target)
        await other.service.start()
        events = made.service.generate(SEEDED)
        heard, session_id, num = await taken(events, 10)
        made.store.hold_lease = nobody  # type: ignore[method-assign]
        made.store.append = unheard  # type: ignore[method-assign]
        await asyncio.sleep(2.5)
        del made.store.append
        sent: list[Any] = []
        send = other.target_link.send

        def seen(item: Any) -> None:
            sent.append(item)
            send(item)

        other.target_link.send = seen  # type: ignore[method-assign]
        rest = [e async for e in other.service.resume(ResumeRequest(session_id, num))]
        assert len(tokens_of(heard)) + len(tokens_of(rest)) == 30
        assert max(len(item.head.append) for item in sent) <= 2 * (2 + 1)
        await events.aclose()
        await other.service.close()


async def nobody(owner: str) -> list[str]:
    """Its lease runs out."""
    return []


async def unheard(appends: Any) -> list[Any]:
    raise StoreUnavailable("the coordinator is dead")


@virtually
async def test_it_goes_on_with_the_same_weights_alone() -> None:
    async with bench(resume_grace_ms=5_000) as made:
        async with aclosing(made.service.generate(SEEDED)) as events:
            _, session_id, num = await taken(events, 3)
        office = made.service.targets._replicas["t"]
        office.description = replace(office.description, dtype="bfloat16")
        with pytest.raises(Incompatible, match="other weights"):
            await anext(made.service.resume(ResumeRequest(session_id, num)))
        assert (await made.store.load(session_id)).epoch == 1


@virtually
async def test_a_target_of_another_length_is_for_new_sessions_alone() -> None:
    """As in an upgrade: those that have begun stay with targets that are as long as theirs."""
    async with bench(resume_grace_ms=5_000) as made:
        async with aclosing(made.service.generate(SEEDED)) as events:
            _, session_id, num = await taken(events, 3)
        before = made.service.targets._replicas["t"].description
        await made.service.targets.join("n", described(replace(before, max_model_len=8)))
        assert made.service.model.max_model_len == 8
        with pytest.raises(BadRequest, match="length of 8"):
            await drained(made.service.generate(replace(SEEDED, max_tokens=8)))
        last = [e async for e in made.service.resume(ResumeRequest(session_id, num))][-1]
        assert isinstance(last, Finished)
        assert (await made.store.load(session_id)).target.replica.endswith("t")


@virtually
async def test_a_coordinator_that_knows_no_target_says_that_it_cannot_now() -> None:
    """Another one may, or itself once a target has said its name again."""
    async with bench(resume_grace_ms=5_000) as made:
        async with aclosing(made.service.generate(SEEDED)) as events:
            _, session_id, num = await taken(events, 3)
        await made.service.targets.leave("t")
        with pytest.raises(Unavailable, match="no target is known"):
            await anext(made.service.resume(ResumeRequest(session_id, num)))


@virtually
async def test_a_session_begins_once_there_is_a_target_and_stays_with_its_weights() -> None:
    """So it can be resumed, also where none was known when it was asked for."""
    async with bench(resume_grace_ms=5_000) as made:
        office = made.service.targets._replicas.pop("t")
        events = made.service.generate(SEEDED)
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(1.0)
        assert not first.done()
        made.service.targets._replicas["t"] = office
        made.service.targets._tell_found()
        started = await first
        assert isinstance(started, Started)
        await drained(events)
        record = await made.store.load(started.session_id)
        assert json.loads(record.parameters)["weights"] == office.description.weights != ""
        made.service.targets._replicas.clear()
        with pytest.raises(Unavailable, match="no target is known"):
            await drained(made.service.generate(SEEDED))


@pytest.mark.parametrize("turns", range(6))
@virtually
async def test_of_two_resumes_at_once_one_goes_on(turns: int) -> None:
    async with bench(resume_grace_ms=5_000) as made:
        old = made.service.generate(SEEDED)
        heard, session_id, num = await taken(old, 3)
        waiting = asyncio.create_task(drained(old))

        async def resumed() -> list[Event]:
            return [e async for e in made.service.resume(ResumeRequest(session_id, num))]

        first = asyncio.create_task(resumed())
        for _ in range(turns):
            await asyncio.sleep(0)
        second = asyncio.create_task(resumed())
        results = await asyncio.gather(first, second, return_exceptions=True)
        whole = [r for r in results if isinstance(r, list)]
        assert len(whole) == 1
        assert len(tokens_of(heard) + tokens_of(whole[0])) == 30
        # The other one was superseded, or saw an owner that has changed since.
        assert any(isinstance(r, StaleEpoch | Unavailable) for r in results)
        with pytest.raises(StaleEpoch):
            await waiting
        assert asyncio.get_running_loop().time() < 10
        assert (await made.store.load(session_id)).finish_reason is FinishReason.LENGTH


async def drained(events: Any) -> None:
    async for _ in events:
        pass


@pytest.mark.parametrize("turns", range(1, 8))
@virtually
async def test_a_resume_that_is_given_up_leaves_nothing_behind(turns: int) -> None:
    """The integrity of the coordinator is checked at the end; and it may be resumed again."""
    async with bench(resume_grace_ms=5_000) as made:
        old = made.service.generate(SEEDED)
        heard, session_id, num = await taken(old, 3)
        waiting = asyncio.create_task(drained(old))
        given_up = asyncio.ensure_future(anext(made.service.resume(ResumeRequest(session_id, num))))
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, waiting, return_exceptions=True)
        assert asyncio.get_running_loop().time() < 10
        record = await made.store.load(session_id)
        if record.finish_reason is None:
            rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
            assert len(tokens_of(heard) + tokens_of(rest)) == 30


@virtually
async def test_a_request_that_cannot_be_met_harms_no_stream() -> None:
    async with bench(resume_grace_ms=5_000) as made:
        events = made.service.generate(SEEDED)
        _, session_id, _ = await taken(events, 3)
        with pytest.raises(DataLoss, match="num_tokens"):
            await anext(made.service.resume(ResumeRequest(session_id, 999)))
        await drained(events)
        record = await made.store.load(session_id)
        assert (record.epoch, record.finish_reason) == (1, FinishReason.LENGTH)


@virtually
async def test_a_coordinator_that_closes_leaves_its_sessions_to_others() -> None:
    """At once."""
    async with bench(resume_grace_ms=5_000) as made:
        other = Bench(resume_grace_ms=5_000, store=made.store, name="d")
        await other.service.start()
        async with aclosing(made.service.generate(SEEDED)) as events:
            heard, session_id, num = await taken(events, 3)
        await made.service.close()
        rest = [e async for e in other.service.resume(ResumeRequest(session_id, num))]
        assert len(tokens_of(heard) + tokens_of(rest)) == 30
        await other.service.close()


@virtually
async def test_what_is_left_of_the_deadline_counts() -> None:
    async with bench(resume_grace_ms=5_000) as made:
        long = replace(SEEDED, max_tokens=60)
        async with aclosing(made.service.generate(long)) as events:
            _, session_id, num = await taken(events, 3)
        request = ResumeRequest(session_id, num, deadline_ms=100)
        rest = [e async for e in made.service.resume(request)]
        assert isinstance(rest[-1], Finished)
        assert rest[-1].finish_reason is FinishReason.DEADLINE


class Tailed(SlowText):
    """Holds a mark back until the end."""

    def stream(self) -> Any:
        return Tailed()

    def finish(self) -> str:
        return "!"


@virtually
async def test_text_that_was_held_back_comes_once_the_end_is_stored() -> None:
    """Before, a session that is resumed might tell it again."""
    async with bench(text=Tailed(), resume_grace_ms=5_000) as made:
        finishes, finish = [], made.store.finish

        async def noted(*arguments: Any) -> int:
            finishes.append(arguments)
            return await finish(*arguments)

        made.store.finish = noted  # type: ignore[method-assign]
        told = []
        async for event in made.service.generate(replace(SEEDED, deadline_ms=105)):
            if isinstance(event, Tokens):
                told.append(event.text_delta)
                assert bool(finishes) == (event.text_delta == "!")
        assert isinstance(event, Finished)
        assert event.finish_reason is FinishReason.DEADLINE
        assert told[-1] == "!"
        assert "!" not in told[:-1]


@virtually
async def test_resumes_are_admitted_as_requests_are() -> None:
    async with bench(resume_grace_ms=5_000, max_sessions=2) as made:
        ids = []
        for _ in range(3):
            async with aclosing(made.service.generate(SEEDED)) as events:
                ids.append((await taken(events, 3))[1])

        async def resumed(session_id: str) -> None:
            await drained(made.service.resume(ResumeRequest(session_id)))

        results = await asyncio.gather(*map(resumed, ids), return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) == 1
        assert results.count(None) == 2


@virtually
async def test_only_so_many_sessions_are_taken_over_at_a_time() -> None:
    """A coordinator died with twice as many: those beyond the bound are told when to ask again,
    and all go on in the end."""
    async with bench(resume_grace_ms=60_000, max_sessions=1_000) as made:
        ids = []
        for _ in range(2 * TAKE_OVERS_MAX):
            async with aclosing(made.service.generate(SEEDED)) as events:
                ids.append((await taken(events, 3))[1])
        await asyncio.sleep(0.1)
        other = Bench(store=made.store, name="d", max_sessions=1_000)
        await other.service.start()
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

        made.store.take_over = slow  # type: ignore[method-assign]

        async def resumed(session_id: str) -> None:
            while True:
                try:
                    return await drained(other.service.resume(ResumeRequest(session_id)))
                except Unavailable as error:
                    refused.append(error.retry_after_ms)
                await asyncio.sleep(TAKE_OVER_RETRY_MS / 1e3)

        await asyncio.gather(*map(resumed, ids))
        assert most == TAKE_OVERS_MAX
        assert refused.count(TAKE_OVER_RETRY_MS) == len(refused) >= TAKE_OVERS_MAX
        records = [await made.store.load(session_id) for session_id in ids]
        assert {record.finish_reason for record in records} == {FinishReason.LENGTH}
        await other.service.close()


@virtually
async def test_a_session_without_a_client_is_anyones_and_then_cancelled() -> None:
    """Its coordinator lives and holds its lease, but does not hold this session."""
    async with bench(resume_grace_ms=5_000) as made:
        ids = []
        for _ in range(2):
            async with aclosing(made.service.generate(SEEDED)) as events:
                ids.append((await taken(events, 3))[1])
        await asyncio.sleep(0.5)
        seen = [await made.store.load(session_id) for session_id in ids]
        assert all(record.finish_reason is None for record in seen)
        taken_over = await made.store.take_over(seen[0], "other")
        assert taken_over.epoch == 2
        await asyncio.sleep(6)
        ends = [(await made.store.load(session_id)).finish_reason for session_id in ids]
        assert ends == [None, FinishReason.CANCELLED]


@virtually
async def test_a_client_that_does_not_come_back_has_cancelled() -> None:
    async with bench(resume_grace_ms=5_000) as made:
        async with aclosing(made.service.generate(SEEDED)) as events:
            _, session_id, num = await taken(events, 3)
        await asyncio.sleep(0.1)
        record = await made.store.load(session_id)
        assert record.state is SessionState.RUNNING
        length = len(record.token_ids)
        await asyncio.sleep(6.0)
        record = await made.store.load(session_id)
        assert record.finish_reason is FinishReason.CANCELLED
        assert len(record.token_ids) == length  # Nothing was decoded for nobody.
        rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
        assert isinstance(rest[-1], Finished)
        assert rest[-1].finish_reason is FinishReason.CANCELLED


@virtually
async def test_a_client_that_is_gone_may_still_cancel() -> None:
    async with bench(resume_grace_ms=5_000) as made:
        async with aclosing(made.service.generate(SEEDED)) as events:
            _, session_id, _ = await taken(events, 3)
        await made.service.cancel(session_id)
        record = await made.store.load(session_id)
        assert record.finish_reason is FinishReason.CANCELLED


@virtually
async def test_who_may_resume_what() -> None:
    async with bench(resume_grace_ms=5_000) as made:
        with pytest.raises(NotFound):
            await anext(made.service.resume(ResumeRequest("f" * 32)))
        async with aclosing(made.service.generate(SEEDED, tenant="a")) as events:
            _, session_id, _ = await taken(events, 3)
        with pytest.raises(NotFound):
            await anext(made.service.resume(ResumeRequest(session_id), tenant="b"))


@virtually
async def test_another_coordinators_session_is_waited_for() -> None:
    """While it runs there: it may still decide tokens. When its client is gone, it is released."""
    async with bench(resume_grace_ms=5_000) as made:
        other = Bench(resume_grace_ms=5_000, store=made.store, name="d")
        await other.service.start()
        async with aclosing(made.service.generate(SEEDED)) as events:
            heard, session_id, num = await taken(events, 3)
            with pytest.raises(Unavailable) as refused:
                await anext(other.service.resume(ResumeRequest(session_id, num)))
            with pytest.raises(Unavailable, match="has an owner"):
                await other.service.cancel(session_id)
            assert 0 < refused.value.retry_after_ms <= 2000
        await asyncio.sleep(0.5)
        rest = [e async for e in other.service.resume(ResumeRequest(session_id, num))]
        assert len(tokens_of(heard) + tokens_of(rest)) == 30
        await other.service.close()


async def lose_release(made: Bench, session_id: str) -> None:
    """The store forgets the release of a session, as one does that fails over."""
    kept = made.store.snapshot()
    one = kept[session_id]
    assert one.record.owner == released("c")
    kept[session_id] = replace(one, record=replace(one.record, owner="c"))
    made.store.restore(kept)
    await made.store.hold_lease("c")


@pytest.mark.parametrize("by_cancel", [False, True])
@virtually
async def test_a_session_whose_release_was_lost_is_released_when_it_is_wanted(
    by_cancel: bool,
) -> None:
    """The coordinator that lives and is stored as its owner learns it with its lease."""
    async with bench(resume_grace_ms=60_000) as made:
        other = Bench(resume_grace_ms=60_000, store=made.store, name="d")
        await other.service.start()
        heard, session_id, num = await left(made)
        await lose_release(made, session_id)
        await asyncio.sleep(5.0)
        with pytest.raises(Unavailable, match="has an owner"):
            if by_cancel:
                await other.service.cancel(session_id)
            else:
                await anext(other.service.resume(ResumeRequest(session_id, num)))
        await asyncio.sleep(SESSION_LEASE_RENEWAL_MS / 1e3)
        if by_cancel:
            await other.service.cancel(session_id)
            record = await made.store.load(session_id)
            assert record.finish_reason is FinishReason.CANCELLED
        else:
            rest = [e async for e in other.service.resume(ResumeRequest(session_id, num))]
            assert len(tokens_of(heard) + tokens_of(rest)) == 30
        await other.service.close()


@pytest.mark.parametrize("begins", [False, True])
@virtually
async def test_a_session_that_runs_stays_however_it_is_wanted(begins: bool) -> None:
    """So does one that is just being taken over: its stream would end with `StaleEpoch`."""
    async with bench(resume_grace_ms=60_000) as made:
        events = made.service.generate(SEEDED)
        heard, session_id, num = await taken(events, 3)
        if begins:
            await events.aclose()
            await asyncio.sleep(0.5)
            take_over = made.store.take_over
            wanted: list[str] = []

            async def watched(*arguments: Any) -> SessionRecord:
                record = await take_over(*arguments)
                await made.service._sessions.release_wanted(session_id)
                wanted.append(session_id)
                return record

            made.store.take_over = watched  # type: ignore[method-assign]
            rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
            assert wanted
        else:
            load, made.store.load = made.store.load, nobody  # type: ignore[method-assign]
            await made.service._sessions.release_wanted(session_id)
            made.store.load = load  # type: ignore[method-assign]
            rest = [e async for e in events]
        assert len(tokens_of(heard) + tokens_of(rest)) == 30


@virtually
async def test_a_session_whose_release_was_lost_is_cancelled_if_it_is_not_resumed() -> None:
    """Its client asked once and then stayed away: the time that it has begins anew."""
    async with bench(resume_grace_ms=5_000) as made:
        _, session_id, _ = await left(made)
        await lose_release(made, session_id)
        await asyncio.sleep(6.0)
        await made.service._sessions.release_wanted(session_id)
        await asyncio.sleep(4.0)
        assert (await made.store.load(session_id)).owner == released("c")
        await asyncio.sleep(2.0)
        record = await made.store.load(session_id)
        assert record.finish_reason is FinishReason.CANCELLED


@virtually
async def test_a_cancel_that_is_recorded_later_is_not_undone_when_the_session_is_wanted() -> None:
    async with bench(resume_grace_ms=600_000) as made:
        _, session_id, _ = await left(made)
        until = asyncio.get_running_loop().time() + 15.0
        made.store.finish = failing(made.store.finish, until)  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="once the session store answers"):
            await made.service.cancel(session_id)
        await made.service._sessions.release_wanted(session_id)
        await asyncio.sleep(20.0)
        record = await made.store.load(session_id)
        assert record.finish_reason is FinishReason.CANCELLED


@virtually
async def test_a_session_is_not_resumed_while_its_release_is_on_its_way() -> None:
    """Its epoch may be given once more by a store that has lost it, and the release would end what
    runs under it."""
    async with bench(resume_grace_ms=600_000) as made:
        heard, session_id, num = await left(made)
        before = made.store.snapshot()
        await made.store.take_over(await made.store.load(session_id), "c")
        release, until = made.store.release, asyncio.get_running_loop().time() + 5.0
        made.store.release = failing(release, until)  # type: ignore[method-assign]
        await made.service._sessions.release_wanted(session_id)
        await asyncio.sleep(0.5)
        made.store.restore(before)
        request = ResumeRequest(session_id, num)
        with pytest.raises(Unavailable, match="try again"):
            await anext(made.service.resume(request))
        await asyncio.sleep(10.0)
        rest = [e async for e in made.service.resume(request)]
        assert len(tokens_of(heard) + tokens_of(rest)) == 30


@virtually
async def test_text_of_a_resumed_session_goes_on() -> None:
    async with bench(text=SlowText(), resume_grace_ms=5_000) as made:
        async with aclosing(made.service.generate(SEEDED)) as events:
            heard, session_id, num = await taken(events, 10)
        rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
        told = [e.text_delta for e in (*heard, *rest) if isinstance(e, Tokens)]
        assert "".join(told) == "x" * 30


@pytest.mark.parametrize("by_cancel", [False, True])
@pytest.mark.parametrize("away_s", [0.0, 30.0])
@virtually
async def test_a_take_over_whose_answer_is_lost_leaves_the_session_to_others(
    by_cancel: bool, away_s: float
) -> None:
    """The store carried it out. The coordinator that asked lives, but does not run the session."""
    async with bench(resume_grace_ms=60_000) as made:
        other = Bench(resume_grace_ms=60_000, store=made.store, name="d")
        await other.service.start()
        heard, session_id, num = await left(made)
        take_over, release = made.store.take_over, made.store.release
        until = asyncio.get_running_loop().time() + away_s

        async def unheard_take_over(*arguments: Any) -> SessionRecord:
            await take_over(*arguments)
            raise StoreUnavailable("the answer is lost")

        made.store.take_over = unheard_take_over  # type: ignore[method-assign]
        made.store.release = failing(release, until)  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            if by_cancel:
                await other.service.cancel(session_id)
            else:
                await anext(other.service.resume(ResumeRequest(session_id, num)))
        made.store.take_over = take_over  # type: ignore[method-assign]
        await asyncio.sleep(away_s + 1.0)
        rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
        assert len(tokens_of(heard) + tokens_of(rest)) == 30
        await other.service.close()


@virtually
async def test_a_take_over_waits_for_the_release_of_the_one_before() -> None:
    """The store has not carried out the first one, so the second is given the same epoch: the
    release would end it."""
    async with bench(resume_grace_ms=60_000) as made:
        heard, session_id, num = await left(made)
        take_over, release = made.store.take_over, made.store.release

        async def lost(seen: SessionRecord, owner: str, note: Any) -> SessionRecord:
            note()
            raise StoreUnavailable("the question is lost")

        async def slow(*arguments: Any) -> None:
            await asyncio.sleep(1.0)
            await release(*arguments)

        made.store.take_over = lost  # type: ignore[method-assign]
        made.store.release = slow  # type: ignore[method-assign]
        request = ResumeRequest(session_id, num)
        with pytest.raises(StoreUnavailable):
            await anext(made.service.resume(request))
        made.store.take_over = take_over  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="try again"):
            await anext(made.service.resume(request))
        await asyncio.sleep(1.5)
        rest = [e async for e in made.service.resume(request)]
        assert len(tokens_of(heard) + tokens_of(rest)) == 30


@virtually
async def test_a_client_that_leaves_during_a_take_over_leaves_the_session_to_others() -> None:
    async with bench(resume_grace_ms=60_000) as made:
        other = Bench(resume_grace_ms=60_000, store=made.store, name="d")
        await other.service.start()
        heard, session_id, num = await left(made)
        take_over = made.store.take_over

        async def slow(*arguments: Any) -> SessionRecord:
            record = await take_over(*arguments)
            await asyncio.sleep(1.0)
            return record

        made.store.take_over = slow  # type: ignore[method-assign]
        resuming = asyncio.ensure_future(
            anext(other.service.resume(ResumeRequest(session_id, num)))
        )
        await asyncio.sleep(0.5)
        resuming.cancel()
        made.store.take_over = take_over  # type: ignore[method-assign]
        await asyncio.sleep(0.1)
        rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
        assert len(tokens_of(heard) + tokens_of(rest)) == 30
        await other.service.close()


@virtually
async def test_a_take_over_that_is_refused_releases_nothing() -> None:
    """Another coordinator's lease lasts, or cannot be read: it runs the session."""
    async with bench(resume_grace_ms=5_000) as made:
        other = Bench(resume_grace_ms=5_000, store=made.store, name="d")
        await other.service.start()
        releases: list[Any] = []

        async def noted(*arguments: Any) -> None:
            releases.append(arguments)

        made.store.release = noted  # type: ignore[method-assign]
        events = made.service.generate(SEEDED)
        _, session_id, num = await taken(events, 3)
        take_over = made.store.take_over
        for error in (None, StoreUnavailable("no lease was read"), Unavailable("taken over")):

            async def refused(*arguments: Any, error: Any = error) -> SessionRecord:
                if error is None:
                    return await take_over(*arguments)
                if not isinstance(error, StoreUnavailable):
                    arguments[2]()
                raise error

            made.store.take_over = refused  # type: ignore[method-assign]
            with pytest.raises(Unavailable):
                await anext(other.service.resume(ResumeRequest(session_id, num)))
        await asyncio.sleep(0.1)
        assert not releases
        await drained(events)
        await other.service.close()


@virtually
async def test_a_cancellation_that_is_not_recorded_is_no_success() -> None:
    """It is recorded later, once the store answers."""
    async with bench(resume_grace_ms=600_000) as made:
        _, session_id, _ = await left(made)
        until = asyncio.get_running_loop().time() + 60.0
        made.store.finish = failing(made.store.finish, until)  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await made.service.cancel(session_id)
        await asyncio.sleep(61.0)
        record = await made.store.load(session_id)
        assert record.finish_reason is FinishReason.CANCELLED


@virtually
async def test_a_session_whose_end_was_not_recorded_is_given_up_later() -> None:
    async with bench(resume_grace_ms=1_000) as made:
        finish = made.store.finish
        until = asyncio.get_running_loop().time() + 60.0
        made.store.finish = failing(finish, until)  # type: ignore[method-assign]
        async with aclosing(made.service.generate(SEEDED, resumable=False)) as events:
            _, session_id, _ = await taken(events, 3)
        await asyncio.sleep(61.0)
        record = await made.store.load(session_id)
        assert record.finish_reason is FinishReason.CANCELLED


@virtually
async def test_a_session_that_cannot_begin_is_recorded_as_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as made:

        def broken(*arguments: Any) -> None:
            raise Unavailable("nothing runs here")

        with monkeypatch.context() as planted:
            planted.setattr(made.service._committer, "add", broken)
            with pytest.raises(Unavailable):
                await anext(made.service.generate(SEEDED))
        await asyncio.sleep(0.1)
        [kept] = made.store.snapshot().values()
        assert kept.record.finish_reason is FinishReason.CANCELLED
        assert made.service._committer.num_sessions == 0


@virtually
async def test_clients_that_do_not_read_finished_sessions_keep_no_others_out() -> None:
    async with bench(resume_grace_ms=30_000, max_sessions=1_000) as made:
        done = (await made.events(SEEDED))[0]
        assert isinstance(done, Started)
        async with aclosing(made.service.generate(SEEDED)) as events:
            heard, session_id, num = await taken(events, 3)
        unread = [
            made.service.resume(ResumeRequest(done.session_id)) for _ in range(TAKE_OVERS_MAX)
        ]
        for one in unread:
            assert isinstance(await anext(one), Started)
        rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
        assert len(tokens_of(heard) + tokens_of(rest)) == 30
        for one in unread:
            await one.aclose()


@virtually
async def test_a_client_is_checked_against_the_record_that_is_taken_over() -> None:
    """Other tokens were stored after the record was read for the first time."""
    async with bench(resume_grace_ms=60_000) as made:
        heard, session_id, num = await left(made)
        take_over = made.store.take_over

        async def replaced(seen: SessionRecord, *arguments: Any) -> SessionRecord:
            kept = made.store.snapshot()
            first, *others = seen.token_ids[seen.prompt_length :]
            ids = (*seen.token_ids[: seen.prompt_length], (first + 1) % 8, *others)
            record = replace(seen, token_ids=ids, prefix_digest=TokenSequence(ids).digest())
            made.store.restore({**kept, session_id: replace(kept[session_id], record=record)})
            return await take_over(seen, *arguments)

        made.store.take_over = replaced  # type: ignore[method-assign]
        digest = TokenSequence(tokens_of(heard)).digest()
        request = ResumeRequest(session_id, num, tokens_digest=digest)
        with pytest.raises(DataLoss, match="tokens_digest"):
            await anext(made.service.resume(request))
        await asyncio.sleep(0.1)
        assert (await made.store.load(session_id)).owner == released("c")
