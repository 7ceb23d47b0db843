"""Sessions that go on after their stream broke."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from test_service import REQUEST, Bench, SlowText, bench

from coordinator.completion import Completion
from coordinator.request import GenerationParameters
from coordinator.resuming import (
    TOKENS_PER_EVENT,
    check_known,
    parameters_of,
    read_logprobs,
    replay,
    told_again,
    write_logprobs,
)
from outrider.clock import run_virtually
from outrider.errors import (
    DataLoss,
    Incompatible,
    NotFound,
    Overloaded,
    StaleEpoch,
    StoreUnavailable,
    Unavailable,
)
from outrider.generation import Event, Finished, ResumeRequest, Started, Tokens
from outrider.messages import PositionLogprobs
from outrider.sessions.store import (
    CacheState,
    Counters,
    FinishReason,
    SessionRecord,
    SessionState,
)
from outrider.speculation.decision import Origin
from outrider.speculation.sampling import Rule, SamplingParams

PARAMETERS = GenerationParameters(
    prompt_ids=(1, 2),
    sampling=SamplingParams(temperature=0.7, top_k=3, logit_bias=((5, -1.5), (7, 2.0))),
    max_tokens=6,
    stop=("cd",),
    ignore_eos=True,
    seed=2**64 - 1,
    rule=Rule.BLOCK,
    num_draft_tokens=3,
    deadline_ms=1000,
    logprobs=2,
    include_rounds=True,
)
RECORD = SessionRecord(
    session_id="0" * 32,
    tenant="",
    epoch=2,
    owner="c",
    state=SessionState.RUNNING,
    seed=PARAMETERS.seed,
    rule=Rule.BLOCK,
    parameters=PARAMETERS.to_json(),
    prompt_length=2,
    token_ids=(1, 2, 10, 11, 12),
    prefix_digest=0,
    draft=CacheState(),
    target=CacheState(),
    counters=Counters(2, 4, 1),
    logprobs="[-1.0,[]]\n[-2.0,[[3,-0.5]]]\n[null,[]]\n",
    finish_reason=None,
)


class Letters:
    """Token 10 is "a", 11 is "b" ..."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id - 10)

    def finish(self) -> str:
        return ""


def completion(stop: tuple[str, ...] = ("cd",), eos: Sequence[int] = ()) -> Completion:
    return Completion(max_tokens=6, stop=stop, eos_token_ids=eos, text_stream=Letters())


def test_parameters_survive_the_store() -> None:
    assert parameters_of(RECORD) == PARAMETERS
    assert PARAMETERS.as_request().sampling == PARAMETERS.sampling


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sampling":{"logit_bias":[]}}'])
def test_parameters_that_cannot_be_read_are_lost_data(text: str) -> None:
    with pytest.raises(DataLoss, match="parameters"):
        parameters_of(replace(RECORD, parameters=text))


def asked(known: int, characters: int | None = None) -> ResumeRequest:
    return ResumeRequest(RECORD.session_id, known, characters)


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_what_the_client_lacks_is_told_with_the_text_that_follows_its_own(known: int) -> None:
    """ "c" may begin the stop string, and is held back, by whoever tells it."""
    found = replay(RECORD, PARAMETERS, completion(), asked(known))
    assert found.completion.num_tokens == 3
    assert found.finish_reason is None
    if known == 3:
        assert not found.events
        return
    [tokens] = found.events
    assert tokens.first_index == known
    assert tokens.token_ids == (10, 11, 12)[known:]
    assert tokens.text_delta == "ab"[known:]
    assert tokens.origins == (Origin.STORED,) * (3 - known)
    assert [entry.logprob for entry in tokens.logprobs] == [-1.0, -2.0, -math.inf][known:]
    assert found.completion.push((13,)).finish_reason is FinishReason.STOP


def test_text_follows_what_the_client_says_that_it_has() -> None:
    [tokens] = replay(RECORD, PARAMETERS, completion(), asked(2, 1)).events
    assert (tokens.token_ids, tokens.text_delta) == ((12,), "b")
    [tokens] = replay(RECORD, PARAMETERS, completion(), asked(1, 2)).events
    assert (tokens.token_ids, tokens.text_delta) == ((11, 12), "")


def test_a_long_answer_is_told_in_parts() -> None:
    num = 2 * TOKENS_PER_EVENT + 7
    quiet = replace(PARAMETERS, logprobs=None, max_tokens=9999, stop=())
    long = Completion(max_tokens=9999, stop=(), eos_token_ids=(), text_stream=Letters())
    record = replace(RECORD, token_ids=(1, 2, *[10] * num), logprobs="")
    events = replay(record, quiet, long, asked(3)).events
    assert [len(event.token_ids) for event in events] == [TOKENS_PER_EVENT] * 2 + [4]
    assert [event.first_index for event in events] == [3, 3 + TOKENS_PER_EVENT, num - 4]
    assert "".join(event.text_delta for event in events) == "a" * (num - 3)


def test_a_completion_that_was_whole_ends_without_another_round() -> None:
    for known in (1, 3):
        found = replay(RECORD, PARAMETERS, completion(eos=(12,)), asked(known))
        assert found.finish_reason is FinishReason.STOP


def test_more_than_is_stored_cannot_be_known() -> None:
    check_known(RECORD, asked(3))
    with pytest.raises(DataLoss, match="the client has 4 tokens, the store 3"):
        check_known(RECORD, asked(4))


ENDED = replace(
    RECORD, state=SessionState.FINISHED, finish_reason=FinishReason.DEADLINE, logprobs=""
)
QUIET = replace(PARAMETERS, logprobs=None)


def test_a_finished_session_is_told_again() -> None:
    """What was held back is told where it is not known to have come."""
    events = told_again(ENDED, "toy", replay(ENDED, QUIET, completion(), asked(1)))
    started, tokens, tail, finished = events
    assert isinstance(started, Started)
    assert isinstance(tokens, Tokens)
    assert (tokens.token_ids, tokens.text_delta) == ((11, 12), "b")
    assert isinstance(tail, Tokens)
    assert (tail.first_index, tail.token_ids, tail.text_delta) == (3, (), "c")
    assert isinstance(finished, Finished)
    assert finished.finish_reason is FinishReason.DEADLINE
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 3)
    assert finished.metrics.mean_acceptance_length == 1.5
    assert list(told_again(RECORD, "toy", replay(RECORD, QUIET, completion(), asked(1)))) == []


@pytest.mark.parametrize(("characters", "told"), [(2, ["c"]), (3, []), (None, ["c"])])
def test_held_back_text_is_told_once(characters: int | None, told: list[str]) -> None:
    events = replay(ENDED, QUIET, completion(), asked(3, characters)).events
    assert [event.text_delta for event in events] == told


def test_log_probabilities_survive_the_store() -> None:
    told = PositionLogprobs(-0.25, ((3, -0.25), (4, -math.inf)))
    assert read_logprobs(write_logprobs(told)) == told
    for line in ("", "[]", "[1]", "[1,[[]]]", "nonsense"):
        with pytest.raises(DataLoss, match="log-probabilities"):
            read_logprobs(line)


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


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [v for event in events if isinstance(event, Tokens) for v in event.token_ids]


SEEDED = replace(REQUEST, seed=7, rule=Rule.COUPLED, max_tokens=30)


def test_a_stream_that_broke_goes_on_where_it_was() -> None:
    """The whole is what an unbroken stream gives: noise is keyed by place."""

    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
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

    run_virtually(main())


def test_after_its_coordinator_died_a_session_needs_little_of_its_target() -> None:
    """The record says what the target holds, and nobody told it to forget that."""

    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            other = Bench(resume_grace_s=5.0, store=made.store, name="d", target=made.target)
            await other.service.start()
            events = made.service.generate(SEEDED)
            heard, session_id, num = await taken(events, 10)
            made.store.renew = nobody  # type: ignore[method-assign]
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

    run_virtually(main())


async def nobody(owner: str, sessions: Any) -> list[str]:
    return []


async def unheard(appends: Any) -> list[Any]:
    raise StoreUnavailable("the coordinator is dead")


def test_it_goes_on_with_the_same_weights_alone() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            async with aclosing(made.service.generate(SEEDED)) as events:
                _, session_id, num = await taken(events, 3)
            office = made.service.targets._offices["t"]
            office.description = replace(office.description, dtype="bfloat16")
            with pytest.raises(Incompatible, match="other weights"):
                await anext(made.service.resume(ResumeRequest(session_id, num)))
            assert (await made.store.load(session_id)).epoch == 1

    run_virtually(main())


@pytest.mark.parametrize("turns", range(6))
def test_of_two_resumes_at_once_one_goes_on(turns: int) -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
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
            assert any(isinstance(r, StaleEpoch) for r in results)
            with pytest.raises(StaleEpoch):
                await waiting
            assert asyncio.get_running_loop().time() < 10
            assert (await made.store.load(session_id)).finish_reason is FinishReason.LENGTH

    run_virtually(main())


async def drained(events: Any) -> None:
    async for _ in events:
        pass


@pytest.mark.parametrize("turns", range(1, 8))
def test_a_resume_that_is_given_up_leaves_nothing_behind(turns: int) -> None:
    """The integrity of the coordinator is checked at the end; and it may be resumed again."""

    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            old = made.service.generate(SEEDED)
            heard, session_id, num = await taken(old, 3)
            waiting = asyncio.create_task(drained(old))
            given_up = asyncio.ensure_future(
                anext(made.service.resume(ResumeRequest(session_id, num)))
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, waiting, return_exceptions=True)
            assert asyncio.get_running_loop().time() < 10
            record = await made.store.load(session_id)
            if record.finish_reason is None:
                rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
                assert len(tokens_of(heard) + tokens_of(rest)) == 30

    run_virtually(main())


def test_a_request_that_cannot_be_met_harms_no_stream() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            events = made.service.generate(SEEDED)
            _, session_id, _ = await taken(events, 3)
            with pytest.raises(DataLoss, match="num_tokens"):
                await anext(made.service.resume(ResumeRequest(session_id, 999)))
            await drained(events)
            record = await made.store.load(session_id)
            assert (record.epoch, record.finish_reason) == (1, FinishReason.LENGTH)

    run_virtually(main())


def test_a_coordinator_that_closes_leaves_its_sessions_to_others() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            other = Bench(resume_grace_s=5.0, store=made.store, name="d")
            await other.service.start()
            async with aclosing(made.service.generate(SEEDED)) as events:
                heard, session_id, num = await taken(events, 3)
            await made.service.close()
            await asyncio.sleep(2.5)
            rest = [e async for e in other.service.resume(ResumeRequest(session_id, num))]
            assert len(tokens_of(heard) + tokens_of(rest)) == 30
            await other.service.close()

    run_virtually(main())


def test_what_is_left_of_the_deadline_counts() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            long = replace(SEEDED, max_tokens=60)
            async with aclosing(made.service.generate(long)) as events:
                _, session_id, num = await taken(events, 3)
            request = ResumeRequest(session_id, num, deadline_ms=100)
            rest = [e async for e in made.service.resume(request)]
            assert isinstance(rest[-1], Finished)
            assert rest[-1].finish_reason is FinishReason.DEADLINE

    run_virtually(main())


def test_resumes_are_admitted_as_requests_are() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0, max_sessions=2) as made:
            ids = []
            for _ in range(3):
                async with aclosing(made.service.generate(SEEDED)) as events:
                    ids.append((await taken(events, 3))[1])

            async def resumed(session_id: str) -> None:
                await drained(made.service.resume(ResumeRequest(session_id)))

            results = await asyncio.gather(*map(resumed, ids), return_exceptions=True)
            assert sum(isinstance(result, Overloaded) for result in results) == 1
            assert results.count(None) == 2

    run_virtually(main())


def test_a_client_that_does_not_come_back_has_cancelled() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
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

    run_virtually(main())


def test_a_client_that_is_gone_may_still_cancel() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            async with aclosing(made.service.generate(SEEDED)) as events:
                _, session_id, _ = await taken(events, 3)
            await made.service.cancel(session_id)
            record = await made.store.load(session_id)
            assert record.finish_reason is FinishReason.CANCELLED

    run_virtually(main())


def test_who_may_resume_what() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            with pytest.raises(NotFound):
                await anext(made.service.resume(ResumeRequest("f" * 32)))
            async with aclosing(made.service.generate(SEEDED, tenant="a")) as events:
                _, session_id, _ = await taken(events, 3)
            with pytest.raises(NotFound):
                await anext(made.service.resume(ResumeRequest(session_id), tenant="b"))

    run_virtually(main())


def test_another_coordinators_session_is_waited_for() -> None:
    """Until its lease has run out: it may still decide tokens."""

    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            other = Bench(resume_grace_s=5.0, store=made.store, name="d")
            await other.service.start()
            async with aclosing(made.service.generate(SEEDED)) as events:
                heard, session_id, num = await taken(events, 3)
                with pytest.raises(Unavailable) as refused:
                    await anext(other.service.resume(ResumeRequest(session_id, num)))
                with pytest.raises(Unavailable, match="has an owner"):
                    await other.service.cancel(session_id)
                assert 0 < refused.value.retry_after_ms <= 2000
            await asyncio.sleep(2.5)
            rest = [e async for e in other.service.resume(ResumeRequest(session_id, num))]
            assert len(tokens_of(heard) + tokens_of(rest)) == 30
            await other.service.close()

    run_virtually(main())


def test_text_of_a_resumed_session_goes_on() -> None:
    async def main() -> None:
        async with bench(text=SlowText(), resume_grace_s=5.0) as made:
            async with aclosing(made.service.generate(SEEDED)) as events:
                heard, session_id, num = await taken(events, 10)
            rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
            told = [e.text_delta for e in (*heard, *rest) if isinstance(e, Tokens)]
            assert "".join(told) == "x" * 30

    run_virtually(main())
