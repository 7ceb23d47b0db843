"""A simulated fleet against what can be reckoned by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from deploy.planner.fleets import keeps, smallest
from deploy.planner.round_times import Line, Option, ServiceTimes
from deploy.planner.simulation import (
    Fleet,
    FleetFigures,
    Pair,
    Scenario,
    Workload,
    simulate,
)
from outrider.engine.step_costs import StepCosts
from outrider.registry.registry import Role
from outrider.speculation.sampling_params import Rule

TARGET = StepCosts((1, 4096), (0.020, 0.020))
"""20 ms, whatever is in it."""
DRAFT = StepCosts((1, 4096), (0.001, 0.001))


TIMES = ServiceTimes(target=TARGET, draft=DRAFT)


def _model(*survival: float) -> Pair:
    """A model that draws all K tokens in every round."""
    num = len(survival)
    return Pair(survival=survival, way=_way(num, num, num), times=TIMES)


def _way(num: int, proposed: float, steps: float) -> Option:
    return Option(
        rule=Rule.TOKEN, num_draft_tokens=num, proposed_per_round=proposed, steps_per_round=steps
    )


def _ahead(pair: Pair, look_ahead: int, hit_rate: float) -> Pair:
    return replace(pair, way=replace(pair.way, look_ahead=look_ahead, hit_rate=hit_rate))


ALL, NONE, PLAIN = _model(1.0, 1.0, 1.0, 1.0), _model(0.0, 0.0, 0.0, 0.0), _model()


def _scenario(
    sessions: int = 1,
    targets: int = 1,
    drafts: int = 1,
    coordinators: int = 1,
    seats: int = 64,
    times: Mapping[str, object] | None = None,
    pair: Pair = NONE,
    workload: Workload | None = None,
    target_seats: int | None = None,
    **changes: object,
) -> Scenario:
    bounds = {"max_num_seqs": seats, "target_max_num_seqs": target_seats or seats}
    changed: dict[str, Any] = {**bounds, **(times or {})}
    pair = replace(pair, times=replace(TIMES, **changed))
    asked = workload or Workload(sessions=sessions, prompt_tokens=16, answer_tokens=math.inf)
    found: dict[str, object] = {"coordinator_s": 0.0, "warm_up_s": 1.0, "seconds": 4.0, **changes}
    return Scenario(
        fleet=Fleet(targets=targets, drafts=drafts, coordinators=coordinators),
        workload=asked,
        pair=pair,
        **found,  # type: ignore[arg-type]
    )


def _simulated(**changes: object) -> FleetFigures:
    return simulate(_scenario(**changes))  # type: ignore[arg-type]


def test_one_session_takes_the_sum_of_its_parts() -> None:
    """Verdict 20, rest 2 with the coordinator's 0.3 in it, wait 0.5 + 2 * 4 * 1, link 3 ms; and
    with all tokens accepted each round brings five."""
    found = _simulated(
        pair=ALL,
        times={"wait": Line(0.0005, 2.0), "rest_s": 0.002, "round_trip_s": 0.003},
        coordinator_s=0.0003,
    )
    round_s = 0.020 + 0.002 + 0.0085 + 0.003
    assert found.rounds_per_second == pytest.approx(1 / round_s, abs=0.3)
    assert found.tokens_per_round == pytest.approx(5, rel=0.02)
    assert found.tpot_ms is not None
    assert found.tpot_ms[0] == pytest.approx(1e3 * round_s / 5, rel=0.01)
    assert found.draft_ms == pytest.approx(11.5)
    assert found.busy[0] == pytest.approx(0.020 / round_s, rel=0.02)
    assert found.busy[2] == pytest.approx(0.0003 / round_s, rel=0.02)


def test_plain_decoding_waits_for_no_draft() -> None:
    """1.5 * 20 + 1 ms a token, told in bunches."""
    found = _simulated(pair=PLAIN, drafts=0, times={"plain": Line(0.001, 1.5)})
    assert found.tokens_per_second == pytest.approx(1 / 0.031, abs=0.6)
    assert (found.draft_ms, found.busy[1]) == (0, 0)


def test_a_look_up_finds_what_it_proposes_without_a_replica() -> None:
    """Half of the rounds propose four tokens, all of them right: three a round, 20 ms each.
    False alarm of the bound, five standard errors: 1e-6."""
    half = Pair(survival=(1.0,) * 4, way=_way(4, 2.0, 0.0), times=TIMES)
    found = _simulated(pair=half, drafts=0, sessions=8, times={"draft": None})
    assert found.busy[1] == 0
    rounds = found.rounds_per_second * 4
    assert found.tokens_per_round == pytest.approx(3.0, abs=5 * 2 / math.sqrt(rounds))


def test_a_round_accepts_by_its_survival() -> None:
    """Tokens a round are 1 + 0.8 + 0.5 + 0.1; five standard errors of some 2,000 rounds, and
    0.005 for what the draft draws beside."""
    survival = (0.8, 0.5, 0.1)
    found = _simulated(sessions=16, pair=_model(*survival))
    rounds = found.rounds_per_second * 4
    second = 0.8 + 3 * 0.5 + 5 * 0.1  # sum of (2n - 1) P(n or more)
    error = math.sqrt((second - 1.4**2) / rounds)
    assert found.tokens_per_round == pytest.approx(2.4, abs=5 * error + 0.005)


def test_a_full_target_serves_its_seats_in_each_step() -> None:
    """30 sessions for 4 seats: 200 rounds a second."""
    found = _simulated(sessions=30, seats=4)
    assert found.rounds_per_second == pytest.approx(4 / 0.020, rel=0.01)
    assert found.sessions_per_step == 4
    assert found.busy[0] == pytest.approx(1.0, abs=0.01)


def test_a_draft_may_share_its_steps_otherwise_than_a_target() -> None:
    """Of sixteen sessions one is drafted for at a time, in 16 ms, or all are; four share a target's
    step."""
    slow = {"draft": StepCosts((1, 64), (0.004,) * 2), "target": StepCosts((1, 64), (0.080,) * 2)}
    few = _simulated(sessions=16, targets=4, seats=1, target_seats=4, times=slow)
    many = _simulated(sessions=16, targets=4, seats=16, target_seats=4, times=slow)
    assert few.rounds_per_second == pytest.approx(1 / 0.016, rel=0.03)
    assert many.rounds_per_second > 1.2 * few.rounds_per_second
    assert many.draft_ms < 0.5 * few.draft_ms


def test_rows_sessions_and_contexts_cost_what_the_table_says() -> None:
    """Five sessions that share all steps: 25 rows, four further sessions, contexts of 16 and what
    has come."""
    costs = StepCosts((1, 101), (0.010, 0.020), session_s=0.001, slot_s=1e-5, row_slot_s=1e-6)
    found = _simulated(sessions=5, times={"target": costs}, warm_up_s=0.5)
    assert found.sessions_per_step == pytest.approx(5, rel=0.05)
    rounds = found.rounds_per_second / 5
    step_s = costs.step_seconds(25, 5, round(5 * (16 + rounds * 2.5)))
    assert 1 / rounds == pytest.approx(step_s + 0.004, rel=0.03)


def test_a_rate_is_served_as_it_comes() -> None:
    """10 requests a second of 20 tokens: 200 tokens a second within five standard errors."""
    workload = Workload(rate=10.0, prompt_tokens=16, answer_tokens=20)
    found = _simulated(targets=3, drafts=2, workload=workload, seconds=10.0)
    error = 20 * math.sqrt(2 * 10 * 10) / 10
    assert found.tokens_per_second == pytest.approx(200, abs=5 * error)
    assert found.num_refused == 0


def test_look_ahead_hides_the_draft_where_it_hits() -> None:
    """K = 4: where each outcome is there in time a round is the target's 20 ms; of a quarter that
    are missed it is 4 ms more (five standard errors of 200 rounds)."""
    found = _simulated(pair=_ahead(NONE, 5, 1.0))
    assert found.rounds_per_second == pytest.approx(1 / 0.020, rel=0.02)
    assert found.hit_rate == pytest.approx(1.0, abs=0.02)
    found = _simulated(pair=_ahead(_model(0.8, 0.6, 0.5, 0.4), 8, 0.75))
    error = math.sqrt(0.75 * 0.25 / (found.rounds_per_second * 4))
    assert found.hit_rate == pytest.approx(0.75, abs=5 * error)
    assert found.draft_ms == pytest.approx(4 * (1 - found.hit_rate), rel=0.2)


def test_a_scenario_always_comes_to_the_same() -> None:
    workload = Workload(rate=8.0, prompt_tokens=16, answer_tokens=30)
    scenario = _scenario(
        targets=3, drafts=2, coordinators=2, workload=workload, coordinator_s=0.0003,
        pair=_model(0.8, 0.6), seconds=5.0,
    )  # fmt: skip
    assert simulate(scenario) == simulate(scenario)


SIZED = _scenario(sessions=6, seats=2, pair=ALL, seconds=1.0, warm_up_s=0.5)
"""A round of 24 ms brings five tokens: 4.8 ms a token where nothing is waited for."""


def _smallest(tpot_ms: float, *free: Role, **stated: int) -> Fleet | None:
    fleet = replace(SIZED.fleet, **stated)
    return smallest(replace(SIZED, fleet=fleet), tpot_ms, free)


def test_the_smallest_fleet_keeps_the_time_and_one_target_less_does_not() -> None:
    """6 sessions at 6 ms a token want 200 rounds a second, of which a full target plays 100.
    Numbers that are stated stay, and may be too small."""
    fleet = _smallest(6.0, "target", "draft", "coordinator")
    assert fleet is not None
    assert 2 <= fleet.targets <= 3
    assert fleet.coordinators == 1
    assert keeps(simulate(replace(SIZED, fleet=fleet)), 6.0)
    fewer = replace(fleet, targets=fleet.targets - 1)
    assert not keeps(simulate(replace(SIZED, fleet=fewer)), 6.0)
    stated = _smallest(6.0, "target", drafts=3, coordinators=2)
    assert stated is not None
    assert (stated.drafts, stated.coordinators) == (3, 2)
    assert _smallest(4.7, "target", "draft", "coordinator") is None  # One session takes longer.
    assert _smallest(6.0, "draft", targets=1) is None
