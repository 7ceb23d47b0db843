"""Length control over recorded rounds of the demo pair, in its speed on two slow cores: of 18
sessions at temperature 0 (`greedy`), and 18 at temperature 1 (`token`)."""

from __future__ import annotations

import random

import pytest
from round_replay import (
    BOUND,
    TABLES,
    Played,
    Recording,
    controlled,
    fixed,
    halved,
    play,
    recorded,
    speed,
    spoiled,
)

from outrider.speculation.sampling_params import Rule

SHUFFLES = 4


def shuffled(sessions: list[Recording]) -> list[list[Recording]]:
    """In an order in which a deployment might meet them."""
    return [random.Random(seed).sample(sessions, len(sessions)) for seed in range(SHUFFLES)]


def plain_and_drafted(runs: list[list[Recording]]) -> list[list[Played]]:
    """Under K = 0, and under K = 8, which is the best of all fixed ones for these sessions."""
    return [[one for run in runs for one in play(run, fixed(num))] for num in (0, BOUND)]


@pytest.mark.parametrize("tables", TABLES)
def test_a_new_deployment_drafts_where_that_pays_whatever_its_tables_say(tables: str) -> None:
    """18 sessions of 96 tokens, most of which copy now and then: within 2 % of K = 8, and no
    category far below the better of that and plain decoding."""
    runs = shuffled(recorded("greedy"))
    plain, drafted = plain_and_drafted(runs)
    found = [one for run in runs for one in play(run, controlled(Rule.GREEDY, tables))]
    best = speed(drafted).tokens_per_second
    assert best > 1.2 * speed(plain).tokens_per_second
    assert speed(found).tokens_per_second > 0.98 * best
    for category in {one.category for one in found}:
        sides = [speed(side, category).tokens_per_second for side in (found, plain, drafted)]
        assert sides[0] > 0.93 * max(sides[1:]), category
        assert sides[0] > 0.98 * sides[1], category


def test_sampled_sessions_in_which_drafting_just_does_not_pay_lose_little() -> None:
    """At temperature 1: 3 % slower than plain decoding under K = 8."""
    runs = shuffled(recorded("token"))
    plain, drafted = plain_and_drafted(runs)
    found = [one for run in runs for one in play(run, controlled(Rule.TOKEN))]
    sides = [speed(side).tokens_per_second for side in (found, plain, drafted)]
    assert sides[0] > 0.97 * sides[1]
    assert sides[0] > sides[2]


def test_sessions_that_change_lose_nothing() -> None:
    runs = shuffled(halved(recorded("greedy")))
    plain, drafted = plain_and_drafted(runs)
    found = [one for run in runs for one in play(run, controlled(Rule.GREEDY))]
    sides = [speed(side).tokens_per_second for side in (found, plain, drafted)]
    assert sides[0] > 0.98 * max(sides[1:])


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_little_is_lost_to_finding_out_that_drafting_does_not_pay(concurrency: int) -> None:
    """A deployment's first 36 sessions."""
    runs = shuffled(2 * spoiled(recorded("greedy")))
    found, plain, drafted = (
        speed([one for run in runs for one in play(run, side(), concurrency)]).tokens_per_second
        for side in (lambda: controlled(Rule.GREEDY), lambda: fixed(0), lambda: fixed(BOUND))
    )
    assert drafted < 0.92 * plain
    assert found > 0.965 * plain
