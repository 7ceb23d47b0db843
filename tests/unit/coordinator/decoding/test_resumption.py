"""Sessions that are resumed after their stream broke, cancelled, and taken over."""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from coordinator.decoding.detokenizer import Completion
from coordinator.decoding.resumption import (
    TOKENS_PER_EVENT,
    check_known,
    read_logprobs,
    replay,
    replayed_events,
    write_logprobs,
)
from coordinator.decoding.sessions import OwnedSessions
from coordinator.requests.validation import GenerationParameters, ParametersWriter
from outrider import errors, limits
from outrider.foundation.tokens import EMPTY_DIGEST, TokenSequence
from outrider.interfaces.messages import PositionLogprobs
from outrider.interfaces.request import Event, ResumeRequest, Started, Tokens
from outrider.registry.registry import Starts
from outrider.sessions.store import Counters, FinishReason, SessionRecord, released
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.coordinator_bench import (
    CONFIG,
    REQUEST,
    Bench,
    Letters,
    SlowText,
    bench,
    failing,
    tokens_of,
)
from tests.support.session_model import new_session

pytestmark = pytest.mark.virtual

SEEDED = replace(REQUEST, seed=7, rule=Rule.COUPLED, max_tokens=30)
GRACE_S = 5.0
CANCELLED = FinishReason.CANCELLED


@dataclass
class Broken:
    """A stream that was not read to its end."""

    heard: list[Event]

    @property
    def session_id(self) -> str:
        return self.heard[0].session_id

    @property
    def request(self) -> ResumeRequest:
        return ResumeRequest(self.session_id, len(tokens_of(self.heard)))

    async def goes_on(self, at: Bench) -> list[Event]:
        """Resumes it at a coordinator; it is complete then."""
        rest = [event async for event in at.service.streams.resume(self.request)]
        assert len(tokens_of(self.heard) + tokens_of(rest)) == 30
        return rest

    async def record(self, at: Bench) -> SessionRecord:
        return await at.store.load(self.session_id)

    async def end(self, at: Bench) -> FinishReason | None:
        return (await self.record(at)).finish_reason


async def taken(events: Any, num_tokens: int = 3) -> Broken:
    """Reads events until `num_tokens` have come."""
    heard: list[Event] = []
    async for event in events:
        heard.append(event)
        if len(tokens_of(heard)) >= num_tokens:
            break
    return Broken(heard)


async def left(made: Bench, **fields: Any) -> Broken:
    """A session whose client has gone away, once it is released."""
    async with aclosing(made.service.streams.generate(SEEDED, **fields)) as events:
        found = await taken(events)
    await asyncio.sleep(0.5)
    return found


async def told(events: Any) -> list[Event]:
    return [event async for event in events]


def opened(**settings: Any) -> Any:
    return bench(**{"resume_grace_ms": int(GRACE_S * 1e3), **settings})


@asynccontextmanager
async def two(**settings: Any) -> AsyncIterator[tuple[Bench, Bench]]:
    """Two coordinators, called c and d, with the same store and target."""
    async with opened(**settings) as made:
        settings = {"resume_grace_ms": int(GRACE_S * 1e3), **settings}
        other = Bench(store=made.store, name="d", target=made.target, **settings)
        await other.service.start()
        yield made, other
        await other.service.close()


def planted(made: Bench, **calls: Any) -> None:
    """Replaces calls of its store."""
    for name, call in calls.items():
        setattr(made.store, name, call)


def slow(call: Any, seconds: float) -> Any:
    async def wrapped(*arguments: Any) -> Any:
        await asyncio.sleep(seconds)
        found = await call(*arguments)
        await asyncio.sleep(seconds)
        return found

    return wrapped


def die(made: Bench) -> None:
    """Its lease runs out, and nothing more is stored."""
    error = errors.StoreUnavailable("the coordinator is dead")
    planted(made, hold_lease=AsyncMock(return_value={}), append=AsyncMock(side_effect=error))


async def test_after_its_coordinator_died_a_session_uses_what_the_target_holds() -> None:
    async with two() as (made, other):
        events = made.service.streams.generate(SEEDED)
        broken = await taken(events, 10)
        die(made)
        await asyncio.sleep(2.5)
        del made.store.append
        send = other.target_link.send = Mock(wraps=other.target_link.send)
        await broken.goes_on(other)
        assert max(len(call.args[0].head.append) for call in send.mock_calls) <= 2 * (2 + 1)
        await events.aclose()


async def test_a_session_is_resumed_with_the_same_weights_only() -> None:
    async with opened() as made:
        broken = await left(made)
        replica = made.service.targets.replicas["t"]
        replica.description = replace(replica.description, dtype="bfloat16")
        with pytest.raises(errors.Incompatible, match="which no target here has"):
            await broken.goes_on(made)
        await made.service.targets.leave("t")
        with pytest.raises(errors.Unavailable, match="no target is known"):
            await broken.goes_on(made)
        assert (await broken.record(made)).epoch == 1


async def test_a_resumed_session_waits_for_a_target_that_is_being_started() -> None:
    """The client learns at once that the session continues, although no target is known."""
    async with opened() as made:
        broken, targets = await left(made), made.service.targets
        replica = targets.replicas.pop("t")
        targets.starts = Starts("target", ("t2",), expected=True)
        events = made.service.streams.resume(broken.request)
        assert isinstance(await anext(events), Started)
        more = asyncio.create_task(anext(events))
        await asyncio.sleep(10 * GRACE_S)
        assert not more.done()
        targets.replicas["t"] = replica
        targets._notify()
        found = [await more, *await told(events)]
        assert len(tokens_of(broken.heard) + tokens_of(found)) == 30


async def test_a_session_waits_for_a_target_and_keeps_its_weights() -> None:
    async with opened() as made:
        targets = made.service.targets
        replica = targets.replicas.pop("t")
        events = made.service.streams.generate(SEEDED)
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(1.0)
        assert not first.done()
        targets.replicas["t"] = replica
        targets._notify()
        broken = Broken([await first])
        await told(events)
        parameters = json.loads((await broken.record(made)).parameters)
        assert parameters["weights"] == replica.description.weights != ""
        targets.replicas.clear()
        with pytest.raises(errors.Unavailable, match="no target is known"):
            await told(made.service.streams.generate(SEEDED))


@pytest.mark.parametrize("turns", [0, 2, 5])
async def test_of_two_concurrent_resumes_one_succeeds(turns: int) -> None:
    async with opened() as made:
        old = made.service.streams.generate(SEEDED)
        broken = await taken(old)
        waiting = asyncio.create_task(told(old))
        first = asyncio.create_task(broken.goes_on(made))
        for _ in range(turns):
            await asyncio.sleep(0)
        second = asyncio.create_task(broken.goes_on(made))
        results = await asyncio.gather(first, second, return_exceptions=True)
        # The other one was superseded, or saw an owner that changed meanwhile.
        failed = [isinstance(one, errors.StaleEpoch | errors.Unavailable) for one in results]
        assert sorted(failed) == [False, True]
        assert sum(isinstance(one, list) for one in results) == 1
        with pytest.raises(errors.StaleEpoch):
            await waiting
        assert asyncio.get_running_loop().time() < 10
        assert await broken.end(made) is FinishReason.LENGTH


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("turns", range(1, 9))
async def test_a_resume_that_is_given_up_leaves_nothing_behind(
    turns: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session may be resumed anywhere, and counts as a take-over no more."""
    monkeypatch.setattr("outrider.limits.TAKE_OVERS_MAX", 1)
    async with two(resume_grace_ms=60_000) as (made, other):
        old = made.service.streams.generate(SEEDED)
        broken = await taken(old)
        waiting = asyncio.create_task(told(old))
        planted(made, take_over=slow(made.store.take_over, 0.0))
        resumed = made.service.streams.resume(broken.request)
        given_up = asyncio.ensure_future(anext(resumed))
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, waiting, return_exceptions=True)
        await resumed.aclose()
        await asyncio.sleep(0.5)
        for at in (other, made) if elsewhere else (made, other):
            await broken.goes_on(at)


async def test_a_refused_resume_harms_no_stream() -> None:
    async with opened() as made:
        events = made.service.streams.generate(SEEDED, tenant="a")
        broken = await taken(events)
        with pytest.raises(errors.DataLoss, match="num_tokens"):
            await anext(
                made.service.streams.resume(replace(broken.request, num_tokens=999), tenant="a")
            )
        for session_id, tenant in ((broken.session_id, "b"), ("f" * 32, "a")):
            with pytest.raises(errors.NotFound):
                await anext(made.service.streams.resume(ResumeRequest(session_id), tenant=tenant))
        await told(events)
        record = await broken.record(made)
        assert (record.epoch, record.finish_reason) == (1, FinishReason.LENGTH)


async def test_a_coordinator_that_closes_leaves_its_sessions_to_others() -> None:
    """At once; those that run, from the moment it knows that it will close."""
    async with two() as (made, other):
        running = made.service.streams.generate(SEEDED)
        kept = await taken(running)
        async with aclosing(made.service.streams.generate(SEEDED)) as events:
            broken = await taken(events)
        made.service.streams.hand_over()
        await asyncio.sleep(0.1)
        kept.heard += (await taken(running, 12)).heard
        await kept.goes_on(other)
        await running.aclose()
        await made.service.close()
        await broken.goes_on(other)


async def test_a_resume_may_have_a_shorter_deadline() -> None:
    async with opened() as made:
        broken = await left(made)
        request = replace(broken.request, deadline_ms=60)
        *_, last = [event async for event in made.service.streams.resume(request)]
        assert last.finish_reason is FinishReason.DEADLINE


class Tailed(SlowText):
    """Holds a character back until the end."""

    def stream(self, _: object = ()) -> Any:
        return Tailed()

    def finish(self) -> str:
        return "!"


async def test_held_back_text_is_sent_once_the_end_is_stored() -> None:
    """Before that, a resumed session might send it again."""
    async with opened(text=Tailed()) as made:
        finish, told = AsyncMock(wraps=made.store.finish), []
        planted(made, finish=finish)
        async for event in made.service.streams.generate(replace(SEEDED, deadline_ms=105)):
            if isinstance(event, Tokens):
                told.append(event.text_delta)
                assert finish.called == (event.text_delta == "!")
        assert event.finish_reason is FinishReason.DEADLINE
        assert told.index("!") == len(told) - 1


async def test_resumes_count_for_max_sessions() -> None:
    async with opened(max_sessions=2) as made:
        each = [await left(made) for _ in range(3)]
        results = await asyncio.gather(*(one.goes_on(made) for one in each), return_exceptions=True)
        assert sum(isinstance(result, errors.Overloaded) for result in results) == 1
        assert sum(isinstance(result, list) for result in results) == 2


async def test_a_tenant_with_many_take_overs_keeps_no_other_out() -> None:
    async with two(resume_grace_ms=60_000, max_sessions=1_000) as (made, other):
        each = [await left(made) for _ in range(limits.TAKE_OVERS_MAX)]
        [few] = [await left(made, tenant="b")]
        planted(made, take_over=slow(made.store.take_over, 0.02))
        going = [asyncio.create_task(one.goes_on(other)) for one in each]
        await asyncio.sleep(0)
        events = other.service.streams.resume(few.request, "b")
        assert isinstance(await anext(events), Started)
        assert len(tokens_of(few.heard) + tokens_of(await told(events))) == 30
        await asyncio.gather(*going)


async def test_concurrent_take_overs_are_limited() -> None:
    async with two(resume_grace_ms=60_000, max_sessions=1_000) as (made, other):
        each = [await left(made) for _ in range(limits.TAKE_OVERS_MAX + 5)]
        planted(made, take_over=slow(made.store.take_over, 0.02))
        going = [one.goes_on(other) for one in each]
        results = await asyncio.gather(*going, return_exceptions=True)
        refused = [one for one in results if isinstance(one, errors.Unavailable)]
        assert [one.retry_after_ms for one in refused] == [limits.TAKE_OVER_RETRY_MS] * 5
        assert sum(isinstance(one, list) for one in results) == limits.TAKE_OVERS_MAX
        for one, result in zip(each, results, strict=True):
            if result in refused:
                await one.goes_on(other)


async def test_slow_readers_of_finished_sessions_do_not_count_as_take_overs() -> None:
    async with opened(max_sessions=1_000) as made:
        done = Broken(await made.events(SEEDED))
        broken = await left(made)
        unread = [made.service.streams.resume(done.request) for _ in range(limits.TAKE_OVERS_MAX)]
        for one in unread:
            assert isinstance(await anext(one), Started)
        await broken.goes_on(made)
        for one in unread:
            await one.aclose()


async def test_a_session_without_a_client_is_released_and_later_cancelled() -> None:
    async with opened() as made:
        first, second, third = [await left(made) for _ in range(3)]
        assert (await made.store.take_over(await first.record(made), "other")).epoch == 2
        await made.service.streams.cancel(third.session_id)
        assert await third.end(made) is CANCELLED
        length = len((await second.record(made)).token_ids)
        await asyncio.sleep(GRACE_S + 1.0)
        assert [await one.end(made) for one in (first, second)] == [None, CANCELLED]
        assert len((await second.record(made)).token_ids) == length
        *_, last = [event async for event in made.service.streams.resume(second.request)]
        assert last.finish_reason is CANCELLED


@pytest.mark.parametrize("dies", [False, True])
async def test_a_session_is_cancelled_by_any_coordinator(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its coordinator lives, its stream gets its last event. Other tenants cannot cancel it."""
    monkeypatch.setattr("tests.support.coordinator_bench.STEP_S", 0.1)
    async with (
        two() as (made, other),
        aclosing(made.service.streams.generate(SEEDED, "a")) as events,
    ):
        broken = await taken(events)
        with pytest.raises(errors.NotFound):
            await other.service.streams.cancel(broken.session_id, "b")
        if dies:
            die(made)
        reading = None if dies else asyncio.create_task(told(events))
        began = asyncio.get_running_loop().time()
        await other.service.streams.cancel(broken.session_id, "a")
        took_s = asyncio.get_running_loop().time() - began
        bound_ms = dies * limits.SESSION_LEASE_MS + 2 * limits.SESSION_LEASE_RENEWAL_MS
        assert took_s < bound_ms / 1e3
        assert await broken.end(other) is CANCELLED
        if reading is not None:
            *_, last = await reading
            assert last.finish_reason is CANCELLED


async def test_a_cancellation_that_the_owner_ignores_fails() -> None:
    async with two() as (made, other), aclosing(made.service.streams.generate(SEEDED)) as events:
        broken = await taken(events)
        made.service._committer._on_wanted = lambda wanted: None
        with pytest.raises(errors.Unavailable, match="has an owner"):
            await other.service.streams.cancel(broken.session_id)


async def test_a_session_whose_release_was_lost_is_released_when_it_is_wanted() -> None:
    """Its stored owner, which is alive, learns this when it renews its lease."""
    async with two(resume_grace_ms=60_000) as (made, other):
        broken = await left(made)
        assert (await broken.record(made)).owner == released("c")
        made.store.data.run((b"HSET", made.store.key(broken.session_id), b"owner", b"c"))
        await made.store.hold_lease("c")
        await asyncio.sleep(5.0)
        with pytest.raises(errors.Unavailable, match="has an owner") as refused:
            await broken.goes_on(other)
        assert 0 < refused.value.retry_after_ms <= 2000
        await asyncio.sleep(limits.SESSION_LEASE_RENEWAL_MS / 1e3)
        await broken.goes_on(other)


async def test_a_running_session_is_not_released_when_it_is_wanted() -> None:
    """Nor one that is resumed before the store answers: its stream would end by `StaleEpoch`."""
    async with opened(resume_grace_ms=60_000) as made:
        events = made.service.streams.generate(SEEDED)
        broken = await taken(events)
        load, rest = made.store.load, made.service.streams.resume(broken.request)
        planted(made, load=AsyncMock(side_effect=AssertionError("it runs here")))
        await made.service._sessions.release_wanted(broken.session_id)
        planted(made, load=load)
        await events.aclose()
        await asyncio.sleep(0.5)
        resumed: list[Event] = []

        async def late(session_id: str) -> SessionRecord:
            planted(made, load=load)
            resumed.append(await anext(rest))
            return await load(session_id)

        planted(made, load=late)
        await made.service._sessions.release_wanted(broken.session_id)
        resumed += [event async for event in rest]
        assert len(tokens_of(broken.heard) + tokens_of(resumed)) == 30


@pytest.mark.parametrize("take_over_is_lost", [False, True])
async def test_a_session_is_not_resumed_while_its_release_is_under_way(
    take_over_is_lost: bool,
) -> None:
    """If the take-over before was lost, or the store lost its epoch, the next one has the same
    epoch, and the release would end its run."""
    async with opened(resume_grace_ms=600_000) as made:
        broken = await left(made)
        before, take_over = made.store.snapshot(), made.store.take_over
        until = asyncio.get_running_loop().time() + 5.0
        planted(made, release=failing(made.store.release, until))

        async def lost(seen: SessionRecord, owner: str, note: Any, _: bool) -> SessionRecord:
            note()
            raise errors.StoreUnavailable("the question is lost")

        if take_over_is_lost:
            planted(made, take_over=lost)
            with pytest.raises(errors.StoreUnavailable):
                await broken.goes_on(made)
            planted(made, take_over=take_over)
        else:
            await take_over(await broken.record(made), "c")
            await made.service._sessions.release_wanted(broken.session_id)
            await asyncio.sleep(0.5)
            made.store.restore(before)
        with pytest.raises(errors.Unavailable, match="try again"):
            await broken.goes_on(made)
        await asyncio.sleep(10.0)
        await broken.goes_on(made)


@pytest.mark.parametrize("cancels", [False, True])
async def test_an_end_that_was_not_recorded_is_recorded_once_the_store_answers(
    cancels: bool,
) -> None:
    """Even if the session is wanted meanwhile. The cancellation itself fails."""
    async with opened(resume_grace_ms=600_000) as made:
        now = asyncio.get_running_loop().time
        until = now() + 60.0
        planted(made, finish=failing(made.store.finish, until))
        broken = await left(made, resumable=cancels)
        if cancels:
            with pytest.raises(errors.StoreUnavailable, match="when the session store answers"):
                await made.service.streams.cancel(broken.session_id)
            await made.service._sessions.release_wanted(broken.session_id)
        await asyncio.sleep(until - 1.0 - now())
        assert await broken.end(made) is None
        await asyncio.sleep(3.0)
        assert await broken.end(made) is CANCELLED


async def test_a_cancellation_whose_answer_is_lost_is_recorded() -> None:
    """The take-over's answer is lost. The former owner, to which the client turns next, no longer
    owns the session, so it cannot store the end."""
    async with opened(resume_grace_ms=600_000) as made:
        broken = await left(made)
        take_over = made.store.take_over

        async def unanswered(*arguments: Any) -> SessionRecord:
            await take_over(*arguments)
            raise errors.StoreUnavailable("the answer is lost")

        planted(made, take_over=unanswered)
        with pytest.raises(errors.StoreUnavailable, match="answer is lost"):
            await made.service.streams.cancel(broken.session_id)
        await asyncio.sleep(1.0)
        assert await broken.end(made) is CANCELLED


async def test_a_session_that_cannot_begin_is_recorded_as_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as made:
        broken = Mock(side_effect=errors.Unavailable("nothing runs here"))
        with monkeypatch.context() as patched:
            patched.setattr(made.service._committer, "add", broken)
            with pytest.raises(errors.Unavailable):
                await anext(made.service.streams.generate(SEEDED))
        await asyncio.sleep(0.1)
        [kept] = await made.store.records()
        assert kept.finish_reason is CANCELLED
        assert not made.service._committer.sessions


PARAMETERS = GenerationParameters(
    prompt=(1, 2),
    max_tokens=6,
    stop=("cd",),
    seed=7,
    rule=Rule.BLOCK,
    num_draft_tokens=3,
    deadline_ms=1000,
    logprobs=2,
)
RECORD = replace(
    new_session(prompt_ids=PARAMETERS.prompt),
    parameters=ParametersWriter().write(PARAMETERS, "")[0],
    token_ids=(1, 2, 0, 1, 2),
    counters=Counters(5, 4, 1, 2),
    logprobs="[-1.0,[]]\n[-2.0,[[3,-0.5]]]\n[-Infinity,[]]\n",
)


def completion(stop: tuple[str, ...] = ("cd",), eos: Sequence[int] = ()) -> Completion:
    return Completion(replace(PARAMETERS, stop=stop), eos, Letters())


def asked(known: int, characters: int | None = None) -> ResumeRequest:
    return ResumeRequest(RECORD.session_id, known, characters)


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_a_replay_has_what_the_client_lacks_and_continues_its_text(known: int) -> None:
    """ "c" may begin the stop string and is held back, as in the stream that broke."""
    found = replay(RECORD, PARAMETERS, completion(), asked(known))
    assert (found.completion.num_tokens, found.finish_reason) == (3, None)
    if known == 3:
        assert not found.events
        return
    [tokens] = found.events
    assert tokens.first_index == known
    assert tokens.token_ids == (0, 1, 2)[known:]
    assert tokens.text_delta == "ab"[known:]
    assert tokens.origins == (Origin.STORED,) * (3 - known)
    assert [entry.logprob for entry in tokens.logprobs] == [-1.0, -2.0, -math.inf][known:]
    assert found.completion.push((3,)).finish_reason is FinishReason.STOP


def test_text_continues_from_the_characters_that_the_client_has() -> None:
    [tokens] = replay(RECORD, PARAMETERS, completion(), asked(2, 1)).events
    assert (tokens.token_ids, tokens.text_delta) == ((2,), "b")
    [tokens] = replay(RECORD, PARAMETERS, completion(), asked(1, 2)).events
    assert (tokens.token_ids, tokens.text_delta) == ((1, 2), "")


def test_a_long_replay_has_several_events() -> None:
    num = 2 * TOKENS_PER_EVENT + 7
    quiet = replace(PARAMETERS, logprobs=None, max_tokens=9999, stop=())
    long = Completion(quiet, (), Letters())
    record = replace(RECORD, token_ids=(1, 2, *[0] * num), logprobs="")
    events = replay(record, quiet, long, asked(3)).events
    assert [len(event.token_ids) for event in events] == [TOKENS_PER_EVENT] * 2 + [4]
    assert [event.first_index for event in events] == [3, 3 + TOKENS_PER_EVENT, num - 4]
    assert "".join(event.text_delta for event in events) == "a" * (num - 3)


def test_a_complete_completion_ends_without_another_round() -> None:
    for known in (1, 3):
        found = replay(RECORD, PARAMETERS, completion(eos=(2,)), asked(known)).finish_reason
        assert found is FinishReason.STOP


def test_a_client_with_other_tokens_than_the_store_is_refused() -> None:
    assert check_known(RECORD, asked(3)) == PARAMETERS
    with pytest.raises(errors.DataLoss, match="the client has 4 tokens, the store 3"):
        check_known(RECORD, asked(4))
    known = TokenSequence(RECORD.token_ids[RECORD.prompt_length :][:2])
    check_known(RECORD, replace(asked(2), tokens_digest=known.digest()))
    check_known(RECORD, replace(asked(0), tokens_digest=EMPTY_DIGEST))
    with pytest.raises(errors.DataLoss, match="the client's 2 tokens differ from those"):
        check_known(RECORD, replace(asked(2), tokens_digest=known.digest() ^ 1))
    with pytest.raises(errors.DataLoss, match="the client's 1 tokens differ from those"):
        check_known(RECORD, replace(asked(1), tokens_digest=known.digest()))


ENDED = replace(RECORD, finish_reason=FinishReason.DEADLINE, logprobs="")
QUIET = replace(PARAMETERS, logprobs=None)


def test_a_finished_session_is_replayed_to_its_end() -> None:
    """With the text held back, unless the client has it."""
    events = replayed_events(ENDED, replay(ENDED, QUIET, completion(), asked(1)))
    tokens, tail, finished = events
    assert (tokens.token_ids, tokens.text_delta) == ((1, 2), "b")
    assert (tail.first_index, tail.token_ids, tail.text_delta) == (3, (), "c")
    assert finished.finish_reason is FinishReason.DEADLINE
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 3)
    assert finished.metrics.mean_acceptance_length == 1.5
    assert list(replayed_events(RECORD, replay(RECORD, QUIET, completion(), asked(1)))) == []
    *_, finished = replayed_events(ENDED, replay(ENDED, QUIET, completion(("bc",)), asked(1)))
    assert finished.stop_string == "bc"
    ending = replace(PARAMETERS, stop=(), sampling=SamplingParams(stop_token_ids=(2,)))
    stopped = Completion(ending, (), Letters())
    *_, finished = replayed_events(ENDED, replay(ENDED, QUIET, stopped, asked(1)))
    assert (finished.stop_token_id, finished.stop_string) == (2, None)


@pytest.mark.parametrize(("characters", "told"), [(2, ["c"]), (3, []), (None, ["c"])])
def test_held_back_text_is_sent_once(characters: int | None, told: list[str]) -> None:
    events = replay(ENDED, QUIET, completion(), asked(3, characters)).events
    assert [event.text_delta for event in events] == told


def test_log_probabilities_survive_the_store() -> None:
    told = PositionLogprobs(-0.25, ((3, -0.25), (4, -math.inf)))
    assert read_logprobs(write_logprobs(told)) == told
    for line in ("", "[]", "[1]", "[1,[[]]]", "nonsense"):
        with pytest.raises(errors.DataLoss, match="log-probabilities"):
            read_logprobs(line)


@pytest.mark.virtual(False)
@pytest.mark.parametrize("is_long", [False, True])
async def test_a_long_replay_leaves_the_event_loop(is_long: bool) -> None:
    size = limits.REPLAY_TOKENS_INLINE + is_long
    record = replace(RECORD, token_ids=(1,) * size, logprobs="")
    nothing: Any = None
    sessions: Any = OwnedSessions(nothing, "", nothing, nothing, CONFIG)
    thread = await sessions.replay(record, threading.get_ident)
    assert (thread != threading.get_ident()) is is_long


@pytest.mark.virtual(False)
async def test_clients_that_leave_long_replays_keep_one_thread_busy() -> None:
    """A call on a thread cannot be cancelled. Others wait, and are dropped at the end."""
    record = replace(RECORD, token_ids=(1,) * (limits.REPLAY_TOKENS_INLINE + 1), logprobs="")
    nothing: Any = None
    sessions: Any = OwnedSessions(nothing, "", nothing, nothing, CONFIG)
    begun, goes_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        goes_on.wait(2.0)

    left = asyncio.create_task(sessions.replay(record, slow))
    await asyncio.to_thread(begun.wait)
    left.cancel()
    calls = list[int]()
    waiting = (sessions.replay(record, partial(calls.append, number)) for number in (1, 2))
    others = [asyncio.create_task(one) for one in waiting]
    await asyncio.sleep(0.05)
    assert calls == []
    others[0].cancel()
    await asyncio.sleep(0)
    sessions.close()
    goes_on.set()
    await asyncio.wait([left, *others], timeout=5.0)
    assert all(task.cancelled() for task in others)
    assert calls == []
