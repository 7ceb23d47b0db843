"""How long a round waits for its proposal, in the worlds of `length_world.py`."""

from __future__ import annotations

import math

import pytest
from length_world import ENDLESS, World

STALL_S = 1.0


def test_a_proposal_is_waited_for_as_long_as_its_tokens_are_worth() -> None:
    """Beside what it takes: the time of as many rounds of plain decoding as are accepted of K."""
    world = World(0.7, 0.002, noise=0.0)
    control = world.open()
    world.play(control, 400)
    length = control.choose(400, ENDLESS)
    num_accepted = sum(0.7**n for n in range(1, length.num_draft_tokens + 1))
    takes_s = world.wire_s + length.num_draft_tokens * world.draft_s
    expected_s = takes_s + num_accepted * world.verify_s
    assert length.draft_budget_s == pytest.approx(expected_s, rel=0.25)


def test_nothing_is_given_up_before_any_round_was_timed() -> None:
    assert World().open().choose(1, ENDLESS).draft_budget_s == math.inf


def test_a_draft_that_stops_now_and_then_costs_little_each_time() -> None:
    """One proposal in 50 comes a second late: as much as 60 rounds. Waiting for each would halve
    the rate."""
    steady, world = World(0.8), World(0.8, stall=lambda r: STALL_S * (r.random() < 0.02))
    rates = []
    for one in (steady, world):
        control = one.open()
        one.play(control, 400)
        rates.append(one.play(control, 2000, first_index=400).rate)
    assert rates[1] > 0.85 * rates[0]


def test_one_that_is_somewhat_late_is_waited_for() -> None:
    world = World(0.8)
    control = world.open()
    world.play(control, 400)
    world.stall = lambda _: 0.5 * world.verify_s
    run = world.play(control, 40, first_index=400)
    assert sum(run.num_tokens) > 2 * len(run.num_tokens)


def test_of_one_that_is_always_late_it_is_learned() -> None:
    """It is soon asked no more, but for trials."""
    world = World(0.8)
    control = world.open()
    world.play(control, 400)
    world.stall = lambda _: STALL_S
    world.play(control, 200, first_index=400)
    run = world.play(control, 2000, first_index=600)
    assert run.plain_share > 0.9
    assert run.rate > 0.9 * world.rate(0)
