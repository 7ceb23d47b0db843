"""The streams of sessions, with replicas and store in one process: how sessions end."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from coordinator.decoding.loop import COMMIT_GRACE_S
from outrider import errors, limits
from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.messages import ProposalReply
from outrider.interfaces.request import (
    Event,
    Finished,
    GenerateRequest,
    PromptTokens,
    RoundReport,
    Started,
    Tokens,
)
from outrider.sessions.store import Finish, FinishReason, SessionRecord
from outrider.speculation.proposal import DraftDistribution, EncodedProposal, encode_q
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.coordinator_bench import (
    CONFIG,
    REQUEST,
    Bench,
    bench,
    draft_service,
    failing,
    target_service,
    tokens_of,
)
from tests.support.session_links import ScriptedLink, proposal
from tests.support.stack import toy_text
from tests.support.toy_engine import ToyEngine, toy_logits

pytestmark = pytest.mark.virtual


def with_q_of_other_tokens(item: Any) -> ProposalReply:
    num = item.num_draft_tokens
    q = encode_q((DraftDistribution((8, 9), (2**15, 2**15)),) * num)
    return replace(proposal(item), proposal=EncodedProposal((1,) * num, q))


async def test_a_session_leaves_a_draft_whose_q_is_not_for_its_tokens() -> None:
    loop = asyncio.get_running_loop()
    link: Any = ScriptedLink(*[with_q_of_other_tokens] * 9)
    async with bench(drafts={"d": link}) as b:
        request = replace(REQUEST, rule=Rule.TOKEN, sampling=SamplingParams())
        events = await b.events(request)
        assert isinstance(events[-1], Finished)
        assert sum(item.num_draft_tokens > 0 for item in link.sent) == 1
        assert loop.time() < CONFIG.draft_timeout_ms / 1e3


@pytest.mark.parametrize(
    ("num_shown", "error"), [(1, errors.StoreUnavailable), (0, errors.DeadlineExceeded)]
)
async def test_commits_may_take_a_grace_beyond_the_deadline(
    num_shown: int, error: type[Exception]
) -> None:
    loop: Any = asyncio.get_running_loop()
    async with bench() as b:
        until = loop.time() + 1 + COMMIT_GRACE_S
        events = b.service.streams.generate(replace(REQUEST, deadline_ms=1_000))
        for _ in range(1 + num_shown):
            await anext(events)
        b.store.append = failing(b.store.append, until + 1)
        with pytest.raises(error):
            while True:
                await anext(events)
        assert loop.time() == pytest.approx(until, abs=0.01)


async def test_no_timer_is_left_once_a_session_has_ended() -> None:
    loop: Any = asyncio.get_running_loop()
    async with bench() as b:
        await b.events(replace(REQUEST, deadline_ms=500_000))
        await asyncio.sleep(1)
        late = [one for one in loop._scheduled if not one.cancelled() and one.when() > 400]
        assert not late


async def test_a_session_whose_store_is_away_at_its_end_waits() -> None:
    async with bench() as b:
        loop, finish = asyncio.get_running_loop(), b.store.finish
        b.store.finish = failing(finish, until=5.0)
        assert isinstance((await b.events())[-1], Finished)
        start = loop.time()
        assert start >= 5.0
        b.store.finish = failing(finish, until=1e9)
        with pytest.raises(errors.StoreUnavailable):
            await b.events(GenerateRequest((1,), max_tokens=2, deadline_ms=3_000))
        assert 3.0 <= loop.time() - start <= 10.0


def noted_openings(b: Bench, then: Callable[[int], Awaitable[None]]) -> list[str]:
    """Ids of the sessions that the store creates. Before each answer, calls `then`."""
    opened: list[str] = []
    open_at_once = b.store.open

    async def noted(session: SessionRecord) -> None:
        await open_at_once(session)
        opened.append(session.session_id)
        await then(len(opened))

    b.store.open = noted
    return opened


async def test_a_client_that_goes_while_its_session_is_opened_leaves_no_running_record() -> None:
    async with bench() as b:
        opened = noted_openings(b, lambda _: asyncio.sleep(0.5))
        with pytest.raises(errors.DeadlineExceeded):
            await b.events(replace(REQUEST, deadline_ms=100))
        waiting = asyncio.create_task(b.events())
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.sleep(1.0)
        assert len(opened) == 2
        for session_id in opened:
            record = await b.service.streams.session(session_id)
            assert record.finish_reason is FinishReason.CANCELLED


async def test_a_session_is_opened_at_the_second_try() -> None:
    async def silent_once(number: int) -> None:
        if number == 1:
            raise errors.StoreUnavailable("no answer")

    async with bench() as b:
        opened = noted_openings(b, silent_once)
        b.store.finish = failing(b.store.finish, until=0.1)
        started, *_, last = await b.events()
        assert isinstance(last, Finished)
        assert started.session_id == opened[1]
        abandoned = await b.service.streams.session(opened[0])
        assert abandoned.finish_reason is FinishReason.CANCELLED


async def test_a_session_that_waits_for_the_next_try_keeps_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "OPENINGS_MAX", 1)
    monkeypatch.setattr(limits, "COMMIT_RETRY_MS_MIN", 5_000)

    async def silent_once(number: int) -> None:
        if number == 1:
            raise errors.StoreUnavailable("no answer")

    async with bench() as b:
        noted_openings(b, silent_once)
        first = asyncio.create_task(b.events())
        await asyncio.sleep(0.1)
        assert isinstance((await b.events())[-1], Finished)
        assert not first.done()
        assert isinstance((await first)[-1], Finished)


async def test_a_running_session_is_cancelled_once_even_without_the_store() -> None:
    async with bench() as b:
        reasons, load = [], b.store.load
        async for event in b.service.streams.generate(REQUEST):
            if isinstance(event, Started):
                session_id = event.session_id
                with pytest.raises(errors.NotFound):
                    await b.service.streams.cancel(session_id, tenant="another")
                b.store.load = failing(load, until=1e9)
            if isinstance(event, Tokens):
                for _ in range(3):
                    await b.service.streams.cancel(session_id)
                    await asyncio.sleep(0)
            if isinstance(event, Finished):
                reasons.append(event.finish_reason)
        assert reasons == [FinishReason.CANCELLED]
        b.store.load = load
        await b.service.streams.cancel(session_id)


async def test_few_ends_are_stored_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the end of another tenant's session would wait in Redis' queue for all of them."""
    monkeypatch.setattr(limits, "CLOSINGS_MAX", 4)
    num_running = num_most = 0
    async with bench(max_sessions=100) as b:
        finish = b.store.finish

        async def noted(end: Finish) -> int:
            nonlocal num_running, num_most
            num_running += 1
            num_most = max(num_most, num_running)
            await asyncio.sleep(0.01)
            num_running -= 1
            return await finish(end)

        b.store.finish = noted
        streams = [b.service.streams.generate(REQUEST, resumable=False) for _ in range(32)]
        await asyncio.gather(*map(anext, streams))
        await asyncio.gather(*(one.aclose() for one in streams))
        await b.service._sessions.end_background()
    assert num_most == 4


async def test_a_cancelled_session_is_freed_without_garbage_collection() -> None:
    """A collection after some thousand sessions would hold the event loop."""
    gc.disable()
    try:
        async with bench(look_ahead=2) as b:
            events = b.service.streams.generate(REQUEST, resumable=False)
            assert [type(await anext(events)) for _ in range(2)] == [Started, Tokens]
            [run] = b.service._sessions.running.values()
            left = [weakref.ref(run), weakref.ref(run._draft), weakref.ref(run.context)]
            del run
            await events.aclose()
            await b.service._sessions.end_background()
            await asyncio.sleep(0.1)
            assert [one() for one in left] == [None] * len(left)
    finally:
        gc.enable()


async def test_a_session_that_is_lost_during_a_round_ends_with_that_error() -> None:
    async with bench(target=target_service(step_s=2.0)) as made:
        events = made.service.streams.generate(REQUEST)
        async for event in events:
            if isinstance(event, Tokens):
                break
        made.store.restore(({}, {}))
        with pytest.raises(errors.DataLoss, match="not stored any more"):
            async for _ in events:
                pass


async def test_a_failed_renewal_of_the_lease_ends_nothing() -> None:
    async with bench() as b:
        b.store.hold_lease = AsyncMock(side_effect=errors.InvariantError("a damaged key"))
        request = GenerateRequest((1, 2), max_tokens=60, num_draft_tokens=0)
        assert isinstance((await b.events(request))[-1], Finished)
        await asyncio.sleep(2.0)
        assert not b.service.streams.failed
        assert isinstance((await b.events(request))[-1], Finished)


async def test_a_bug_in_the_commits_is_reported_and_leaves_no_open_sessions() -> None:
    b = Bench()
    await b.service.start()
    b.store.append = AsyncMock(side_effect=RuntimeError("a bug"))
    with pytest.raises(errors.Unavailable):
        await b.events()
    assert b.service.streams.failed
    assert b.service.health.trouble
    stored = await b.store.records()
    with pytest.raises(errors.Unavailable, match="shutting down"):
        await b.events()
    assert await b.store.records() == stored
    await b.target.close()
    await b.draft.close()


async def test_verdicts_that_come_together_are_shown_together_up_to_the_end() -> None:
    """The target runs ahead and holds verdicts back. It has rounds behind the stop token, too."""
    request = replace(REQUEST, num_draft_tokens=0, rule=Rule.COUPLED, sampling=SamplingParams())
    async with bench() as b:
        token_ids = tokens_of(await b.events(request))
        ends = next(at for at, one in enumerate(token_ids[6:], 6) if one not in token_ids[:at])
        sampling = SamplingParams(stop_token_ids=(token_ids[ends],))
        for reports in (False, True):
            events = await b.events(replace(request, sampling=sampling, include_rounds=reports))
            shown = [event for event in events if isinstance(event, Tokens)]
            finished = events[-1]
            assert isinstance(finished, Finished)
            assert tokens_of(events) == token_ids[: ends + 1]
            assert finished.metrics.num_rounds == ends + 1
            assert (len(shown) == ends + 1) == reports
            assert sum(isinstance(event, RoundReport) for event in events) == reports * (ends + 1)


async def test_the_last_event_has_the_stop_string() -> None:
    async with bench(text=toy_text()) as b:
        whole = await b.events(REQUEST)
        said = "".join(event.text_delta for event in whole if isinstance(event, Tokens))
        stopped = await b.events(replace(REQUEST, stop=("\0never", said[3:5])))
    found = [event.stop_string for event in (whole[-1], stopped[-1]) if isinstance(event, Finished)]
    assert found == [None, said[3:5]]


SCORED = tuple(i * 3 % 7 for i in range(40))


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_a_prompts_log_probabilities_come_before_its_answer(max_tokens: int) -> None:
    """They are computed anew, although the target has cached the prompt."""
    async with bench() as b:
        plain = await b.events(replace(REQUEST, prompt=SCORED, max_tokens=5))
        request = replace(REQUEST, prompt=SCORED, max_tokens=max_tokens, prompt_logprobs=2)
        started, *parts, finished = await b.events(request)
    assert isinstance(started, Started)
    scored = [part for part in parts if isinstance(part, PromptTokens)]
    assert parts[: len(scored)] == scored
    assert tuple(token_id for part in scored for token_id in part.token_ids) == SCORED
    entries = [entry for part in scored for entry in part.logprobs]
    assert entries[0] is None
    for place, entry in enumerate(entries[1:], start=1):
        expected = toy_logits(1, SCORED[:place], 8).double().log_softmax(0)
        assert entry.logprob == pytest.approx(float(expected[SCORED[place]]))
        assert [one for _, one in entry.top] == pytest.approx(expected.topk(2).values.tolist())
    assert finished.finish_reason is FinishReason.LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (40, max_tokens)
    assert tokens_of(parts) == (tokens_of(plain) if max_tokens else [])


GAP = 5


class Gaps(ToyEngine):
    """After the token `GAP`, all logits are NaN. The target may give this token no probability."""

    def __init__(self, is_possible: bool) -> None:
        super().__init__()
        self._is_possible = is_possible

    def _run(self, step: SequenceStep) -> torch.Tensor:
        logits = super()._run(step)
        tokens = self.tokens(step.sequence_id).since(0)
        before = torch.tensor(tokens[len(tokens) - len(logits) :])
        if not self._is_possible:
            logits[:, GAP] = -torch.inf
        logits[before == GAP] = torch.nan
        return logits


async def shown(b: Bench, request: GenerateRequest) -> tuple[list[Event], str]:
    """The events of a session, and the error that ended it."""
    told: list[Event] = []
    try:
        async for event in b.service.streams.generate(request):
            told += [event]
    except errors.OutriderError as error:
        return told, error.message
    return told, ""


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("is_possible", [False, True])
@pytest.mark.parametrize("rule", Rule)
async def test_logits_without_a_distribution_fail_as_without_drafts(
    rule: Rule, is_possible: bool, logprobs: int | None
) -> None:
    """They end no session that plain decoding would finish. Where they end one, all tokens before
    them have been shown."""
    sampling = SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0)
    num_proposed = num_failed = 0
    async with bench(target=target_service(Gaps(is_possible))) as b:
        for seed in range(12):
            request = replace(
                REQUEST,
                prompt=(1, 2, seed % 4),
                rule=rule,
                seed=seed,
                sampling=sampling,
                logprobs=logprobs,
                num_draft_tokens=3,
                include_rounds=True,
            )
            events, error = await shown(b, request)
            own = tokens_of(events)
            if rule.absolute_noise:
                plain, plain_error = await shown(b, replace(request, num_draft_tokens=0))
                assert (own, error) == (tokens_of(plain), plain_error)
            assert ("row 0" in error) == (GAP in own[:19])
            assert len(own) == (own.index(GAP) + 1 if error else 20)
            num_failed += bool(error)
            rounds = [event for event in events if isinstance(event, RoundReport)]
            num_proposed += sum(GAP in one.proposed_token_ids for one in rounds)
    assert num_proposed > 5
    assert (num_failed > 3) == is_possible


async def test_a_prompt_whose_logits_are_no_numbers_is_not_scored() -> None:
    async with bench(target=target_service(Gaps(is_possible=True))) as b:
        request = replace(REQUEST, prompt=(1, GAP, 2, 3), prompt_logprobs=0, max_tokens=1)
        with pytest.raises(errors.InvariantError, match="logits of a token of the prompt"):
            await b.events(request)
        with_none = await b.events(replace(request, prompt=(1, 2, 3)))
    entries = [part.logprobs for part in with_none if isinstance(part, PromptTokens)]
    assert [entry and entry.top for entry in chain(*entries)] == [None, (), ()]


async def test_a_prompt_is_scored_within_the_deadline() -> None:
    async with bench(target=target_service(ToyEngine(pass_s=0.05))) as b:
        request = replace(REQUEST, prompt=SCORED, prompt_logprobs=0, max_tokens=0, deadline_ms=15)
        with pytest.raises(errors.DeadlineExceeded, match="before the prompt was scored"):
            await b.events(request)


ENDS = (2, 5)

LATE = SamplingParams(min_tokens=9, stop_token_ids=(5, 6))


@pytest.mark.parametrize("look_ahead", [0, 8])
@pytest.mark.parametrize(("rule", "temperature"), [(Rule.COUPLED, 1.0), (Rule.GREEDY, 0.0)])
async def test_nothing_ends_an_answer_before_min_tokens(
    rule: Rule, temperature: float, look_ahead: int
) -> None:
    """Nor does the draft propose an end before. The first token after it may be one."""
    target, draft = (
        made(ToyEngine(salt=1, eos_token_ids=ENDS)) for made in (target_service, draft_service)
    )
    reasons, lengths = set(), set()
    async with bench(target=target, draft=draft, look_ahead=look_ahead) as b:
        for seed in range(12):
            sampling = replace(LATE, temperature=temperature)
            request = replace(
                REQUEST, prompt=(1, seed % 7), seed=seed, sampling=sampling, include_rounds=True
            )
            told = [await b.events(replace(request, num_draft_tokens=k)) for k in (0, 3)]
            texts = [tokens_of(events) for events in told]
            assert texts[0] == texts[1]
            assert len(texts[0]) >= 9
            assert not {2, 5, 6}.intersection(texts[0][:9])
            early = [one.proposed_token_ids for one in told[1] if isinstance(one, RoundReport)][:2]
            assert not {2, 5, 6}.intersection(chain(*early))
            last = told[1][-1]
            assert last.stop_token_id == (6 if texts[0][-1] == 6 else None)
            reasons.add(last.finish_reason)
            lengths.add(len(texts[0]))
    assert 10 in lengths
    assert FinishReason.STOP in reasons


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED])
async def test_a_deadline_shows_a_prefix_of_the_whole_completion(rule: Rule) -> None:
    """With drafts its length depends on the tokens. Without drafts it depends on the time alone."""
    lengths: dict[int, set[int]] = {0: set(), 2: set()}
    settings = {"look_ahead": 0, "length_control": False, "max_sessions": 99}
    async with bench(**settings) as early, bench(**settings) as late:
        for seed in range(16):
            for num in lengths:
                sampling = SamplingParams()
                request = replace(
                    REQUEST,
                    seed=2 * seed + num // 2,
                    rule=rule,
                    sampling=sampling,
                    num_draft_tokens=num,
                    deadline_ms=65 if num else 45,
                )
                *events, finished = await early.events(request)
                assert finished.finish_reason is FinishReason.DEADLINE
                cut = tokens_of(events)
                whole = tokens_of(await late.events(replace(request, deadline_ms=None)))
                assert cut == whole[: len(cut)]
                lengths[num].add(len(cut))
    assert len(lengths[0]) == 1
    assert len(lengths[2]) > 1
