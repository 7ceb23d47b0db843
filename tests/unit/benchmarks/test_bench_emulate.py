"""`bench emulate`: its figures by hand, and one small run of everything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.emulate import EmulateOptions
from benchmarks.emulate_pair import expected_tokens
from benchmarks.emulate_report import EmulateReport, ModeFigures, figures, render
from benchmarks.emulate_rounds import (
    Hits,
    Round,
    TimedRounds,
    Window,
    best_num_draft_tokens,
    read_rounds,
    timed,
)
from benchmarks.emulate_scenarios import (
    LOOK_AHEAD,
    PLAIN,
    RULES,
    SCENARIOS,
    SYNCHRONOUS,
    Pair,
    Steps,
)
from deploy.cli.main import main
from outrider.engine.emulated_spec import SCHEME, EmulatedSpec
from outrider.errors import Unavailable
from outrider.request import Event, Finished, Metrics, RoundReport, Started, Tokens, Usage
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule

SCENARIO = SCENARIOS["70b-1b"]
TINY = replace(
    SCENARIO,
    name="tiny",
    vocab_size=1_000,
    support=8,
    steps=Steps(verify_ms=4.0, verify_tokens=16, draft_ms=0.5, draft_branches=64),
    num_draft_tokens_max=3,
)
PAIR = Pair(SCENARIO, 0.65, {Rule.TOKEN: 0.5, Rule.COUPLED: 0.25})


def round_ms(entry: dict[str, Any]) -> float:
    """The mean."""
    return float(entry["tokens_per_round"] / entry["tokens_per_second"] * 1e3)


def a_round(
    num_draft_tokens: int, num_tokens: int, arrived_s: float = 0.0, hit: bool = False
) -> Round:
    return Round(num_draft_tokens, num_tokens - 1, num_tokens, hit, arrived_s)


def rounds(*entries: tuple[int, int, float]) -> list[Round]:
    """Of K, tokens and milliseconds since the round before."""
    now, found = 100.0, []
    for num_draft_tokens, num_tokens, took_ms in entries:
        now += took_ms / 1e3
        found.append(a_round(num_draft_tokens, num_tokens, now))
    return found


def report(index: int, num_draft_tokens: int, num_accepted: int, hit: bool) -> RoundReport:
    token_ids = tuple(range(num_draft_tokens))
    return RoundReport(index, token_ids, num_accepted, 0, 0, 0, 0, 0, look_ahead_hit=hit)


def mode_figures(rate: float, rule: str = "token", num_draft_tokens: int = 7) -> ModeFigures:
    return ModeFigures(
        tokens_per_second=rate,
        num_draft_tokens=num_draft_tokens,
        rule=rule,
        tokens_per_round=3.0,
        fraction_of_ideal=0.5,
        look_ahead_hit_rate=None,
        overhead_ms_p50=1.25,
        hits=None,
    )


def test_both_replicas_get_the_pair_whose_deviation_was_solved() -> None:
    pair = Pair.of(SCENARIO)
    assert pair.acceptance[Rule.TOKEN] == pytest.approx(0.80, abs=0.005)
    assert 0.75 <= pair.acceptance[Rule.COUPLED] <= 0.77
    spec = EmulatedSpec.parse(pair.engine.removeprefix(f"{SCHEME}:"))
    assert spec == EmulatedSpec(deviation=pair.deviation)
    other = Pair.of(TINY)
    assert EmulatedSpec.parse(other.engine) == EmulatedSpec(
        vocab_size=1_000, support=8, deviation=other.deviation, verify_ms=4.0, draft_ms=0.5
    )


async def test_a_round_comes_with_its_tokens() -> None:
    """What the round drafted is told before its tokens, and the clock is read with these."""

    async def events() -> AsyncIterator[Event]:
        yield Started("1", "m", 0, Rule.TOKEN)
        for index, (num_draft_tokens, num_tokens) in enumerate(((0, 1), (3, 4), (2, 1))):
            yield report(index, num_draft_tokens, num_tokens - 1, hit=index == 1)
            ids, origins = tuple(range(num_tokens)), (Origin.BONUS,) * num_tokens
            yield Tokens(0, ids, "", origins, ())
        yield Finished(FinishReason.LENGTH, Usage(1, 6), Metrics(3, 5, 3, 2.0, 1.0, 1.0))

    ticks = iter((1.0, 2.5, 3.0))
    found = await read_rounds(events(), lambda: next(ticks))
    assert found == [a_round(0, 1, 1.0), a_round(3, 4, 2.5, hit=True), a_round(2, 1, 3.0)]


def test_a_window_drops_the_first_tokens_and_what_comes_after_the_last() -> None:
    """Tokens 1 | 2, 3 | 4, 5, 6 | 7 | 8, 9: the third is dropped, the seventh is the last."""
    session = rounds((0, 1, 50), (2, 2, 10), (4, 3, 20), (4, 1, 30), (4, 2, 99))
    found = timed(session, Window(num_tokens=7, num_dropped=3))
    assert found.rounds == tuple(session[2:4])
    assert found.milliseconds == pytest.approx((20, 30))
    assert found.num_tokens == 4
    assert found.tokens_per_second == pytest.approx(80)
    assert found.tokens_per_round == 2
    whole = timed(session, Window(num_tokens=6, num_dropped=1))
    assert whole.rounds == tuple(session[1:3])
    with pytest.raises(Unavailable, match="before its 10 tokens had come"):
        timed(session, Window(num_tokens=10, num_dropped=3))


def test_a_round_is_charged_the_steps_that_it_waited_for() -> None:
    """The median of 25 - 18 - 2 * 1, 30 - 18 - 4 * 1 and 22 - 18 - 0."""
    session = rounds((0, 1, 0), (2, 1, 25), (4, 1, 30), (0, 1, 22))
    found = timed(session, Window(num_tokens=4, num_dropped=1))
    assert found.overhead_ms(18.0, 1.0) == pytest.approx(5.0)


def test_a_short_session_counts_by_what_its_rounds_are_expected_to_commit() -> None:
    """Whatever they did commit: 1 + 1/2 and 1 + 1/2 + 1/4 tokens in 50 ms."""
    took = (20.0, 30.0)
    lucky = TimedRounds((a_round(1, 2), a_round(2, 3)), took)
    unlucky = TimedRounds((a_round(1, 1), a_round(2, 1)), took)
    assert lucky.expected_rate(0.5) == unlucky.expected_rate(0.5) == pytest.approx(65)


def test_the_ideal_is_a_step_of_the_target_a_round() -> None:
    """K = 2 at an acceptance of 1/4: 21/16 tokens each 18.3 ms, 71.7 tokens/s."""
    one = TimedRounds((a_round(2, 1),), (25.0,))
    found = figures(PAIR, SYNCHRONOUS, Rule.COUPLED, 2, one)
    assert found.tokens_per_second == pytest.approx(40.0)
    assert found.fraction_of_ideal == pytest.approx(40.0 * 18.3e-3 / (21 / 16))
    assert found.overhead_ms_p50 == pytest.approx(25.0 - 18.3 - 2 * 1.3)
    assert (found.num_draft_tokens, found.rule) == (2, "coupled")
    assert (found.look_ahead_hit_rate, found.hits) == (None, None)
    ahead = figures(PAIR, LOOK_AHEAD, Rule.COUPLED, 2, one)
    assert ahead.overhead_ms_p50 == pytest.approx(25.0 - 18.3)
    assert ahead.look_ahead_hit_rate == 0.0
    plain = figures(PAIR, PLAIN, Rule.TOKEN, 0, TimedRounds((a_round(0, 1),), (20.0,)))
    assert plain.fraction_of_ideal == pytest.approx(18.3 / 20)


def test_hits_are_told_by_the_outcome_of_the_round_before() -> None:
    """K = 2: after 2, 0, 2, 0 and 1 of them were accepted; after a round that drafted less nothing
    is told."""
    tokens_and_hits = ((3, True), (1, True), (3, False), (1, True), (2, False))
    entries = [a_round(2, num_tokens, hit=hit) for num_tokens, hit in tokens_and_hits]
    entries += [a_round(1, 2, hit=True), a_round(2, 1, hit=True)]
    found = TimedRounds(tuple(entries), (20.0,) * len(entries))
    assert found.hit_rate == pytest.approx(5 / 7)
    assert found.hits(2) == Hits(all_accepted=1.0, rejected_at=(0.0, 1.0))
    assert found.hits(3) == Hits(None, (None, None, None))


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


async def test_the_sweep_finds_what_the_pairs_law_says() -> None:
    """Where a round takes 18.3 ms, 1.3 ms a draft token and 2 ms more."""
    acceptance = Pair.of(SCENARIO).acceptance[Rule.TOKEN]

    async def rate(num_draft_tokens: int) -> float:
        return expected_tokens(acceptance, num_draft_tokens) / (20.3 + 1.3 * num_draft_tokens)

    rates = [await rate(num_draft_tokens) for num_draft_tokens in range(1, 15)]
    assert await best_num_draft_tokens(rate, 14) == 1 + rates.index(max(rates)) == 7


def test_modes_are_keys_of_the_json_object_and_rows_of_the_table() -> None:
    found = EmulateReport(
        scenario="70b-1b",
        seed=3,
        tokens=400,
        dropped=20,
        look_ahead_outcomes=24,
        deviation=0.645,
        acceptance={"token": 0.8, "coupled": 0.76},
        modes={"plain": mode_figures(50.0, num_draft_tokens=0), "synchronous": mode_figures(150.0)},
        by_rule={
            "token": {"synchronous": mode_figures(150.0)},
            "coupled": {"synchronous": mode_figures(140.0, "coupled")},
        },
        round_trip_ms=5.0,
        with_round_trip={"synchronous": mode_figures(120.0)},
    )
    value = json.loads(found.to_json())
    assert value["plain"]["tokens_per_second"] == 50.0
    assert value["synchronous"] == value["by_rule"]["token"]["synchronous"]
    assert value["with_round_trip"]["ms"] == 5.0
    assert value["with_round_trip"]["synchronous"]["tokens_per_second"] == 120.0
    assert set(value["synchronous"]) == {
        "tokens_per_second", "num_draft_tokens", "rule", "tokens_per_round", "fraction_of_ideal",
        "look_ahead_hit_rate", "overhead_ms_p50", "hits",
    }  # fmt: skip
    table = render(found)
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["plain", "synchronous", "synchronous", "  + 5 ms"]
    assert columns[1] == ["-", "token 7", "coupled 7", "token 7"]
    assert columns[6] == ["-"] * 4
    assert columns[3] == ["1.00x", "3.00x", "2.80x", "2.40x"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tokens", "31"), "error: --tokens: 31 is wrong; it must be from 32 to 8000"),
        (("--tokens", "8001"), "error: --tokens: 8001 is wrong"),
        (("--dropped", "0"), "error: --dropped: 0 is wrong; it must be from 1 to 3984"),
        (("--tokens", "100", "--dropped", "85"), "--dropped: 85 is wrong; it must be from 1 to 84"),
        (("--seed", "-1"), "error: --seed: -1 is wrong"),
        (("--look-ahead", "0"), "error: --look-ahead: 0 is wrong; it must be from 1 to 64"),
        (("--scenario", "8b"), "--scenario: '8b' is wrong; it must be one of 70b-1b"),
    ],
)
def test_wrong_flags_end_the_command(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["bench", "emulate", *flags])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err


def test_a_session_that_helps_to_choose_has_few_tokens() -> None:
    assert EmulateOptions().sweep == Window(num_tokens=200, num_dropped=4)
    assert EmulateOptions(tokens=40, dropped=8).sweep == Window(num_tokens=24, num_dropped=4)
    assert EmulateOptions(tokens=40, dropped=8).window == Window(num_tokens=40, num_dropped=8)


@pytest.mark.parametrize(
    ("tokens", "dropped"), [(32, 8), (100, 25), (215, 53), (800, 200), (4000, 200), (8000, 200)]
)
def test_few_tokens_alone_are_enough_to_say(tokens: int, dropped: int) -> None:
    """A part of them does not count where nobody says how many."""
    assert EmulateOptions(tokens=tokens).window == Window(tokens, dropped)


@pytest.mark.xdist_group("redis")
def test_the_command_measures_every_mode_and_prints_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps last at least as long as is said of them, and a message to the draft and back at least
    as long as what is added to its way: on a busy machine tokens come together, so single rounds
    may look shorter, even all of a measurement, but not those of two."""
    monkeypatch.setitem(SCENARIOS, TINY.name, TINY)
    flags = ("--scenario", TINY.name, "--tokens", "60", "--dropped", "8", "--json")
    assert main(["bench", "emulate", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    value = json.loads(shown.out)
    assert (value["scenario"], value["tokens"], value["dropped"]) == ("tiny", 60, 8)
    plain = value["plain"]
    assert (plain["num_draft_tokens"], plain["tokens_per_round"]) == (0, 1.0)
    assert 0 < plain["fraction_of_ideal"] < 1.1
    assert plain["look_ahead_hit_rate"] is None
    delayed, stretched = value["with_round_trip"], []
    assert delayed["ms"] == TINY.round_trip_ms
    for mode in (SYNCHRONOUS.name, LOOK_AHEAD.name):
        rates = {}
        for rule in RULES:
            entry = value["by_rule"][rule.value][mode]
            assert entry["rule"] == rule.value
            assert 1 <= entry["num_draft_tokens"] <= 3
            assert 1 < entry["tokens_per_round"] <= 1 + entry["num_draft_tokens"]
            stretched.append(round_ms(entry) / TINY.steps.verify_ms)
            rates[rule.value] = entry["tokens_per_second"]
        faster = max(rates, key=lambda rule: rates[rule])
        assert value[mode] == value["by_rule"][faster][mode]
        assert delayed[mode]["rule"] == faster
    delayed_ms = TINY.steps.verify_ms + TINY.round_trip_ms
    stretched.append(round_ms(delayed["synchronous"]) / delayed_ms)
    assert sorted(stretched)[1] > 0.9
    assert value["synchronous"]["hits"] is None
    ahead = value["look_ahead"]
    assert 0 <= ahead["look_ahead_hit_rate"] <= 1
    assert len(ahead["hits"]["rejected_at"]) == ahead["num_draft_tokens"]
    assert shown.err == ""
