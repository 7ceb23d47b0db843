"""The smallest fleet that keeps a time per token."""

from __future__ import annotations

import math
from dataclasses import replace

from outrider.engine.step_costs import StepCosts
from outrider.fleet_simulator.figures import FleetFigures
from outrider.fleet_simulator.scenario import Demand, Drafting, FleetSize, Scenario
from outrider.fleet_simulator.simulation import simulate
from outrider.fleet_simulator.sizing import keeps, smallest
from outrider.planning.round_times import ServiceTimes

STEP = StepCosts((1, 4096), (0.020, 0.020))
SCENARIO = Scenario(
    fleet=FleetSize(targets=1, drafts=1),
    demand=Demand(sessions=30, prompt_tokens=16, answer_tokens=math.inf),
    drafting=Drafting.of((1.0, 1.0, 1.0)),
    times=ServiceTimes(
        target=STEP, verify=STEP, draft=StepCosts((1, 64), (0.002, 0.002)), max_num_seqs=4
    ),
    coordinator_s=0.0,
    warm_up_s=2.0,
    seconds=4.0,
)
"""A round of four tokens is 20 ms of a target's and 6 of a draft's step, which four share."""


def _found(scenario: Scenario, tpot_ms: float, *free: str) -> tuple[FleetSize | None, int]:
    tried: list[FleetFigures] = []
    fleet = smallest(scenario, tpot_ms, free, lambda _, figures: tried.append(figures))  # type: ignore[arg-type]
    return fleet, len(tried)


def test_what_is_found_keeps_the_time_and_one_less_does_not() -> None:
    """30 sessions at 10 ms a token want 750 rounds a second: 3.75 targets with full steps, 1.1
    drafts. Few fleets are simulated."""
    fleet, num_tried = _found(SCENARIO, 10.0, "target", "draft", "coordinator")
    assert fleet is not None
    assert 4 <= fleet.targets <= 10
    assert 2 <= fleet.drafts <= 5
    assert fleet.coordinators <= 2
    assert num_tried <= 24
    assert keeps(simulate(replace(SCENARIO, fleet=fleet)), 10.0)
    fewer = replace(SCENARIO, fleet=replace(fleet, targets=fleet.targets - 1))
    assert not keeps(simulate(fewer), 10.0)


def test_numbers_that_are_stated_stay() -> None:
    stated = replace(SCENARIO, fleet=FleetSize(targets=10, drafts=1, coordinators=3))
    fleet, _ = _found(stated, 10.0, "draft")
    assert fleet is not None
    assert (fleet.targets, fleet.coordinators) == (10, 3)
    assert fleet.drafts > 1


def test_coordinators_are_found_by_what_a_round_costs_them() -> None:
    """30 sessions at 14 ms a token want 536 rounds a second, of 4 ms each."""
    scenario = replace(SCENARIO, coordinator_s=0.004, fleet=FleetSize(targets=15, drafts=15))
    fleet, _ = _found(scenario, 14.0, "coordinator")
    assert fleet is not None
    assert 3 <= fleet.coordinators <= 8


def test_a_time_that_a_single_session_misses_is_kept_by_no_fleet() -> None:
    """A round of 26 ms for four tokens is 6.5 ms a token."""
    assert _found(SCENARIO, 6.4, "target", "draft", "coordinator") == (None, 0)


def test_a_time_that_stated_drafts_miss_is_kept_by_no_number_of_targets() -> None:
    """One draft gives 667 proposals a second, to 30 sessions one in 45 ms."""
    assert _found(SCENARIO, 10.0, "target")[0] is None
