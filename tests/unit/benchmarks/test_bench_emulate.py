"""`bench emulate`: its figures by hand, the pair's law against its engines, and one small run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stack import running_stack

from benchmarks.emulate import (
    MODES,
    SCENARIOS,
    EmulateOptions,
    Round,
    best_num_draft_tokens,
    counted,
    figures,
    read_rounds,
    tokens_per_second,
)
from deploy.cli.main import main
from outrider.client import Client
from outrider.config import DraftConfig, TargetConfig
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import SCHEME, EmulatedSpec
from outrider.engine.interface import SequenceStep
from outrider.errors import Unavailable
from outrider.request import Event, Finished, Metrics, RoundReport, Started, Tokens, Usage
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule

PLAIN, SYNCHRONOUS, LOOK_AHEAD = MODES
SCENARIO = SCENARIOS["70b-1b"]
TINY = replace(
    SCENARIO,
    steps=SCENARIO.steps | {"verify_ms": 4.0, "draft_ms": 0.5},
    law=SCENARIO.law | {"vocab_size": 1_000, "support": 8},
    num_draft_tokens_max=3,
)


def rounds(*entries: tuple[int, int, float]) -> list[Round]:
    """Of K, tokens and milliseconds since the round before."""
    return [Round(drafted, tokens, False, 0.0, took) for drafted, tokens, took in entries]


async def test_a_round_comes_with_its_tokens() -> None:
    """What the round drafted is told before its tokens, and the clock is read with these."""

    async def events() -> AsyncIterator[Event]:
        yield Started("1", "m", 0, Rule.TOKEN)
        for index, (drafted, num_tokens) in enumerate(((0, 1), (3, 4), (2, 1))):
            ids, hit = tuple(range(drafted)), index == 1
            yield RoundReport(index, ids, num_tokens - 1, 0, 0, 0, 0, 0, look_ahead_hit=hit)
            ids, origins = tuple(range(num_tokens)), (Origin.BONUS,) * num_tokens
            yield Tokens(0, ids, "", origins, ())
        yield Finished(FinishReason.LENGTH, Usage(1, 6), Metrics(3, 5, 3, 2.0, 1.0, 1.0))

    ticks = iter((1.0, 2.5, 3.0))
    found = await read_rounds(events(), lambda: next(ticks))
    assert found[1:] == [Round(3, 4, True, 2.5, 1500.0), Round(2, 1, False, 3.0, 500.0)]
    assert found[0].num_tokens == 1


def test_a_window_drops_the_first_tokens_and_what_comes_after_the_last() -> None:
    """Tokens 1 | 2, 3 | 4, 5, 6 | 7 | 8, 9: the third is dropped, the seventh is the last."""
    session = rounds((0, 1, 50), (2, 2, 10), (4, 3, 20), (4, 1, 30), (4, 2, 99))
    found = counted(session, 7, 3)
    assert found == session[2:4]
    assert tokens_per_second(found) == pytest.approx(80)
    assert counted(session, 6, 1) == session[1:3]
    with pytest.raises(Unavailable, match="before its 10 tokens had come"):
        counted(session, 10, 3)


def test_the_ideal_is_a_step_of_the_target_a_round() -> None:
    """K = 2 at an acceptance of 1/4: 21/16 tokens each 18.3 ms, 71.7 tokens/s. A round is charged
    the steps that it waited for: of those of the draft where it did not work ahead."""
    scenario = replace(SCENARIO, acceptance={Rule.TOKEN: 0.5, Rule.COUPLED: 0.25})
    one = rounds((2, 1, 25.0))
    found = figures(scenario, SYNCHRONOUS, Rule.COUPLED, 2, one)
    assert found["tokens_per_second"] == pytest.approx(40.0)
    assert found["fraction_of_ideal"] == pytest.approx(40.0 * 18.3e-3 / (21 / 16))
    assert found["overhead_ms_p50"] == pytest.approx(25.0 - 18.3 - 2 * 1.3)
    assert (found["num_draft_tokens"], found["rule"]) == (2, "coupled")
    assert found["look_ahead_hit_rate"] is None
    ahead = figures(scenario, LOOK_AHEAD, Rule.COUPLED, 2, one)
    assert ahead["overhead_ms_p50"] == pytest.approx(25.0 - 18.3)
    assert ahead["look_ahead_hit_rate"] == 0.0
    plain = figures(scenario, PLAIN, Rule.TOKEN, 0, rounds((0, 1, 20.0)))
    assert plain["fraction_of_ideal"] == pytest.approx(18.3 / 20)


@pytest.mark.parametrize("lean", [-0.1, 0.1])
@pytest.mark.parametrize("most", [1, 2, 3, 13, 14])
async def test_the_best_number_of_draft_tokens_is_found_in_few_sessions(
    most: int, lean: float
) -> None:
    """Wherever the rate has its peak, both ends included, and whichever side of it is the higher
    one, each K is tried at most once."""
    for peak in range(1, most + 1):
        tried: list[int] = []

        async def rate(num_draft_tokens: int, peak: int = peak, tried: list[int] = tried) -> float:
            tried.append(num_draft_tokens)
            return -abs(num_draft_tokens - peak - lean)

        assert await best_num_draft_tokens(rate, most) == peak
        assert len(set(tried)) == len(tried) <= -(-most // 2) + 2
        assert set(tried) <= set(range(1, most + 1))


@pytest.mark.parametrize(("tokens", "dropped"), [(32, 8), (215, 53), (4000, 200)])
def test_few_tokens_alone_are_enough_to_say(tokens: int, dropped: int) -> None:
    """A part of them does not count where nobody says how many."""
    assert EmulateOptions(tokens=tokens).num_dropped == dropped


@pytest.mark.xdist_group("redis")
def test_the_command_measures_every_mode_and_prints_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Services in this process. Steps last at least as long as is said of them: on a busy machine
    tokens come together, so single rounds may look shorter, even all of a measurement, but not
    those of two."""
    delays: list[float] = []

    @asynccontextmanager
    async def running_pair(target: TargetConfig, draft: DraftConfig, _: object) -> Any:
        assert target.engine == draft.engine == TINY.engine
        spec = EmulatedSpec.parse(TINY.engine.removeprefix(f"{SCHEME}:"))

        @asynccontextmanager
        async def coordinator(look_ahead: int, delay_ms: float = 0.0) -> AsyncIterator[Client]:
            delays.append(delay_ms)
            engines = EmulatedEngine(spec, "target"), EmulatedEngine(spec, "draft")
            directory = tmp_path / str(len(delays))
            async with running_stack(*engines, directory, look_ahead=look_ahead) as stack:
                yield stack.client

        yield SimpleNamespace(coordinator=coordinator)

    monkeypatch.setitem(SCENARIOS, "70b-1b", TINY)
    monkeypatch.setattr("benchmarks.emulate.running_pair", running_pair)
    assert main(["bench", "emulate", "--tokens", "60", "--dropped", "8", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    assert shown.err == ""
    value = json.loads(shown.out)
    assert (value["scenario"], value["tokens"], value["dropped"]) == ("70b-1b", 60, 8)
    assert delays == [0.0, 0.0, 2.5, 0.0, 2.5]
    plain = value["plain"]
    assert (plain["num_draft_tokens"], plain["tokens_per_round"]) == (0, 1.0)
    assert 0 < plain["fraction_of_ideal"] < 1.1
    assert plain["look_ahead_hit_rate"] is None
    delayed, stretched = value["with_round_trip"], []
    assert delayed["ms"] == TINY.round_trip_ms
    for mode in (SYNCHRONOUS, LOOK_AHEAD):
        rates = {}
        for rule in mode.rules:
            entry = value["by_rule"][rule.value][mode.name]
            assert entry["rule"] == rule.value
            assert 1 <= entry["num_draft_tokens"] <= 3
            assert 1 < entry["tokens_per_round"] <= 1 + entry["num_draft_tokens"]
            round_ms = entry["tokens_per_round"] / entry["tokens_per_second"] * 1e3
            stretched.append(round_ms / TINY.steps["verify_ms"])
            rates[rule.value] = entry["tokens_per_second"]
        faster = max(rates, key=lambda rule: rates[rule])
        assert value[mode.name] == value["by_rule"][faster][mode.name]
        assert delayed[mode.name]["rule"] == faster
    assert sorted(stretched)[1] > 0.9
    assert 0 <= value["look_ahead"]["look_ahead_hit_rate"] <= 1


def test_the_stated_acceptance_is_that_of_the_engines() -> None:
    """Over 4,000 prefixes, by the sums that define it: of a token sum min(p, q), whose mean has a
    standard deviation of 0.0013; under coupled that argmax(log q + g) = argmax(log p + g) for
    Gumbel noise g, the sum over tokens i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    spec = replace(EmulatedSpec.parse(SCENARIO.engine.removeprefix(f"{SCHEME}:")), vocab_size=600)
    tokens = tuple(torch.randint(600, (4_000,), generator=torch.Generator()).tolist())
    rows = [
        EmulatedEngine(spec, role).forward([SequenceStep("s", tokens, 4_000)])[0].double()
        for role in ("target", "draft")
    ]
    ids = rows[0].topk(spec.support).indices
    p, q = (row.softmax(-1).gather(1, ids).numpy() for row in rows)
    overlap = np.minimum(p, q).sum(1).mean()
    coupled = sum(
        1 / np.maximum(p / p[:, i : i + 1], q / q[:, i : i + 1]).sum(1) for i in range(spec.support)
    ).mean()
    assert overlap == pytest.approx(SCENARIO.acceptance[Rule.TOKEN], abs=0.006)
    assert coupled == pytest.approx(SCENARIO.acceptance[Rule.COUPLED], abs=0.006)
    assert SCENARIO.expected_tokens(Rule.TOKEN, 0) == 1.0
    assert SCENARIO.expected_tokens(Rule.TOKEN, 2) == pytest.approx(1 + 0.8 + 0.64)
