"""Times by hand and by a simulation of sessions that share steps; choices that follow from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from deploy.planner.choosing import GAIN_MIN, Chooser, Option, best
from deploy.planner.round_times import (
    Line,
    Load,
    MeasuredStep,
    ServiceTimes,
    fitted,
    rebased,
)
from deploy.planner.rounds import Attempt, Rounds, replay
from deploy.planner.simulation import Demand, FleetSize, Pair, Scenario, simulate
from outrider.engine.step_costs import StepCosts
from outrider.speculation.sampling_params import Rule

TARGET = StepCosts((1, 2, 101), (0.010, 0.010, 0.010 + 99 * 0.0001))
"""10 ms, and 0.1 ms for each row from the third on."""
DRAFT = StepCosts((1, 101), (0.001, 0.001 + 100 * 0.00001))
NUM_TOKENS = 4_001


def _text(num_draft_tokens: int, acceptance: float, num_steps: int | None = None) -> Rounds:
    steps = num_draft_tokens if num_steps is None else num_steps

    def attempt_at(start: int) -> Attempt:
        known = min(num_draft_tokens, NUM_TOKENS - start)
        chances = tuple(acceptance**depth for depth in range(1, known + 1))
        return Attempt(num_draft_tokens, steps, chances)

    return replay(NUM_TOKENS, attempt_at)


def _times(**changes: object) -> ServiceTimes:
    values = {"target": TARGET, "verify": TARGET, "draft": DRAFT, **changes}
    return ServiceTimes(**values)  # type: ignore[arg-type]


def test_one_session_takes_the_sum_of_its_parts() -> None:
    """K = 4: wait 0.5 + 2 * 4 * 1 + link 3, target 16.3, rest 2: 29.8 ms."""
    verify = StepCosts((1, 101), (0.0159, 0.0259))
    times = _times(wait=Line(0.0005, 2.0), verify=verify, rest_s=0.002)
    rounds = _text(4, 0.8)
    seconds = times.drafted_seconds(rounds, Load(round_trip_s=0.003))
    assert seconds / (rounds.num_rounds - 1) == pytest.approx(0.0298)
    plain = _text(0, 0.0)
    assert times.plain_seconds(plain, Load()) == pytest.approx(4_000 * 0.010)
    assert plain.num_rounds == NUM_TOKENS


def test_a_look_up_waits_for_no_link_and_needs_no_replica() -> None:
    """Nor does the share of a hybrid's rounds in which its look-up proposes."""
    link = Load(round_trip_s=0.005)
    looked_up = _text(4, 0.8, num_steps=0)
    times = _times(draft=None)
    assert times.drafted_seconds(looked_up, link) == times.drafted_seconds(looked_up, Load())
    chooser = Chooser(times, link, [1], _text(0, 0.0), Rule.TOKEN)
    chosen = best([chooser.plain, chooser.best_way(Rule.TOKEN, 4, looked_up)])
    assert (chosen.num_draft_tokens, chosen.draft_replicas) == (4, 0)
    assert chosen.speedup > 1
    hybrid = _times()
    assert hybrid.drafted_seconds(looked_up, link) == hybrid.drafted_seconds(looked_up, Load())


def test_look_ahead_hides_the_draft_where_it_hits() -> None:
    """K = 4, 3 outcomes, hits 0.75: a round is the target's 10.3 ms and, of a quarter, the draft's
    4 ms. A draft of 4 ms a step is later than the target by 5 * 4.002 - 10.3 ms, and one that
    takes two outcomes a pass by twice 5 passes of 4.001."""
    rounds = _text(4, 0.8)
    plan = (4, 3, 0.75)
    later = rounds.num_rounds - 1
    seconds = _times().look_ahead_seconds(rounds, Load(), *plan)
    assert seconds / later == pytest.approx(0.0103 + 0.25 * 0.004)
    slow = StepCosts((1, 101), (0.004, 0.004 + 100 * 0.000001))
    times = ServiceTimes(target=TARGET, verify=TARGET, draft=slow)
    seconds = times.look_ahead_seconds(rounds, Load(), *plan)
    late = 5 * 0.004002 - 0.0103
    assert seconds / later == pytest.approx(0.0103 + 0.75 * late + 0.25 * 0.016)
    seconds = replace(times, max_num_seqs=2).look_ahead_seconds(rounds, Load(), *plan)
    late = 2 * 5 * 0.004001 - 0.0103
    assert seconds / later == pytest.approx(0.0103 + 0.75 * late + 0.25 * 0.016)
    shared = ServiceTimes(target=TARGET, verify=TARGET, draft=slow, shares_device=True)
    assert shared.look_ahead_seconds(rounds, Load(), *plan) > shared.drafted_seconds(rounds, Load())


@pytest.mark.parametrize("sessions", [1, 5])
@pytest.mark.parametrize(("draft_ms", "rest_ms"), [(2.0, 1.0), (1.0, 30.0)])
def test_sessions_that_share_steps_take_what_the_services_take(
    sessions: int, draft_ms: float, rest_ms: float
) -> None:
    """The model's groups come within a tenth of the real services on a virtual clock."""
    slow = StepCosts((1, 101), (draft_ms / 1e3, draft_ms / 1e3 + 100 * 0.00001))
    times = _times(draft=slow, rest_s=rest_ms / 1e3)
    rounds = _text(4, 0.8)
    told = times.drafted_seconds(rounds, Load(sessions=sessions)) / (rounds.num_rounds - 1)
    scenario = Scenario(
        fleet=FleetSize(targets=1, drafts=1),
        demand=Demand(sessions=sessions, prompt_tokens=16, answer_tokens=math.inf),
        pair=Pair(survival=(0.8, 0.64, 0.512, 0.4096), num_proposed=4, num_steps=4, times=times),
        coordinator_s=0.0,
        warm_up_s=1.0,
        seconds=2.0,
    )
    assert told == pytest.approx(sessions / simulate(scenario).rounds_per_second, rel=0.1)


def _options(load: Load, times: ServiceTimes, acceptance: float, hits: tuple[float, ...] = ()
             ) -> list[Option]:  # fmt: skip
    chooser = Chooser(times, load, [1], _text(0, 0.0), Rule.TOKEN)
    ways = (chooser.best_way(Rule.TOKEN, k, _text(k, acceptance), hits) for k in range(1, 13))
    return [chooser.plain, *ways]


def _fastest(options: list[Option]) -> int:
    return max(options, key=lambda option: option.tokens_per_second).num_draft_tokens


def test_the_best_k_is_the_formulas() -> None:
    """c = 0.1 and rows that cost nothing: K* is 4 at a = 0.7 and 6 at 0.8 by
    (1 - a^(K+1)) / ((1 - a)(Kc + 1)), and nothing is drafted at a = 0.05."""
    target = StepCosts((1, 101), (0.010, 0.010))
    times = ServiceTimes(target=target, verify=target, draft=DRAFT)
    for acceptance, most in ((0.7, 4), (0.8, 6), (0.05, 0)):
        found = _options(Load(), times, acceptance)
        assert _fastest(found) == most
        best_rate = max(option.tokens_per_second for option in found)
        assert best(found).tokens_per_second >= best_rate / (1 + GAIN_MIN)
    assert found[4].num_draft_tokens == 4
    expected = (1 - 0.05**5) / (0.95 * 1.4)
    assert found[4].speedup == pytest.approx(expected, rel=0.005)
    assert best(found) == found[0]  # the last acceptance
    assert found[0].tokens_per_second == pytest.approx(100.0, rel=0.001)


def test_a_long_link_makes_drafts_longer_and_then_none() -> None:
    """[SYN] of the literature: with a round trip as long as the target's step, a = 0.8 and c = 0.1,
    K* rises from 6 to 8; at a = 0.6 nothing is left of the gain."""
    target = StepCosts((1, 101), (0.010, 0.010))
    times = ServiceTimes(target=target, verify=target, draft=DRAFT)
    assert _fastest(_options(Load(round_trip_s=0.010), times, 0.8)) == 8
    assert best(_options(Load(round_trip_s=0.010), times, 0.6)).num_draft_tokens == 0


def test_look_ahead_and_replicas_follow_from_the_load() -> None:
    """Hits that more outcomes bring are worth having until they bring little; one draft does for a
    target whose steps are ten times as long, and a slow one needs company."""
    hits = tuple(min(0.9, 0.5 + 0.1 * number) for number in range(12))
    ahead = best(_options(Load(), _times(), 0.8, hits))
    assert ahead.look_ahead == 6
    assert ahead.hit_rate == 0.9
    assert ahead.draft_replicas == 1
    assert best(_options(Load(sessions=8), _times(), 0.8)).draft_replicas == 1
    heavy = StepCosts((1, 2, 101), (0.001, 0.002, 0.101))
    crowded = ServiceTimes(target=TARGET, verify=TARGET, draft=heavy)
    many = best(_options(Load(sessions=8), crowded, 0.8))
    assert many.draft_replicas > 1
    assert many.tokens_per_second > 0


def test_lines_are_fitted_and_bounded() -> None:
    """Many times on a line are believed, few or alike ones hardly; never below 0."""
    line = [(1e-3 * x, 0.003 + 2e-3 * x) for x in range(1, 11)]
    found = fitted(line * 40)
    assert found.factor == pytest.approx(2.0, rel=0.01)
    assert found.at(0.005) == pytest.approx(0.013, rel=0.01)
    assert fitted([(1.0, 5.0), (1.0, 6.0)]) == Line(4.5, 1.0)
    assert 1.0 < fitted([(1.0, 5.0), (1.2, 5.4)]).factor < 1.1
    assert fitted([(1.0, 9.0), (9.0, 5.0)] * 100).factor == 0.0
    assert fitted([]) == Line()
    assert Line(-2.0, 1.0).at(1.0) == 0.0


def test_a_table_moves_to_where_steps_stood() -> None:
    """Steps that take twice the table's and 3 ms, with 1 us a slot: so does the new table, also
    for rows in between and beyond; a number of rows with many steps keeps their mean, unless it
    would fall."""
    table = StepCosts((1, 2, 4, 8, 64), (0.010, 0.010, 0.011, 0.013, 0.041), slot_s=1e-6)

    def step(rows: int, more_s: float = 0.0) -> MeasuredStep:
        told = 0.003 + 2 * table.step_seconds(rows) + 100 * 1e-6
        return MeasuredStep(rows, 100, told + more_s)

    found = rebased(table, [step(rows) for rows in (1, 2, 5, 9, 17) for _ in range(300)])
    for rows in (1, 5, 8, 17, 64):
        expected = 0.003 + 2 * table.step_seconds(rows)
        assert found.step_seconds(rows) == pytest.approx(expected, rel=0.03)
    assert found.step_seconds(2, 1, 100) - found.step_seconds(2) == pytest.approx(1e-4)
    steps = [step(rows, 0.004 * (rows == 5)) for rows in (1, 5, 9) for _ in range(400)]
    higher = rebased(table, steps)
    assert higher.step_seconds(5) == pytest.approx(higher.step_seconds(9), rel=0.05)
    assert list(higher.seconds) == sorted(higher.seconds)
    many = [step(rows) for rows in (1, 4, 8, 64) for _ in range(900)]
    disturbed = rebased(table, [*many, *[step(2, 0.02)] * 100])
    assert disturbed.step_seconds(4) < 0.003 + 2 * table.step_seconds(4) + 0.004
    assert rebased(table, []) == table
