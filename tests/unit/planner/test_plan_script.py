"""`outrider plan` on toy models: the computed rounds equal rounds that are played."""

import asyncio
import re
from contextlib import nullcontext
from dataclasses import asdict, replace
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from outrider.bench.acceptance import Answer, LookupReader, ModelReader, Reading, Sample
from outrider.bench.measurement import Completion, Round, bench_request
from outrider.bench.prompts import BenchPrompt
from outrider.config.deployment import DraftConfig, load_config
from outrider.foundation.clock import run_virtually
from outrider.interfaces.request import RoundReport, Tokens
from outrider.interfaces.step_costs import StepCosts
from outrider.planner import rehearsal
from outrider.planner.choosing import Chooser, PlanReport, choose
from outrider.planner.rehearsal import PlayedSession, fit
from outrider.planner.rounds import Option, ServiceTimes, scripted, total
from outrider.replica.lookups import build_lookup
from outrider.speculation.sampling_params import Rule
from tests.support.command_lines import printed
from tests.support.coordinator_bench import bench, draft_service, target_service
from tests.support.toy_engine import ToyEngine

VOCAB_SIZE = 12
MAX_TOKENS = 40
SALT = 5
"""Salt of a draft that is sometimes right."""
MODEL, NGRAM, SUFFIX, HYBRID = (
    load_config({"draft_model": name, "hybrid_model_tokens": 2, "hybrid_min_score": 0.6}, {}).draft
    for name in ("m", "ngram", "suffix", "hybrid:suffix,m")
)


def _engine(salt: int = 1) -> ToyEngine:
    return ToyEngine(vocab_size=VOCAB_SIZE, salt=salt, max_model_len=96, num_pages=4096)


def _encode(text: str) -> tuple[int, ...]:
    return (1, 2, int(text) % VOCAB_SIZE, 1, 2)


def _sample(draft: DraftConfig, temperature: float, num: int = 4) -> Sample:
    lookup, model = build_lookup(draft), ModelReader(_engine(SALT))
    reader = model if lookup is None or draft.drafter.name else LookupReader(lookup)
    prompts = [BenchPrompt(str(index), "ab"[index % 2]) for index in range(num)]
    reading = Reading(_engine(), reader, "d", prompts, _encode, MAX_TOKENS)
    return reading.sample(temperature, lambda line: None)


def _played(draft: DraftConfig, sample: Sample, rule: Rule, k: int) -> list[list[tuple[int, int]]]:
    """Numbers of proposed and accepted tokens of each round but the first, by the services."""
    lookup, sessions = build_lookup(draft), []

    async def play() -> None:
        services = bench(
            target=target_service(_engine(), 0.0),
            draft=draft_service(_engine(SALT), 0.0),
            drafts=None if draft.drafter.runs_on == "draft" else {},
            fallback=lookup,
            lookup=draft,
            num_draft_tokens=k,
        )
        async with services as served:
            for text in sample.texts:
                request = bench_request(
                    text.prompt_ids,
                    text.max_tokens,
                    sample.temperature,
                    rule=rule,
                    seed=text.seed,
                    include_rounds=True,
                )
                events = await served.events(request)
                _, *later = [event for event in events if isinstance(event, RoundReport)]
                sessions.append([(len(one.proposed_token_ids), one.num_accepted) for one in later])

    run_virtually(play())
    return sessions


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("draft", [MODEL, NGRAM, SUFFIX, HYBRID], ids=["m", "n", "s", "h"])
def test_at_temperature_0_told_rounds_are_played_rounds(draft: DraftConfig, k: int) -> None:
    sample = _sample(draft, 0.0)
    told = scripted(draft, sample, Rule.GREEDY, k)
    for found, rounds in zip(told, _played(draft, sample, Rule.GREEDY, k), strict=True):
        assert found.num_rounds == 1 + len(rounds)
        proposed = sorted(number for number, _ in rounds)
        kinds = np.ndenumerate(found.kinds)
        counted = sorted(num for (num, _), number in kinds for _ in range(int(number)))
        assert counted == proposed
        for depth in range(k):
            assert found.accepted[depth] == sum(taken > depth for _, taken in rounds)


@pytest.mark.parametrize(
    ("draft", "rule"),
    [(MODEL, Rule.TOKEN), (MODEL, Rule.BLOCK), (MODEL, Rule.COUPLED), (HYBRID, Rule.TOKEN)],
    ids=lambda value: "" if isinstance(value, DraftConfig) else value.value,
)
def test_at_temperature_1_they_are_so_in_the_mean(draft: DraftConfig, rule: Rule) -> None:
    """Rounds, and acceptance of first tokens. Standard errors are below 0.45 and 0.014, so each
    bound fails by chance with probability below 1e-4."""
    sample = _sample(draft, 1.0, num=40)
    told = total(scripted(draft, sample, rule, 3))
    played = _played(draft, sample, rule, 3)
    rounds = mean(1 + len(found) for found in played)
    assert told.num_rounds / len(played) == pytest.approx(rounds, abs=1.8)
    first = mean(taken > 0 for found in played for proposed, taken in found if proposed)
    assert told.by_position[0] == pytest.approx(first, abs=0.056)


TARGET = StepCosts((1, 9), (0.010, 0.018))
DRAFT = StepCosts((1, 9), (0.002, 0.003))
TIMES = ServiceTimes(target=TARGET, draft=DRAFT)


def _session(
    text: Answer, k: int, wait_s: float, target_s: float, rest_s: float, rounds: int
) -> PlayedSession:
    """A session whose rounds accept nothing."""
    found = []
    for index in range(rounds):
        drafted = (7,) * k if index else ()
        report = RoundReport(index, drafted, 0, 1e3 * wait_s, 0.0, 0.0, 1e3 * target_s, 0.0)
        seconds = wait_s + target_s + rest_s if index else 0.1
        found.append(Round(report, Tokens(index, (7,), "", (), ()), seconds))
    return PlayedSession(text, k, Completion((7,) * rounds, 0.0, 9.0, rounds=found))


def test_a_rehearsal_finds_what_rounds_take_beside_the_tables() -> None:
    """The wait is 3 ms + 2 draft steps, the verification 1 ms + 1.5 target steps."""
    sample = _sample(MODEL, 0.0)
    played = []
    for text in sample.texts:
        for k in (1, 2, 4, 8):
            wait, verify = 0.003 + 2 * k * 0.002, 0.001 + 1.5 * TARGET.step_seconds(k + 1)
            played.append(_session(text, k, wait, verify, 0.002, 12))
        played.append(_session(text, 0, 0.0, 0.010, 0.004, 12))
    played.append(_session(sample.texts[0], 8, 5.0, 9.0, 3.0, 3))
    times = fit(TIMES, MODEL, 0.0, played)
    assert times.wait.at(4 * 0.002) == pytest.approx(0.019, rel=0.02)
    assert times.verify.at(TARGET.step_seconds(9)) == pytest.approx(0.028, rel=0.02)
    assert times.rest_s == pytest.approx(0.002, rel=0.02)
    assert times.plain.at(0.010) == pytest.approx(0.014, rel=0.02)
    assert times.first.at(TARGET.step_seconds(5)) == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(("num_noisy", "measured"), [(0, 1), (1, 2), (2, 2)])
def test_a_speed_up_above_the_tokens_of_a_round_is_measured_again(
    num_noisy: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the machine is busy, plain rounds take 100 ms, and later 10 ms. Rounds with drafts
    always take 10 ms or more."""
    sample, lines = _sample(NGRAM, 0.0), list[str]()
    replicas = SimpleNamespace(coordinator=lambda: nullcontext((None, None)))
    found = [
        [_session(text, 0, 0.0, plain_s, 0.0, 12) for text in sample.texts]
        for plain_s in (*[0.100] * num_noisy, 0.010)
    ]
    rehearsed = AsyncMock(side_effect=found)
    pair = Mock(return_value=nullcontext(replicas))
    monkeypatch.setattr(rehearsal, "running_pair", pair)
    monkeypatch.setattr(rehearsal, "_tables", AsyncMock(return_value=(TARGET, None)))
    monkeypatch.setattr(rehearsal, "_rehearsed", rehearsed)
    config = load_config({"draft_model": "ngram", "lookup_on": "target"}, {})
    [plan] = asyncio.run(rehearsal.rehearsed_plans(config, [sample], lines.append, 1))
    assert pair.call_args.args[2].lookup_on == "coordinator"  # So each round is measured alone.
    assert rehearsed.await_count == measured
    warned = "Warning: the measured times are wrong" in shown(plans=(plan,))
    assert warned == bool(plan.doubt) == (num_noisy == 2)
    assert lines[1:] == num_noisy * [lines[-1]]


def shown(*, width: int = 400, **told: Any) -> str:
    """The tables of a report."""
    known: dict[str, Any] = {
        "model": "t",
        "draft_model": "d",
        "num_prompts": 4,
        "max_tokens": 96,
        "concurrency": 1,
        "round_trip_ms": 0.0,
    }
    return printed(*PlanReport(**(known | told)).tables(), width=width)


@pytest.mark.parametrize("width", [40, 80])
def test_a_plan_fits_a_terminal(width: int) -> None:
    plan = choose(1, MODEL, _sample(MODEL, 1.0), TIMES)
    text = shown(width=width, plans=(plan,))
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert (text.count("\nrule ") == 1) == (width == 80)
    found = {*text.split()}
    for option in (plan.plain, *plan.options):
        figures = (value for value in asdict(option).values() if isinstance(value, float))
        assert {f"{figure:.3f}" for figure in figures} <= found
    chances = (one for rules in plan.acceptance.values() for one in rules["by_position"].values())
    assert {f"{chance:.3f}" for each in chances for chance in each if chance is not None} <= found


def test_a_plan_says_how_to_deploy_it() -> None:
    """A draft on its own device would look ahead by default, so the command names that."""
    plan = choose(1, MODEL, _sample(MODEL, 0.0), TIMES)

    def told(**chosen: int) -> str:
        changed = replace(plan.options[0], **chosen)  # type: ignore[arg-type]
        return shown(
            draft_model="hybrid:suffix,a b", plans=(replace(plan, plain=changed, chosen=changed),)
        )

    flags = "--num-draft-tokens 12 --look-ahead 4 --num-drafts 2"
    words = told(num_draft_tokens=12, look_ahead=4, draft_replicas=2)
    assert f"`outrider serve t --draft-model 'hybrid:suffix,a b' {flags}`" in words
    assert "has a speed-up of {:.2f} to {:.2f}. ".format(*plan.speedup_interval) in words
    apart = told(num_draft_tokens=12, look_ahead=0, draft_replicas=1)
    assert "--num-draft-tokens 12 --look-ahead 0`" in apart
    assert "With 2 drafts for each target replica, " in words
    assert "With 1 draft for each target replica, " in apart
    look_up = told(num_draft_tokens=4, look_ahead=0, draft_replicas=0)
    assert re.search(r"--num-draft-tokens 4` and your other flags\. [0-9.]+ tokens/s are", look_up)
    assert "for each target replica" not in look_up
    plain = told(num_draft_tokens=0, look_ahead=0, draft_replicas=0)
    assert "with `outrider serve t --num-draft-tokens 0` and your other flags:" in plain


def test_a_plan_says_how_to_set_the_rule_that_it_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting makes the rule coupled the default, even if it is the fastest. Every rule accepts
    the drafts of a look-up with the same probability, so none is set for them."""
    best_way = Chooser.best_way

    def coupled_is_fastest(chooser: Chooser, rule: Rule, *rest: Any) -> Option:
        option = best_way(chooser, rule, *rest)
        rate = option.tokens_per_second * (2 if rule is Rule.COUPLED else 1)
        return replace(option, tokens_per_second=rate)

    def told(rule: Rule, draft_replicas: int, temperature: float) -> str:
        plan = choose(1, MODEL, _sample(MODEL, temperature), TIMES)
        chosen = replace(plan.options[0], rule=rule, draft_replicas=draft_replicas)
        return shown(plans=(replace(plan, plain=chosen, chosen=chosen),))

    assert "--unseeded-rule block`" in told(Rule.BLOCK, 1, 1.0)
    assert "--unseeded-rule token`" in told(Rule.TOKEN, 1, 1.0)
    for lacks in (told(Rule.TOKEN, 0, 1.0), told(Rule.GREEDY, 1, 0.0)):
        assert "Deploy with" in lacks
        assert "-rule" not in lacks
    monkeypatch.setattr(Chooser, "best_way", coupled_is_fastest)
    choice = choose(1, MODEL, _sample(MODEL, 1.0), TIMES)
    assert Rule.COUPLED in {option.rule for option in choice.options}
    assert choice.chosen.rule is not Rule.COUPLED


@pytest.mark.parametrize(
    ("rate", "draft_replicas", "shares_device", "is_advised"),
    [
        (199.0, 1, False, True),
        (201.0, 1, False, False),
        (299.0, 2, False, True),
        (199.0, 1, True, False),
        (101.0, 0, False, False),
        (99.0, 0, False, False),
    ],
)
def test_a_plan_says_where_a_further_target_brings_more_than_a_draft(
    rate: float, draft_replicas: int, shares_device: bool, is_advised: bool
) -> None:
    plan = choose(1, MODEL, _sample(MODEL, 0.0), TIMES)
    way = replace(plan.options[0], tokens_per_second=rate, draft_replicas=draft_replicas)
    plan = replace(
        plan,
        plain=replace(plan.plain, tokens_per_second=100.0),
        options=(way,),
        chosen=way,
        times=replace(TIMES, shares_device=shares_device),
    )
    words = f"a device yields {rate / (1 + draft_replicas):.1f} tokens/s with a separate draft, "
    words += "and 100.0 without"
    assert (words in shown(plans=(plan,))) == is_advised
