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
    parameters_of,
    read_logprobs,
    replay,
    told_again,
    write_logprobs,
)
from outrider.clock import run_virtually
from outrider.errors import DataLoss, NotFound, StaleEpoch, Unavailable
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


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_what_the_client_lacks_is_told_with_the_text_that_follows_its_own(known: int) -> None:
    """ "c" may begin the stop string, and is held back, by whoever tells it."""
    found = replay(RECORD, PARAMETERS, completion(), known)
    assert found.completion.num_tokens == 3
    assert found.finish_reason is None
    if known == 3:
        assert found.tokens is None
        return
    assert found.tokens is not None
    assert found.tokens.first_index == known
    assert found.tokens.token_ids == (10, 11, 12)[known:]
    assert found.tokens.text_delta == "ab"[known:]
    assert found.tokens.origins == (Origin.STORED,) * (3 - known)
    assert [entry.logprob for entry in found.tokens.logprobs] == [-1.0, -2.0, -math.inf][known:]
    assert found.completion.push((13,)).finish_reason is FinishReason.STOP


def test_a_completion_that_was_whole_ends_without_another_round() -> None:
    found = replay(RECORD, PARAMETERS, completion(eos=(12,)), 1)
    assert found.finish_reason is FinishReason.STOP
    assert replay(RECORD, PARAMETERS, completion(eos=(12,)), 3).finish_reason is FinishReason.STOP


def test_more_than_is_stored_cannot_be_known() -> None:
    with pytest.raises(DataLoss, match="the client has 4 tokens, the store 3"):
        replay(RECORD, PARAMETERS, completion(), 4)


def test_a_finished_session_is_told_again() -> None:
    record = replace(
        RECORD, state=SessionState.FINISHED, finish_reason=FinishReason.DEADLINE, logprobs=""
    )
    quiet = replace(PARAMETERS, logprobs=None)
    started, tokens, finished = told_again(record, "toy", replay(record, quiet, completion(), 1))
    assert isinstance(started, Started)
    assert isinstance(tokens, Tokens)
    assert (tokens.token_ids, tokens.text_delta) == ((11, 12), "bc")  # Nothing is held back now.
    assert isinstance(finished, Finished)
    assert finished.finish_reason is FinishReason.DEADLINE
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 3)
    assert finished.metrics.mean_acceptance_length == 1.5
    assert list(told_again(RECORD, "toy", replay(RECORD, quiet, completion(), 1))) == []


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


def test_a_resumed_session_needs_little_of_a_target_that_holds_it() -> None:
    """Two coordinators, one target: the record says what it holds."""

    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            async with aclosing(made.service.generate(SEEDED)) as events:
                _, session_id, num = await taken(events, 10)
                sent: list[Any] = []
                send = made.target_link.send

                def seen(item: Any) -> None:
                    sent.append(item)
                    send(item)

                made.target_link.send = seen  # type: ignore[method-assign]
                resumed = made.service.resume(ResumeRequest(session_id, num))
                await taken(resumed, 1)
                await resumed.aclose()
            epochs = [item.head.epoch for item in sent]
            first = sent[epochs.index(2)]
            k = SEEDED.num_draft_tokens or 2
            assert len(first.head.append) <= 2 * (k + 1)

    run_virtually(main())


def test_a_stream_that_still_runs_ends_when_another_resumes_its_session() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            events = made.service.generate(SEEDED)
            _, session_id, num = await taken(events, 3)
            rest = [e async for e in made.service.resume(ResumeRequest(session_id, num))]
            assert isinstance(rest[-1], Finished)
            with pytest.raises((StaleEpoch, Unavailable)):
                async for _ in events:
                    pass

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


def test_who_may_resume_what() -> None:
    async def main() -> None:
        async with bench(resume_grace_s=5.0) as made:
            with pytest.raises(NotFound):
                await anext(made.service.resume(ResumeRequest("f" * 32)))
            async with aclosing(made.service.generate(SEEDED, tenant="a")) as events:
                _, session_id, _ = await taken(events, 3)
            with pytest.raises(NotFound):
                await anext(made.service.resume(ResumeRequest(session_id), tenant="b"))
            with pytest.raises(DataLoss, match="num_tokens"):
                await anext(made.service.resume(ResumeRequest(session_id, 99), tenant="a"))

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
