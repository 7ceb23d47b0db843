"""`bench emulate`: its figures by hand, the pair's law against its engines, and one small run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.emulate import (
    MODES,
    RULES,
    SCENARIOS,
    EmulateOptions,
    Pair,
    PairLaw,
    Round,
    Steps,
    TimedRounds,
    best_num_draft_tokens,
    expected_tokens,
    figures,
    read_rounds,
    timed,
)
from deploy.cli.main import main
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import SCHEME, EmulatedSpec
from outrider.engine.interface import SequenceStep
from outrider.errors import InvariantError, Unavailable
from outrider.request import Event, Finished, Metrics, RoundReport, Started, Tokens, Usage
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule

PLAIN, SYNCHRONOUS, LOOK_AHEAD = MODES

SCENARIO = SCENARIOS["70b-1b"]

TINY = replace(
    SCENARIO,
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
    found = timed(session, 7, 3)
    assert found.rounds == tuple(session[2:4])
    assert found.milliseconds == pytest.approx((20, 30))
    assert found.num_tokens == 4
    assert found.tokens_per_second == pytest.approx(80)
    whole = timed(session, 6, 1)
    assert whole.rounds == tuple(session[1:3])
    with pytest.raises(Unavailable, match="before its 10 tokens had come"):
        timed(session, 10, 3)


def test_a_round_is_charged_the_steps_that_it_waited_for() -> None:
    """The median of 25 - 18 - 2 * 1, 30 - 18 - 4 * 1 and 22 - 18 - 0."""
    session = rounds((0, 1, 0), (2, 1, 25), (4, 1, 30), (0, 1, 22))
    found = timed(session, 4, 1)
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
    assert found.hits(2) == {"all_accepted": 1.0, "rejected_at": [0.0, 1.0]}
    assert found.hits(3) == {"all_accepted": None, "rejected_at": [None] * 3}


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


@pytest.mark.parametrize(
    ("tokens", "dropped"), [(32, 8), (100, 25), (215, 53), (800, 200), (4000, 200), (8000, 200)]
)
def test_few_tokens_alone_are_enough_to_say(tokens: int, dropped: int) -> None:
    """A part of them does not count where nobody says how many."""
    assert EmulateOptions(tokens=tokens).num_dropped == dropped


@pytest.mark.xdist_group("redis")
def test_the_command_measures_every_mode_and_prints_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps last at least as long as is said of them, and a message to the draft and back at least
    as long as what is added to its way: on a busy machine tokens come together, so single rounds
    may look shorter, even all of a measurement, but not those of two."""
    monkeypatch.setitem(SCENARIOS, TINY.name, TINY)
    flags = ("--tokens", "60", "--dropped", "8", "--json")
    assert main(["bench", "emulate", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    value = json.loads(shown.out)
    assert (value["scenario"], value["tokens"], value["dropped"]) == ("70b-1b", 60, 8)
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


NUM_CONTEXTS = 4_000


@pytest.fixture(scope="module")
def law() -> PairLaw:
    return PairLaw(64, 1.706)


@pytest.fixture(scope="module")
def engine_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q of the emulated engines after `NUM_CONTEXTS` prefixes, over the tokens that
    have any."""
    spec = EmulatedSpec(vocab_size=600, deviation=PairLaw(64, 1.706).solve_deviation(0.80))
    tokens = tuple(torch.randint(600, (NUM_CONTEXTS,), generator=torch.Generator()).tolist())
    step = SequenceStep("s", tokens, NUM_CONTEXTS)
    p, q = (
        EmulatedEngine(spec, role).forward([step])[0].double().log_softmax(-1)
        for role in ("target", "draft")
    )
    ids = p.topk(64).indices
    return p.gather(1, ids), q.gather(1, ids)


def test_the_solved_pairs_engines_overlap_as_asked(
    engine_rows: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """A prefix's overlap has a standard deviation of 0.08, and so the mean one of 0.0013."""
    p, q = (rows.exp() for rows in engine_rows)
    assert torch.minimum(p, q).sum(-1).mean().item() == pytest.approx(0.80, abs=0.005)


def test_the_solved_pairs_coupled_draws_are_equal_as_often_as_told(
    law: PairLaw, engine_rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The share of 20 draws after each prefix; its standard deviation is about 0.002."""
    p, q = (rows.repeat(20, 1) for rows in engine_rows)
    noise = -torch.rand(p.shape, generator=torch.Generator(), dtype=torch.float64).log().neg().log()
    equal = ((p + noise).argmax(-1) == (q + noise).argmax(-1)).double().mean().item()
    deviation = law.solve_deviation(0.80)
    assert law.acceptance(deviation, Rule.COUPLED) == pytest.approx(equal, abs=0.01)


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95])
def test_a_solved_deviation_gives_what_was_asked_for(law: PairLaw, acceptance: float) -> None:
    deviation = law.solve_deviation(acceptance)
    assert law.acceptance(deviation, Rule.TOKEN) == pytest.approx(acceptance, abs=1e-4)
    assert law.acceptance(deviation, Rule.COUPLED) < acceptance
    assert PairLaw(64, 1.706).solve_deviation(acceptance) == deviation


def test_what_no_deviation_gives_is_refused(law: PairLaw) -> None:
    with pytest.raises(InvariantError, match=r"gives an acceptance of 0\.01"):
        law.solve_deviation(0.01)


def test_expected_tokens_by_hand() -> None:
    assert expected_tokens(0.5, 0) == 1.0
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(1.0, 14) == 15.0
