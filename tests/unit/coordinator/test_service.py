"""The coordinator with its replicas and store in one process: how sessions end."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from coordinator.decoding import load_meter
from coordinator.decoding.loop import COMMIT_GRACE_S, SessionRun
from coordinator.service import LOOK_PERIOD_S, TROUBLE_S
from outrider import errors, limits
from outrider.drafters.drafter import DraftRequest
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
from outrider.interfaces.step_costs import StepCosts
from outrider.sessions.store import FinishReason, SessionRecord
from outrider.speculation.proposal import DraftDistribution, Proposal, SealedProposal, encode_q
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.coordinator_bench import (
    CONFIG,
    REQUEST,
    STEP_S,
    Bench,
    SlowText,
    bench,
    draft_service,
    failing,
    running,
    target_service,
    tokens_of,
)
from tests.support.rounds import SeverableLink
from tests.support.session_links import ScriptedLink, proposal
from tests.support.stack import toy_text
from tests.support.toy_engine import ToyEngine, toy_logits

pytestmark = pytest.mark.virtual


def with_q_of_other_tokens(item: Any) -> ProposalReply:
    num = item.num_draft_tokens
    q = encode_q((DraftDistribution((8, 9), (2**15, 2**15)),) * num)
    return replace(proposal(item), proposal=SealedProposal((1,) * num, q))


async def test_a_session_leaves_a_draft_whose_q_is_not_for_its_tokens() -> None:
    loop = asyncio.get_running_loop()
    link: Any = ScriptedLink(*[with_q_of_other_tokens] * 9)
    async with bench(drafts={"d": link}) as b:
        request = replace(REQUEST, rule=Rule.TOKEN, sampling=SamplingParams())
        events = await b.events(request)
        assert isinstance(events[-1], Finished)
        assert sum(item.num_draft_tokens > 0 for item in link.sent) == 1
        assert loop.time() < CONFIG.draft_timeout_ms / 1e3


async def test_no_request_is_taken_while_the_event_loop_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single pause is no reason, however long. CPU time is measured too."""
    loop: Any = asyncio.get_running_loop()

    def stall() -> None:
        nonlocal timer
        loop._virtual.wait(1.0)  # Something blocks the event loop.
        timer = loop.call_later(0.001, stall)

    monkeypatch.setattr(load_meter.time, "process_time", lambda: 0.4 * loop.time())
    async with bench() as b:
        timer = loop.call_later(0, stall)
        await asyncio.sleep(2)
        assert isinstance((await b.events(REQUEST))[-1], Finished)
        await asyncio.sleep(4)
        with pytest.raises(errors.Overloaded, match=r"is \d{3} ms late") as refused:
            await b.events(REQUEST)
        assert refused.value.of_server
        assert (b.service.figures.loop_lag_ms or 0) > 300
        timer.cancel()
        await asyncio.sleep(5)
        assert isinstance((await b.events(REQUEST))[-1], Finished)
        assert b.service.figures.busy == pytest.approx(0.4, rel=0.15)


@pytest.mark.parametrize(
    ("num_shown", "error"), [(1, errors.StoreUnavailable), (0, errors.DeadlineExceeded)]
)
async def test_commits_may_take_a_grace_beyond_the_deadline(
    num_shown: int, error: type[Exception]
) -> None:
    loop: Any = asyncio.get_running_loop()
    async with bench() as b:
        until = loop.time() + 1 + COMMIT_GRACE_S
        events = b.service.generate(replace(REQUEST, deadline_ms=1_000))
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


@pytest.mark.parametrize(("silent_s", "is_healthy"), [(2.5, True), (10.0, False)])
@pytest.mark.parametrize("what", ["store", "target"])
async def test_a_short_silence_is_no_trouble(what: str, silent_s: float, is_healthy: bool) -> None:
    """As while a replica that is being loaded takes the cores of the target or the store."""
    async with bench() as b:
        loop = asyncio.get_running_loop()
        start = loop.time()
        if what == "store":
            b.store.load = failing(b.store.load, start + silent_s)
        else:
            b.target_link.sever(errors.LinkLost("gone"), reachable=False)
            loop.call_later(silent_s, b.target_link.restore)
        found = set[str]()
        while loop.time() < start + silent_s:
            found.add(b.service.trouble)
            assert found == {""} or loop.time() >= start + TROUBLE_S
            await asyncio.sleep(0.1)
        reason = max(found)
        assert reason == "" if is_healthy else what in reason
        await asyncio.sleep(LOOK_PERIOD_S + 0.3)
        assert b.service.trouble == ""
    assert "shutting down" in b.service.trouble


async def test_the_time_of_a_look_counts_as_silence() -> None:
    """If no replica answers, a look takes 4 s."""

    async def silent() -> bool:
        await asyncio.sleep(4)
        return False

    async with bench() as b:
        b.service.targets.healthy = silent  # type: ignore[method-assign]
        await asyncio.sleep(LOOK_PERIOD_S + 4.1)
        assert "target" in b.service.trouble


async def test_a_look_that_crashes_is_trouble_until_the_next_look_succeeds() -> None:
    async with bench() as b:
        targets: Any = b.service.targets
        healthy, targets.healthy = targets.healthy, AsyncMock(side_effect=KeyError("x"))
        await asyncio.sleep(TROUBLE_S + 2 * LOOK_PERIOD_S)
        assert b.service.trouble
        targets.healthy = healthy
        await asyncio.sleep(2 * LOOK_PERIOD_S)
        assert b.service.trouble == ""


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
            record = await b.service.session(session_id)
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
        abandoned = await b.service.session(opened[0])
        assert abandoned.finish_reason is FinishReason.CANCELLED


async def test_many_sessions_begin_and_end_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the steps, the event loop does other work."""
    turn, steps = 0, {"check": Counter[int](), "stop": Counter[int]()}

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            steps[name][turn] += 1
            return call(*arguments, **named)

        return wrapped

    monkeypatch.setattr(SessionRun, "stop", noted("stop", SessionRun.stop))
    async with bench(max_sessions=100) as b:
        monkeypatch.setattr(b.service, "_check", noted("check", b.service._check))
        counting = asyncio.create_task(count_turns())
        streams = [b.service.generate(REQUEST, resumable=False) for _ in range(64)]
        await asyncio.gather(*map(anext, streams))
        await asyncio.gather(*(one.aclose() for one in streams))
        await b.service._sessions.end_background()
        counting.cancel()
    for found in steps.values():
        assert found.total() == 64
        assert max(found.values()) <= limits.STARTS_MAX == limits.ENDINGS_MAX


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
        async for event in b.service.generate(REQUEST):
            if isinstance(event, Started):
                session_id = event.session_id
                with pytest.raises(errors.NotFound):
                    await b.service.cancel(session_id, tenant="another")
                b.store.load = failing(load, until=1e9)
            if isinstance(event, Tokens):
                for _ in range(3):
                    await b.service.cancel(session_id)
                    await asyncio.sleep(0)
            if isinstance(event, Finished):
                reasons.append(event.finish_reason)
        assert reasons == [FinishReason.CANCELLED]
        b.store.load = load
        await b.service.cancel(session_id)


@pytest.mark.virtual(False)
async def test_tokenizing_counts_for_the_deadline_and_for_admission() -> None:
    async with bench(text=SlowText(0.5), max_sessions=1) as b:
        first = asyncio.create_task(b.events(GenerateRequest("abcd", max_tokens=1)))
        await asyncio.sleep(0.1)
        with pytest.raises(errors.Overloaded) as refused:
            await b.events(GenerateRequest("abcd", max_tokens=1))
        assert refused.value.of_server
        assert isinstance((await first)[-1], Finished)
        with pytest.raises(errors.DeadlineExceeded, match="deadline_ms"):
            await b.events(GenerateRequest("abcd", max_tokens=1, deadline_ms=100))


async def test_a_session_that_is_lost_during_a_round_ends_with_that_error() -> None:
    async with bench(target=target_service(step_s=2.0)) as made:
        events = made.service.generate(REQUEST)
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
        assert not b.service.failed
        assert isinstance((await b.events(request))[-1], Finished)


async def test_a_bug_in_the_commits_is_reported_and_leaves_no_open_sessions() -> None:
    b = Bench()
    await b.service.start()
    b.store.append = AsyncMock(side_effect=RuntimeError("a bug"))
    with pytest.raises(errors.Unavailable):
        await b.events()
    assert b.service.failed
    assert b.service.trouble
    stored = await b.store.records()
    with pytest.raises(errors.Unavailable, match="shutting down"):
        await b.events()
    assert await b.store.records() == stored
    await b.target.close()
    await b.draft.close()


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
        async for event in b.service.generate(request):
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


async def test_sessions_of_a_draft_on_trial_learn_separately_but_know_all_seeds() -> None:
    async with bench(length_control=True) as b:

        async def drafted(seed: int) -> list[float]:
            """Weights of the rounds with a draft from which sessions learned, without the trial and
            in it."""
            await b.events(replace(REQUEST, seed=seed, rule=Rule.TOKEN, sampling=SamplingParams()))
            lengths, tried = b.service._lengths, b.draft.describe()
            return [lengths.learned(one).costs._target.weight for one in (None, tried)]

        [before, _] = await drafted(seed=1)
        await b.service.drafts.join("tried", SeverableLink(b.draft), trial_share=1.0)
        assert await drafted(seed=1) == [before, 0]
        [without, tried] = await drafted(seed=2)
        assert without == before > 0 < tried
        b.service.drafts.retire("tried")
        assert await drafted(seed=2) == [before, tried]

        # The draft on trial may be the first that a coordinator knows.
        await b.service.drafts.join("other", SeverableLink(b.draft), trial_share=1.0)
        lengths = b.service._lengths
        lengths._draft = None
        kept = b.service.drafts.replicas.pop(next(iter(b.service.drafts.replicas)))
        await drafted(seed=3)
        assert lengths._draft is None
        b.service.drafts.replicas["kept"] = kept
        await drafted(seed=4)
        assert lengths._draft is kept.description


@pytest.mark.parametrize(
    ("rule", "num_counted"), [(Rule.TOKEN, 1), (Rule.BLOCK, 1), (Rule.COUPLED, 3)]
)
@pytest.mark.parametrize("length_control", [False, True])
async def test_a_trial_counts_no_session_that_repeats_a_seed(
    rule: Rule, num_counted: int, length_control: bool
) -> None:
    """If the first session with this seed still runs when the second begins, it does not count
    either."""
    request = replace(REQUEST, seed=6, rule=rule, sampling=SamplingParams())
    async with bench(length_control=length_control) as b:
        await b.service.drafts.join("tried", SeverableLink(b.draft), trial_share=1.0)
        sums = []
        for _ in range(3):
            await b.events(request)
            await asyncio.sleep(1)
            sums.append(b.service.trial_sums.new)
        assert [one.num_sessions for one in sums] == [min(n, num_counted) for n in (1, 2, 3)]
        assert (sums[0] == sums[2]) == (num_counted == 1)
        first = asyncio.create_task(b.events(replace(request, seed=7)))
        await asyncio.sleep(6 * STEP_S)
        await b.events(replace(request, seed=7))
        await first
        await asyncio.sleep(1)
        assert (b.service.trial_sums.new == sums[2]) == (num_counted == 1)


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


@pytest.mark.parametrize("seed", [None, 7])
async def test_two_coordinators_draw_different_seeds(seed: int | None) -> None:
    """With `--seed`, a coordinator of the same name draws the same series again."""

    async def drawn(name: str) -> list[int]:
        async with bench(name=name, seed=seed) as b:
            events = [await b.events(replace(REQUEST, seed=None, max_tokens=1)) for _ in range(9)]
        return [one.seed for one in chain(*events) if isinstance(one, Started)]

    names = ("one", "other", "one")
    [one, other, again] = [await drawn(name) for name in names]
    assert len({*one, *other}) == 18
    assert (one == again) == (seed is not None)


class Repeating(ToyEngine):
    """A target's engine and self-drafter, which drafts one token over and over."""

    @property
    def engine(self) -> "Repeating":
        return self

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        self._num_rows = [step.num_logits for step in steps]
        return super().forward(steps)

    def features(self) -> list[torch.Tensor]:
        return [torch.empty(num, 1) for num in self._num_rows]

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        return [Proposal((1,) * one.num_draft_tokens) for one in requests]


async def test_sessions_of_a_target_on_trial_learn_and_are_counted_apart() -> None:
    costs = [StepCosts((1,), (seconds,)) for seconds in (STEP_S, 2 * STEP_S)]
    engines: list[Any] = [Repeating(), Repeating()]
    targets = [
        target_service(engine, self_drafter=engine, costs=one)
        for engine, one in zip(engines, costs, strict=True)
    ]
    async with bench(target=targets[0], length_control=True) as b:
        request = replace(REQUEST, seed=None, sampling=SamplingParams(temperature=0.0))
        text = tokens_of(await b.events(request))
        lengths = b.service._lengths
        before = lengths.costs._target.weight
        link = SeverableLink(targets[1])
        await b.service.targets.join("tried", link, trial_share=1.0)
        assert tokens_of(await b.events(request)) == text
        tried = lengths.learned(targets[1].describe()).costs
        assert lengths.costs._target.weight == before > 0 < tried._target.weight
        assert [one._table for one in (lengths.costs, tried)] == costs
        await asyncio.sleep(1)
        sums = b.service.trial_sums
        assert (sums.replica, sums.old.num_rounds) == ("tried", 0)
        assert sums.new.num_rounds > 0
        running = asyncio.create_task(b.events(request))
        await asyncio.sleep(5 * STEP_S)
        link.sever(errors.LinkLost("down"), reachable=False)
        assert tokens_of(await running) == text
        await asyncio.sleep(1)
        assert b.service.trial_sums.old.num_rounds == 0
        await b.service.targets.join("other", SeverableLink(targets[1]), trial_share=1e-9)
        assert tokens_of(await b.events(request)) == text
        await asyncio.sleep(1)
        sums = b.service.trial_sums
        assert (sums.replica, sums.new.num_rounds) == ("other", 0)
        assert sums.old.num_rounds > 0
    await targets[1].close()


async def test_lengths_are_learned_for_a_target_that_is_not_on_trial() -> None:
    made = Bench(length_control=True)
    costs = StepCosts((1,), (STEP_S,))
    tried = target_service(costs=costs)
    await made.service.targets.join("tried", SeverableLink(tried), trial_share=1.0)
    async with running(made) as b:
        assert b.service.targets.first.step_costs == costs
        assert b.service._lengths._target.step_costs is None
    await tried.close()
