"""What is worked out ahead follows what rounds have come to."""

from __future__ import annotations

import random

import pytest

from outrider.limits import LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.speculation.fan_out import RANKS_MAX, FanOut


def learned(acceptance: float, first_rank: float, num_drafted: int = 4) -> FanOut:
    """After 3,000 rounds whose bonus is the first guess so often, and whose other corrections are
    the second guess as often and are missed else."""
    draw = random.Random(3)
    fan_out = FanOut()
    for _ in range(3000):
        accepted = 0
        while accepted < num_drafted and draw.random() < acceptance:
            accepted += 1
        hit = draw.random() < first_rank
        rank = (0 if accepted == num_drafted else 1) if hit else None
        fan_out.note(num_drafted, accepted, rank)
    return fan_out


def test_chances_are_what_was_seen() -> None:
    plan = learned(0.8, 0.9).plan(4, LOOK_AHEAD_MAX)
    found = {(guess.num_accepted, guess.rank): guess.chance for guess in plan}
    assert found[4, 0] == pytest.approx(0.8**4 * 0.9, abs=0.05)
    assert found[0, 1] == pytest.approx(0.2 * 0.9, abs=0.05)
    assert found[0, 0] < 0.02
    assert (plan[0].num_accepted, plan[0].rank) == (4, 0)


def test_it_forgets_what_was_long_ago() -> None:
    fan_out = learned(0.9, 0.9)
    before = fan_out.plan(4, 1)[0]
    for _ in range(2000):
        fan_out.note(4, 0, 0)
    after = fan_out.plan(4, 1)[0]
    assert (before.num_accepted, after.num_accepted, after.rank) == (4, 0, 0)


@pytest.mark.parametrize("num_drafted", [0, 1, 5, NUM_DRAFT_TOKENS_MAX])
@pytest.mark.parametrize("num_guesses", [1, 12, LOOK_AHEAD_MAX, 1000])
def test_a_plan_has_the_likeliest_outcomes_once_each(num_drafted: int, num_guesses: int) -> None:
    plan = FanOut().plan(num_drafted, num_guesses)
    possible = (num_drafted + 1) * RANKS_MAX
    assert len(plan) == min(num_guesses, LOOK_AHEAD_MAX, possible)
    places = {(guess.num_accepted, guess.rank) for guess in plan}
    assert len(places) == len(plan)
    assert all(0 <= n <= num_drafted and 0 <= rank < RANKS_MAX for n, rank in places)
    chances = [guess.chance for guess in plan]
    assert chances == sorted(chances, reverse=True)
    whole = FanOut().plan(num_drafted, LOOK_AHEAD_MAX)
    assert plan == whole[: len(plan)]
    assert sum(chances) <= 1 + 1e-9
    # Of one correction the first guesses come first.
    assert all((n, rank - 1) in places for n, rank in places if rank > 0)
