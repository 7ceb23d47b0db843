"""The statistics of a report, on results that are easy to work out by hand."""

import io
import json
import math

import pytest
from rich.console import Console

from benchmarks.measurement import Completion, Side, SideResult
from benchmarks.prompts import BenchPrompt
from benchmarks.report import Setup, compare, render, summarise, to_json, warnings
from outrider.errors import InvariantError

PROMPTS = tuple(BenchPrompt(f"p{i}", category) for i, category in enumerate("aabbb"))


def setup(concurrency: int = 1) -> Setup:
    return Setup(
        model="demo",
        draft_model="ngram",
        dtype="bfloat16",
        num_draft_tokens=8,
        max_tokens=64,
        temperature=0.0,
        rule="greedy",
        concurrency=concurrency,
    )


def completion(
    num_tokens: int, seconds: float, rounds: int = 1, drafted: int = 0, accepted: int = 0
) -> Completion:
    return Completion(
        token_ids=tuple(range(num_tokens)),
        started_s=0.0,
        seconds=seconds,
        num_rounds=rounds,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
    )


def result(*completions: Completion, seconds: float | None = None) -> SideResult:
    total = sum(found.seconds for found in completions) if seconds is None else seconds
    return SideResult(completions, total)


def both_sides() -> dict[Side, SideResult]:
    """Ratios of tokens/s: 1, 4, 2, 3 and 12; the last with half as many tokens as plain."""
    plain = [completion(20, 2.0) for _ in PROMPTS]
    fast = [
        completion(20, 2.0, rounds=20, drafted=10, accepted=0),
        completion(20, 0.5, rounds=5, drafted=40, accepted=15),
        completion(20, 1.0, rounds=10, drafted=20, accepted=10),
        completion(18, 0.6, rounds=6, drafted=30, accepted=12),
        completion(12, 0.1, rounds=4, drafted=20, accepted=8),
    ]
    return {Side.PLAIN: result(*plain), Side.SPECULATIVE: result(*fast)}


def test_speedup_is_the_median_of_the_ratios_of_tokens_per_second() -> None:
    """Not of wall times: the sides may write different numbers of tokens. Not the ratio of totals,
    which here is 90 / 4.2 to 100 / 10 = 2.14."""
    report = summarise(setup(), PROMPTS, both_sides())
    assert report.overall.speedup == pytest.approx(3.0)
    assert report.categories["a"].speedup == pytest.approx(2.5)
    assert report.categories["b"].speedup == pytest.approx(3.0)


def test_rates_are_all_tokens_over_all_wall_time() -> None:
    report = summarise(setup(), PROMPTS, both_sides())
    assert report.overall.plain_tokens_per_second == pytest.approx(100 / 10.0)
    assert report.overall.speculative_tokens_per_second == pytest.approx(90 / 4.2)
    assert report.categories["a"].speculative_tokens_per_second == pytest.approx(40 / 2.5)
    assert report.overall.num_tokens_plain == 100
    assert report.overall.num_tokens_speculative == 90


def test_acceptance_and_tokens_per_round_are_of_the_speculative_side() -> None:
    report = summarise(setup(), PROMPTS, both_sides())
    assert report.overall.acceptance_rate == pytest.approx(45 / 120)
    assert report.overall.tokens_per_round == pytest.approx(90 / 45)
    assert report.categories["b"].acceptance_rate == pytest.approx(30 / 70)
    assert report.categories["b"].tokens_per_round == pytest.approx(50 / 20)


def test_identical_completions_are_counted() -> None:
    report = summarise(setup(), PROMPTS, both_sides())
    assert report.overall.num_identical == 3
    assert report.categories["a"].num_identical == 2
    assert report.categories["b"].num_identical == 1


def test_several_at_a_time_the_speedup_is_the_ratio_of_totals() -> None:
    """The wall time is that of the whole side, less than the sum over requests; of a category it
    is the sum over its requests on both sides."""
    sides = both_sides()
    sides[Side.PLAIN] = result(*sides[Side.PLAIN].completions, seconds=5.0)
    sides[Side.SPECULATIVE] = result(*sides[Side.SPECULATIVE].completions, seconds=3.0)
    report = summarise(setup(concurrency=2), PROMPTS, sides)
    assert report.overall.plain_tokens_per_second == pytest.approx(20.0)
    assert report.overall.speedup == pytest.approx((90 / 3.0) / (100 / 5.0))
    assert report.categories["a"].speedup == pytest.approx((40 / 2.5) / (40 / 4.0))


def test_acceptance_of_nothing_is_not_zero() -> None:
    plain, fast = result(completion(5, 1.0)), result(completion(5, 1.0, rounds=5))
    assert compare(plain, fast, several=False).acceptance_rate is None


def test_sides_that_decoded_other_prompts_are_refused() -> None:
    sides = both_sides()
    sides[Side.PLAIN] = result(*sides[Side.PLAIN].completions[1:])
    with pytest.raises(InvariantError, match="every prompt"):
        summarise(setup(), PROMPTS, sides)


def test_tokens_without_a_round_are_refused() -> None:
    plain, fast = result(completion(5, 1.0)), result(completion(5, 1.0, rounds=0))
    with pytest.raises(InvariantError, match="without a round"):
        compare(plain, fast, several=False)


def test_json_holds_every_number_by_its_name() -> None:
    sides = both_sides()
    sides[Side.ENGINE] = result(*[completion(20, 1.6) for _ in PROMPTS])
    sides[Side.TRANSFORMERS] = result(*[completion(20, 2.5) for _ in PROMPTS])
    value = json.loads(to_json([summarise(setup(), PROMPTS, sides)]))
    assert value["speedup"] == 3.0
    assert value["plain_tokens_per_second"] == 10.0
    assert value["speculative_tokens_per_second"] == round(90 / 4.2, 4)
    assert value["acceptance_rate"] == 0.375
    assert value["tokens_per_round"] == 2.0
    assert value["engine_tokens_per_second"] == 12.5
    assert value["transformers_generate_tokens_per_second"] == 8.0
    assert list(value["categories"]) == ["a", "b"]
    assert value["categories"]["a"]["speedup"] == 2.5
    assert value["num_prompts"] == 5
    assert value["model"] == "demo"
    assert value["draft_model"] == "ngram"


def test_several_concurrencies_are_told_beside_the_first_one() -> None:
    """What one report says stays where it is; each of several is found by its number, too."""
    alone = json.loads(to_json([summarise(setup(), PROMPTS, both_sides())]))
    reports = [summarise(setup(number), PROMPTS, both_sides()) for number in (1, 16)]
    both = json.loads(to_json(reports))
    found = both.pop("by_concurrency")
    assert both == alone
    assert list(found) == ["1", "16"]
    assert found["1"]["speedup"] == alone["speedup"]
    assert found["1"]["categories"] == alone["categories"]
    assert found["16"]["speedup"] == pytest.approx((90 / 4.2) / (100 / 10.0), abs=1e-4)


def test_json_of_skipped_references_is_null_and_the_text_is_one_line() -> None:
    text = to_json([summarise(setup(), PROMPTS, both_sides())])
    value = json.loads(text)
    assert value["engine_tokens_per_second"] is None
    assert value["transformers_generate_tokens_per_second"] is None
    assert "\n" not in text


def test_a_number_that_is_none_in_json_is_refused() -> None:
    """NaN and infinity are no JSON; writing them would break whoever reads the report."""
    sides = both_sides()
    sides[Side.ENGINE] = result(*[completion(20, 1.0) for _ in PROMPTS], seconds=math.nan)
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json([summarise(setup(), PROMPTS, sides)])


def test_the_table_shows_categories_totals_and_references() -> None:
    sides = both_sides()
    sides[Side.ENGINE] = result(*[completion(20, 1.6) for _ in PROMPTS])
    output = io.StringIO()
    Console(file=output, width=120).print(render(summarise(setup(), PROMPTS, sides)))
    shown = output.getvalue()
    row = next(line for line in shown.splitlines() if " all " in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "all", "5", "10.0", "21.4", "38%", "2.00", "3.00x",
    ]  # fmt: skip
    line = (
        "plain decoding through the services runs at 0.80x the speed of the engine alone "
        "(10.0 against 12.5 tokens/s over all)"
    )
    assert line in shown
    assert "transformers generate" not in shown
    assert "median speed-up" in shown  # Which is not the ratio of the totals beside it.


@pytest.mark.parametrize(("seconds", "warned"), [(1.81, 0), (1.79, 1)])
def test_a_slow_baseline_is_warned_of(seconds: float, warned: int) -> None:
    """Under 0.9 of a reference; plain takes 2 s a prompt here."""
    sides = both_sides()
    assert warnings(summarise(setup(), PROMPTS, sides)) == []
    sides[Side.ENGINE] = result(*[completion(20, 2.0) for _ in PROMPTS])
    sides[Side.TRANSFORMERS] = result(*[completion(20, seconds) for _ in PROMPTS])
    found = warnings(summarise(setup(), PROMPTS, sides))
    assert len(found) == warned
    assert all("transformers generate" in line and "slow baseline" in line for line in found)
