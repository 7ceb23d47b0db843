"""The ratio of two rates, and its interval."""

import numpy as np
import pytest
from scipy.stats import t

from outrider.bench.rates import LEVEL, REPETITIONS_MIN, Work, ratio_of_rates, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 47, 1000])
def test_the_quantile_is_students(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(t.ppf((1 + LEVEL) / 2, freedom), abs=2e-5)


def test_the_ratio_is_of_all_tokens_over_all_time() -> None:
    """The rates are 100 / 4 and 100 / 10. The ratios of the repetitions are 1 and 7."""
    fast, slow = [Work(30, 3.0), Work(70, 1.0)], [Work(50, 5.0), Work(50, 5.0)]
    assert ratio_of_rates(fast, slow).value == pytest.approx(2.5)
    assert ratio_of_rates(fast[:1], slow[:1]) == (pytest.approx(1.0), None)


def test_what_both_sides_share_widens_no_interval() -> None:
    """Repetitions differ in length, and by the machine's load, but their ratios are equal."""
    slow = [Work(10, 1.0), Work(90, 9.0), Work(40, 12.0)] * 3
    fast = [Work(number, seconds / 2) for number, seconds in slow]
    value, interval = ratio_of_rates(fast, slow)
    assert (value, interval) == (pytest.approx(2.0), pytest.approx((2.0, 2.0)))
    few = REPETITIONS_MIN - 1
    assert ratio_of_rates(fast[:few], slow[:few]) == (pytest.approx(2.0), None)
    assert ratio_of_rates(fast[: few + 1], slow[: few + 1]).interval is not None


@pytest.mark.parametrize("num", [8, 16])
def test_an_interval_holds_the_ratio_about_as_often_as_it_says(num: int) -> None:
    """Answers have 40 to 96 tokens, and the repetitions' ratios vary by 30 %. Over 4,000 intervals,
    the share that holds the true ratio has a standard error of 0.004."""
    generator, spread, trials = np.random.default_rng(5), 0.3, 4000
    true = 2.0 / np.exp(spread**2 / 2)
    held = 0
    for _ in range(trials):
        numbers = generator.integers(40, 97, num)
        seconds = numbers / 70 * np.exp(generator.normal(0, 0.05, num))
        ratios = 2.0 * np.exp(generator.normal(0, spread, num))
        slow = [Work(*one) for one in zip(numbers, seconds, strict=True)]
        fast = [Work(*one) for one in zip(numbers, seconds / ratios, strict=True)]
        _, interval = ratio_of_rates(fast, slow)
        assert interval is not None
        held += interval[0] <= true <= interval[1]
    assert held / trials == pytest.approx(LEVEL, abs=0.025)


@pytest.mark.parametrize(("num", "share"), [(8, 0.83), (12, 0.93)])
def test_an_interval_over_few_unequal_prompts_is_too_narrow(num: int, share: float) -> None:
    """The figures of docs/performance.md: a fifth of the prompts is 4 times as fast with drafts,
    and the others 0.9 times. Each time has noise of 5 %."""
    generator, trials = np.random.default_rng(5), 4000
    true = 1 / (0.2 / 4 + 0.8 / 0.9)
    held = 0
    for _ in range(trials):
        ratios = np.where(generator.random(num) < 0.2, 4.0, 0.9)
        slow_s, noise = np.exp(generator.normal(0, 0.05, (2, num)))
        # The mean of `noise` is exp(0.05**2 / 2), as is that of `slow_s`, which both sides share.
        fast_s = slow_s / ratios * noise * np.exp(-(0.05**2) / 2)
        slow, fast = ([Work(64, one) for one in side] for side in (slow_s, fast_s))
        _, interval = ratio_of_rates(fast, slow)
        assert interval is not None
        held += interval[0] <= true <= interval[1]
    assert held / trials == pytest.approx(share, abs=0.02)
