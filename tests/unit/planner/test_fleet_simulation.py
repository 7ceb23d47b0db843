"""`outrider plan --simulate`, and fleets whose figures can be computed by hand."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from outrider.cli.main import main
from outrider.interfaces.step_costs import StepCosts
from outrider.planner.rounds import Line
from outrider.planner.simulation import ROLES, FleetFigures, keeps, of_emulated, simulate, smallest
from tests.support.plan_scenarios import drafting_pair, scenario_of

ALL = (1.0,) * 4
FLEET = ("--sessions", "4", "--targets", "2", "--drafts", "1", "--coordinators", "1")


def _simulated(**changes: Any) -> FleetFigures:
    return simulate(scenario_of(**changes))


def test_one_session_takes_the_sum_of_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    """20 ms for the verdict, 2 ms for the rest, 0.5 + 2 * 4 * 1 ms for the wait, 3 ms for the link.
    All tokens are accepted, so a round brings five. The services report no trouble."""
    found = _simulated(
        pair=drafting_pair(*ALL),
        times={"wait": Line(0.0005, 2.0), "rest_s": 0.002, "round_trip_s": 0.003},
        coordinator_s=0.0003,
    )
    round_s = 0.020 + 0.002 + 0.0085 + 0.003
    assert found.rounds_per_second == pytest.approx(1 / round_s, abs=0.3)
    assert found.tokens_per_round == pytest.approx(5, rel=0.02)
    assert found.tpot_ms[0] == pytest.approx(1e3 * round_s / 5, rel=0.01)
    assert found.draft_ms == pytest.approx(11.5)
    assert found.busy[0] == pytest.approx(0.020 / round_s, rel=0.02)
    assert found.busy[2] == pytest.approx(0.0003 / round_s, rel=0.02)
    assert caplog.messages == []


def test_a_look_up_finds_what_it_proposes_without_a_replica() -> None:
    """Half of the rounds propose four tokens, and all are accepted. The bound of five standard
    errors fails by chance with probability 1e-6."""
    half = drafting_pair(*ALL, proposed_per_round=2.0, steps_per_round=0.0)
    found = _simulated(pair=half, drafts=0, sessions=8, times={"draft": None})
    assert found.busy[1] == 0
    rounds = found.rounds_per_second * 4
    assert found.tokens_per_round == pytest.approx(3.0, abs=5 * 2 / math.sqrt(rounds))


def test_a_round_accepts_by_its_survival() -> None:
    """1 + 0.8 + 0.5 + 0.1 tokens on average, within five standard errors of 2,000 rounds."""
    survival = (0.8, 0.5, 0.1)
    found = _simulated(sessions=16, pair=drafting_pair(*survival))
    rounds = found.rounds_per_second * 4
    second = 0.8 + 3 * 0.5 + 5 * 0.1  # sum of (2n - 1) P(n or more)
    error = math.sqrt((second - 1.4**2) / rounds)
    assert found.tokens_per_round == pytest.approx(2.4, abs=5 * error + 0.005)


def test_rows_sessions_and_contexts_cost_what_the_table_says() -> None:
    """Five sessions share steps of 25 rows. A context is 16 tokens and the answer so far."""
    costs = StepCosts((1, 101), (0.010, 0.020), session_s=0.001, slot_s=1e-5, row_slot_s=1e-6)
    found = _simulated(sessions=5, times={"target": costs}, warm_up_s=0.5)
    rounds = found.rounds_per_second / 5
    step_s = costs.step_seconds(25, 5, round(5 * (16 + rounds * 2.5)))
    assert 1 / rounds == pytest.approx(step_s + 0.004, rel=0.03)


def test_a_rate_is_served_as_it_comes() -> None:
    """10 requests a second of 20 tokens are 200 tokens a second, within five standard errors."""
    load: Any = {"sessions": None, "rate": 10.0, "answer_tokens": 20}
    found = _simulated(targets=3, drafts=2, seconds=10.0, **load)
    error = 20 * math.sqrt(2 * 10 * 10) / 10
    assert found.tokens_per_second == pytest.approx(200, abs=5 * error)
    assert found.num_refused == 0


def test_look_ahead_hides_the_draft_where_it_hits() -> None:
    """A round takes the target's 20 ms. A quarter of misses takes 4 ms more, within five standard
    errors of 200 rounds."""
    found = _simulated(pair=drafting_pair(0.0, 0.0, 0.0, 0.0, look_ahead=5, hit_rate=1.0))
    assert found.rounds_per_second == pytest.approx(1 / 0.020, rel=0.02)
    assert found.hit_rate == pytest.approx(1.0, abs=0.02)
    found = _simulated(pair=drafting_pair(0.8, 0.6, 0.5, 0.4, look_ahead=8, hit_rate=0.75))
    error = math.sqrt(0.75 * 0.25 / (found.rounds_per_second * 4))
    assert found.hit_rate == pytest.approx(0.75, abs=5 * error)
    assert found.draft_ms == pytest.approx(4 * (1 - found.hit_rate), rel=0.2)


SEATS = {"max_num_seqs": 2, "target_max_num_seqs": 2}
SIZED = scenario_of(3, pair=drafting_pair(*ALL), times=SEATS, seconds=0.5, warm_up_s=0.25)
"""A round of 24 ms brings five tokens. Without queues that is 4.8 ms a token."""


def test_the_smallest_fleet_keeps_the_time_and_one_target_less_does_not() -> None:
    """3 sessions at 6 ms a token need 100 rounds a second. A target with full steps has 83."""
    fleet = smallest(SIZED, 6.0, ROLES)
    assert (fleet["target"], fleet["coordinator"]) == (2, 1)
    assert keeps(simulate(replace(SIZED, fleet=fleet)), 6.0)
    assert not keeps(simulate(replace(SIZED, fleet=fleet | {"target": 1})), 6.0)
    assert smallest(SIZED, 4.7, ROLES) is None  # One session takes longer.
    assert smallest(SIZED, 6.0, ["draft"]) is None


def test_an_emulated_engine_says_what_is_simulated(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It states step times and acceptance rates, also in the form of vLLM's synthetic acceptance. A
    round brings 1 + 0.8 + 0.4 tokens, within five standard errors of about 350 rounds."""
    engine = "verify_ms=20,verify_tokens=4,draft_ms=1,draft_branches=1"
    times = of_emulated(f"{engine},acceptance_rates=0.8/0.4", 64, 64).times
    assert [times.target.step_seconds(rows) for rows in (1, 4, 5, 9)] == [0.02, 0.02, 0.04, 0.06]
    assert times.target.step_seconds(4_000) == pytest.approx(20.0)
    assert times.draft.step_seconds(7) == pytest.approx(0.007)
    said = (
        '{"rejection_sample_method": "synthetic", "num_speculative_tokens": 2,'
        ' "synthetic_acceptance_rates": [0.8, 0.4]}'
    )
    flags = ("--engine", f"emulated:{engine}", "--speculative-config", said, *FLEET)
    assert main(["plan", "--simulate", *flags, "--simulated-seconds", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pair"]["survival"] == [0.8, 0.4]
    figures = report["simulated"]["figures"]
    assert figures["tokens_per_round"] == pytest.approx(2.2, abs=0.2)
    assert 20 < 1e3 * 4 / figures["rounds_per_second"] < 60
    assert not caplog.records, "the services found something wrong"


@pytest.mark.parametrize(("tpot_ms", "said"), [("15", "meet 15 ms"), ("1", "meets 1 ms")])
def test_the_smallest_fleet_is_named(
    tpot_ms: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ("--engine", "emulated:acceptance_rates=0.8/0.64/0.51")
    load = ("--sessions", "2", "--simulated-seconds", "1", "--prompt-tokens", "16")
    assert main(["plan", "--simulate", *pair, *load, "--tpot-ms", tpot_ms]) == 0
    shown = capsys.readouterr()
    assert said in " ".join(shown.out.split())
    assert "99 % of the tokens take at most" in shown.err
