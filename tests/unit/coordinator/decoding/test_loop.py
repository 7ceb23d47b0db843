"""The events that a client gets, and means over rounds."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from coordinator.decoding.load_meter import LoadMeter
from coordinator.decoding.loop import Entry, OutputQueue
from coordinator.draft_length.controller import LengthControl
from coordinator.draft_length.policy import RoundResult
from coordinator.routing.drafts import Drafted
from outrider.config.deployment import DraftConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.foundation.tokens import TokenSequence
from outrider.interfaces.messages import VerifyItem
from outrider.interfaces.request import GenerateRequest, RoundReport, Tokens
from outrider.registry.registry import WINDOW_S, Figures
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal, Proposal
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.telemetry.observer import SILENT
from target_service import lookups
from tests.support.coordinator_bench import (
    REQUEST,
    STEP_S,
    Bench,
    running,
    target_service,
    tokens_of,
)
from tests.support.session_links import OneToken
from tests.support.toy_engine import ToyEngine


def _entry(index: int, text: str, report: RoundReport | None = None) -> Entry:
    tokens = Tokens(index, (index,), text, (Origin.CORRECTION,), ())
    return Entry(index + 1, tokens, report, 0.0, range(index, index + 1))


async def test_committed_rounds_are_joined_to_one_event() -> None:
    committed, observer = Mock(**{"session.showable_length": 2}), Mock(wraps=SILENT)
    queue = OutputQueue(committed, 1e9, observer)
    for index, text in enumerate("abc"):
        queue.write(_entry(index, text))
    assert await queue.read() == (Tokens(0, (0, 1), "ab", (Origin.CORRECTION,) * 2, ()),)
    committed.session.showable_length = 3
    assert await queue.read() == (Tokens(2, (2,), "c", (Origin.CORRECTION,), ()),)
    shown = [([*rounds], num_tokens) for (rounds, num_tokens), _ in observer.shown.call_args_list]
    assert shown == [([0, 1], 2), ([2], 1)]


async def test_rounds_with_reports_are_separate_events() -> None:
    queue = OutputQueue(Mock(**{"session.showable_length": 9}), 1e9, SILENT)
    report = RoundReport(0, (), 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for index in range(2):
        queue.write(_entry(index, "a", report))
    for index in range(2):
        shown, tokens = await queue.read()
        assert isinstance(shown, RoundReport)
        assert tokens == Tokens(index, (index,), "a", (Origin.CORRECTION,), ())


TOKENS = EncodedProposal((1, 2, 3, 4))


def drafted(queue_ms: float, compute_ms: float, *, ahead: bool = False) -> Drafted:
    return Drafted(TOKENS, "replica", 0.0, 4, queue_ms=queue_ms, compute_ms=compute_ms, ahead=ahead)


@pytest.mark.virtual
async def test_figures_of_rounds_with_a_draft() -> None:
    meter = LoadMeter()
    watching = asyncio.create_task(meter.watch())
    assert meter.figures == Figures(busy=0.0, tokens_per_second=0.0, loop_lag_ms=0.0)
    for _ in range(500):
        for proposal in (
            drafted(0.0, 5.0),
            drafted(4.0, 5.0),
            drafted(6.0, 5.0),
            drafted(9.0, 5.0, ahead=True),
        ):
            meter.decided(proposal, num_accepted=2, num_tokens=3)
        meter.decided(
            Drafted(EMPTY_ENCODED_PROPOSAL, "fallback", 0.0, 0), num_accepted=0, num_tokens=1
        )
        await asyncio.sleep(0.1)
    found = meter.figures
    assert found.draft_waits == pytest.approx(0.25)
    assert found.look_ahead_hits == pytest.approx(0.25)
    assert found.acceptance == pytest.approx(0.5)
    assert found.tokens_per_second == pytest.approx(130, rel=0.03)
    await asyncio.sleep(40 * WINDOW_S)
    assert meter.figures.tokens_per_second == pytest.approx(0, abs=1e-6)
    assert meter.figures.draft_waits is None
    watching.cancel()


async def test_the_lag_is_read_without_the_sums_of_the_event_loop() -> None:
    """Exporters read it on their threads, while the event loop counts rounds."""
    meter: Any = LoadMeter()
    meter._sums = None
    assert meter.lag_ms == 0.0


async def test_look_ups_count_for_acceptance_only() -> None:
    meter = LoadMeter()
    meter.decided(Drafted(TOKENS, "local", 0.001, 4), num_accepted=2, num_tokens=3)
    found = meter.figures
    assert (found.draft_waits, found.look_ahead_hits) == (None, None)
    assert found.acceptance == pytest.approx(0.5)


RESIDENT: dict[str, Any] = {
    "drafts": {},
    "lookup": DraftConfig(model="ngram"),
    "lookup_on": "target",
}
LOOKED_UP = replace(REQUEST, prompt=(1, 2, 3) * 3, max_tokens=50, include_rounds=True)


def reports(events: Any) -> list[RoundReport]:
    return [event for event in events if isinstance(event, RoundReport)]


@pytest.mark.virtual
@pytest.mark.parametrize("looks_up", [False, True])
async def test_the_coordinator_looks_up_for_targets_that_do_not(looks_up: bool) -> None:
    """Such a target is an old one during an upgrade, or a new one of an upgrade to a draft."""
    lookup = NgramDrafter() if looks_up else None
    target = target_service(ToyEngine(4), lookup=lookup)
    made = Bench(target=target, fallback=OneToken(lambda _: None), **RESIDENT)
    items: list[VerifyItem] = []
    take = target.take
    target.take = lambda item, sender: (items.append(item), take(item, sender))[1]  # type: ignore[method-assign]
    async with running(made) as bench:
        rounds = reports(await bench.events(LOOKED_UP))
    proposed = [one.proposed_token_ids for one in rounds[1:-1]]
    if looks_up:
        assert max(map(len, proposed)) == 2
        assert len(items) < len(rounds)
    else:
        assert set(proposed) == {(1,)}  # As this coordinator's look-up proposes.
        assert not any(item.num_lookup_tokens or item.run_ahead for item in items[1:-1])


@pytest.mark.virtual
@pytest.mark.parametrize("with_reports", [True, False])
async def test_no_verdict_of_a_round_that_ran_ahead_counts_once_the_seed_is_repeated(
    with_reports: bool,
) -> None:
    """Not even if the target has run the round, and its verdict is on the way. Without reports,
    several verdicts are decided in one turn."""
    target = target_service(ToyEngine(4), lookup=NgramDrafter(), stream_interval_ms=100)
    made = Bench(target=target, fallback=OneToken(lambda _: None), **RESIDENT)
    async with running(made) as bench:
        for steps in range(20):
            request = replace(LOOKED_UP, seed=steps, rule=Rule.TOKEN, include_rounds=with_reports)
            first = asyncio.create_task(bench.events(request))
            await asyncio.sleep((steps + 0.5) * STEP_S)
            await bench.events(replace(request, max_tokens=1))
            events = await first
            proposed = [one.proposed_token_ids for one in reports(events)]
            assert set(proposed[steps + 3 : -1]) <= {(1,)}
            assert events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.virtual
@pytest.mark.parametrize("is_indexed", [False, True])
async def test_a_round_whose_text_is_not_indexed_says_nothing_of_acceptance(
    is_indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_indexed:
        monkeypatch.setattr(lookups, "INDEXED_PER_STEP_MAX", 0)
    results: list[RoundResult] = []
    monkeypatch.setattr(LengthControl, "note", lambda _, result: results.append(result))
    target = target_service(ToyEngine(4), lookup=NgramDrafter())
    made = Bench(target=target, length_control=True, **RESIDENT)
    async with running(made) as bench:
        await bench.events(replace(LOOKED_UP, prompt=(1, 2, 3) * 8, max_tokens=30))
    assert any(result.num_asked > 0 for result in results) is is_indexed


@pytest.mark.virtual
@pytest.mark.parametrize("lookup_on", ["target", "coordinator"])
@pytest.mark.parametrize("how", ["whole", "stopped", "left", "repeated"])
async def test_a_target_may_learn_what_the_store_has_of_an_ended_session(
    how: str, lookup_on: str
) -> None:
    """Not what it has decided beyond the end. And nothing of a session without an end, or with the
    seed of another."""
    target, released = target_service(ToyEngine(2), lookup=NgramDrafter()), list[Any]()
    target.release = lambda *arguments: released.append(arguments[2])  # type: ignore[method-assign]
    made = Bench(target=target, **RESIDENT | {"lookup_on": lookup_on})
    stops = SamplingParams(stop_token_ids=(1,) if how == "stopped" else ())
    prompt = (0, 1) * 5
    request = replace(LOOKED_UP, prompt=prompt, sampling=stops, rule=Rule.TOKEN, seed=4)
    seeds = {"stopped": range(40), "repeated": (4, 4)}.get(how, (4,))
    async with running(made) as bench:
        for seed in seeds:
            tokens = await told(bench, replace(request, seed=seed), leaves=how == "left")
            async with asyncio.timeout(5):
                while not released:
                    await asyncio.sleep(STEP_S)
            learned = released.pop()
            if learned is not None:
                text = TokenSequence((*prompt, *tokens))
                assert len(text) - 4 <= learned.length <= len(text)
                assert text.holds(learned.length, learned.digest)
                assert how != "stopped" or tokens.index(1) == len(tokens) - 1
    assert (learned is None) is (how in ("left", "repeated") or lookup_on == "coordinator")


async def told(bench: Bench, request: GenerateRequest, *, leaves: bool) -> list[int]:
    """The tokens of an answer, whose client leaves after the first ones or stays to the end."""
    tokens: list[int] = []
    async with aclosing(bench.service.streams.generate(request)) as events:
        async for event in events:
            tokens += tokens_of([event])
            if leaves and tokens:
                break
    return tokens


@pytest.mark.virtual
@pytest.mark.parametrize("by_target", [False, True])
async def test_plain_rounds_are_compared_with_the_look_up_that_would_draft(
    by_target: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LengthControl, "_drafting_is_due", lambda *_: False)
    any_chance = property(lambda _: 0.0, lambda *_: None)
    monkeypatch.setattr(LengthControl, "min_chance", any_chance, raising=False)
    noted: list[tuple[float, ...]] = []
    monkeypatch.setattr(
        LengthControl, "note_watched", lambda _, num_asked, survival: noted.append(survival)
    )
    target = target_service(ToyEngine(4), lookup=NgramDrafter() if by_target else None)
    own = Mock(wraps=NgramDrafter())
    made = Bench(target=target, length_control=True, fallback=own, **RESIDENT)
    async with running(made) as bench:
        rounds = reports(await bench.events(LOOKED_UP))
    assert not any(one.proposed_token_ids for one in rounds)
    assert len(noted) > 2
    assert any(noted)
    assert own.guess.called is not by_target


class HeadEngine(ToyEngine):
    """A target with a feature for each row."""

    num_sequences = 1

    def forward(self, steps: Any) -> Any:
        self.num_sequences = len(steps)
        return super().forward(steps)

    def features(self) -> Any:
        return [torch.zeros(9, 1) for _ in range(self.num_sequences)]


class UnfitHead:
    """After some rounds, proposes a token more than was asked for."""

    def __init__(self, engine: HeadEngine) -> None:
        self.engine = engine
        self._num_calls = 0

    def propose(self, requests: Any, features: Any) -> list[Proposal]:
        self._num_calls += 1
        more = self._num_calls > 6
        return [Proposal((1,) * (each.num_draft_tokens + more), ()) for each in requests]


@pytest.mark.virtual
@pytest.mark.parametrize("run_ahead_rounds", [0, 8])
async def test_a_round_that_ran_ahead_on_an_unfit_proposal_is_run_again(
    run_ahead_rounds: int,
) -> None:
    engine: Any = HeadEngine(4, max_model_len=512)
    head: Any = UnfitHead(engine)
    target = target_service(engine, self_drafter=head, stream_interval_ms=100)
    lookup = DraftConfig(model="model")
    made = Bench(target=target, drafts={}, lookup=lookup, run_ahead_rounds=run_ahead_rounds)
    async with running(made) as bench:
        request = replace(LOOKED_UP, max_tokens=40, rule=Rule.COUPLED, include_rounds=False)
        assert len(tokens_of(await bench.events(request))) == 40
