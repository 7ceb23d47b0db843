"""Rounds told from a text are those that would be played."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.acceptance import Guessing, matched, note_guess, race_rank
from deploy.planner.rounds import Attempt, replay, survival
from outrider.speculation.sampling_params import Rule

P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.2, 0.6])
NUM_PLACES = 60_000


def test_greedy_rounds_are_the_ones_that_are_played() -> None:
    """At temperature 0, by hand: hits 1 1 0 1 1 1 after the first token, K = 2. Rounds begin at 1
    (both accepted, then a bonus), at 4 (both), and the last at 7 of 8. What lies behind the end of
    a text is proposed, but neither reached nor accepted."""
    hits = [None, True, True, False, True, True, True, False]

    def attempt_at(start: int) -> Attempt:
        steps = [float(bool(hit)) for hit in hits[start : start + 2]]
        return Attempt(2, 2, survival(Rule.GREEDY, steps))

    found = replay(8, attempt_at, prompt_tokens=10)
    assert found.num_rounds == 4  # with the first, which has no draft
    assert found.context == ((10 + 1) + (10 + 4) + (10 + 7)) / 3
    assert found.by_position[:3] == (2 / 3, 1.0, None)
    assert (found.tokens_per_round, found.proposed_per_round) == (2.0, 2.0)
    found = replay(2, lambda start: Attempt(4, 4, (1.0,)))
    assert (found.num_rounds, found.by_position[:2]) == (2, (1.0, None))


def test_matched_is_how_often_two_races_with_one_noise_agree() -> None:
    """Over 60,000 races the share of agreement, given the target's winner, is what `matched` says;
    standard error at most 0.005 for each token, so 0.03 is passed in error less than once in 10^8.
    """
    noise = np.random.default_rng(3).gumbel(size=(NUM_PLACES, 3))
    ours, theirs = (np.log(P) + noise).argmax(axis=1), (np.log(Q) + noise).argmax(axis=1)
    for token_id in range(3):
        mine = ours == token_id
        share = (theirs[mine] == token_id).mean()
        assert abs(matched(P, Q, token_id) - share) < 0.03
    assert matched(P, np.array([0.5, 0.5, 0.0]), 2) == 0.0


def test_race_ranks_are_those_of_two_races_with_one_noise() -> None:
    """Drawn from the law that the winner leaves, the winner's rank in the race over q is
    distributed as in races that are run; standard error 0.004, bound 0.03."""
    generator = np.random.default_rng(11)
    noise = generator.exponential(size=(NUM_PLACES, 3))
    winners = (noise / P).argmin(axis=1)
    order = (noise / Q).argsort(axis=1).argsort(axis=1)
    mine = order[winners == 0, 0]
    told = np.array([race_rank(P, Q, 0, generator) for _ in range(15_000)])
    for rank in range(3):
        assert abs((mine == rank).mean() - (told == rank).mean()) < 0.03
    assert race_rank(P, np.array([0.0, 0.5, 0.5]), 0, generator) is None
    refusing = {race_rank(P, Q, 0, generator, refused=2) for _ in range(200)}
    assert refusing == {0, 1}


def test_hit_rates_add_up_the_likeliest_outcomes() -> None:
    """By hand, K = 1 with acceptance 0.8: bonus guesses 0.8 * (0.6, 0.4), recoveries 0.2 * 0.5."""
    guessing = Guessing()
    for rank in (0, None):
        note_guess(guessing.recovery, rank)
    note_guess(guessing.bonus, 0, 6.0)
    note_guess(guessing.bonus, 1, 4.0)
    rates = guessing.hit_rates([0.8])
    assert rates[:3] == pytest.approx((0.48, 0.80, 0.90))
