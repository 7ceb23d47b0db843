"""How sure a plan is: intervals that hold what they say, and what they leave out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from deploy.planner.choosing import LEVEL, Chooser, Spread, best, spread
from deploy.planner.round_times import Option, ServiceTimes
from deploy.planner.rounds import Attempt, Rounds, replay, total
from outrider.engine.step_costs import StepCosts
from outrider.speculation.sampling_params import Rule

TARGET = StepCosts((1, 2, 101), (0.010, 0.010, 0.010 + 99 * 0.0002))
DRAFT = StepCosts((1, 101), (0.001, 0.001 + 100 * 0.00001))
TIMES = ServiceTimes(target=TARGET, draft=DRAFT)
KS = (1, 2, 4, 8, 16)
NUM_TOKENS = 101


@cache
def rounds_of(acceptance: float, num_draft_tokens: int) -> Rounds:
    def attempt_at(start: int) -> Attempt:
        known = min(num_draft_tokens, NUM_TOKENS - start)
        chances = tuple(acceptance**depth for depth in range(1, known + 1))
        return Attempt(num_draft_tokens, num_draft_tokens, chances)

    return replay(NUM_TOKENS, attempt_at)


def planned(acceptances: Sequence[float]) -> tuple[list[Option], Spread | None]:
    """Of texts of which each has an acceptance of its own."""
    prompt_tokens = [10] * len(acceptances)
    parts = [[rounds_of(a, k) for a in acceptances] for k in (0, *KS)]
    chooser = Chooser(TIMES, 1, prompt_tokens, total(parts[0]), Rule.TOKEN)
    options = [chooser.plain]
    for k, part in zip(KS, parts[1:], strict=True):
        options.append(chooser.best_way(Rule.TOKEN, k, total(part)))
    return options, spread(options, parts, TIMES, 1, prompt_tokens)


def test_texts_that_differ_leave_some_and_more_of_them_less() -> None:
    """The speed-up lies within its interval, and not every sample leads to the same K."""
    few, many = [0.2, 0.95] * 3, [0.2, 0.95] * 48
    (options, found), (_, surer) = planned(few), planned(many)
    assert found is not None
    assert surer is not None
    low, high = found.speedup
    assert low < best(options).speedup < high
    assert found.same_share < 1.0
    assert surer.speedup[1] - surer.speedup[0] < (high - low) / 2


def test_an_interval_holds_the_speed_up_about_as_often_as_it_says() -> None:
    """Plans of 24 texts from a law: how often the interval holds the speed-up that what was chosen
    has over all texts of the law."""
    generator = np.random.default_rng(1)
    law = np.linspace(0.3, 0.9, 13)
    whole, _ = planned(list(law))
    speedups = {option.num_draft_tokens: option.speedup for option in whole}
    num_held, num_tries = 0, 60
    for _ in range(num_tries):
        options, found = planned(list(generator.choice(law, size=24)))
        assert found is not None
        truth = speedups[best(options).num_draft_tokens]
        num_held += found.speedup[0] <= truth <= found.speedup[1]
    assert LEVEL == 0.9
    assert 0.75 * num_tries <= num_held < num_tries


def test_one_text_says_nothing_of_others() -> None:
    assert planned([0.7])[1] is None
