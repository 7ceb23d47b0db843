"""`bench speedup`: its requests and statistics, with a scripted side."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.bench.measurement import Completion, SideResult
from outrider.bench.prompts import BenchPrompt, read_prompts
from outrider.bench.rates import Work
from outrider.bench.speedup import SpeedupOptions, compared, report, run
from outrider.errors import ConfigError
from outrider.interfaces.request import GenerateRequest
from outrider.speculation.sampling_params import Rule
from tests.support.bench_sides import ScriptedSide, subject_of
from tests.support.command_lines import printed

pytestmark = pytest.mark.virtual


async def test_the_whole_of_it_over_the_built_in_prompts() -> None:
    """Drafts make the category `rewrite` three times as fast, and no other category faster."""
    rewritten = [prompt.text for prompt in read_prompts() if prompt.category == "rewrite"]

    def script(request: GenerateRequest) -> tuple[int, float]:
        return 12, 1.0 if request.num_draft_tokens and request.prompt in rewritten else 3.0

    options, lines = SpeedupOptions(num_prompts=12), list[str]()
    side = ScriptedSide(script)
    subject = subject_of(side, num_draft_tokens=5)
    found = (await run(options, subject, lines.append)).values
    assert (found["num_prompts"], found["rule"], found["num_draft_tokens"]) == (12, "greedy", 5)
    # 12 tokens in each of 12 answers; the two of `rewrite` take 1 s instead of 3 s with drafts.
    assert found["speedup"] == pytest.approx(36 / 32)
    assert {name: one["speedup"] for name, one in found["categories"].items()} == pytest.approx(
        {"chat": 1, "code": 1, "math": 1, "rewrite": 3, "summary": 1, "extract": 1}
    )
    assert found["engine_tokens_per_second"] is None
    assert lines[-1] == "prompt 12 of 12: extract"
    assert side.most_running == 1
    await run(replace(options, concurrency=4), subject, lines.append)
    assert side.most_running == 4


async def test_sampling_uses_the_rule_asked_for_and_the_bound_asked_for() -> None:
    """No seed is sent, because K is constant in a session that repeats the seed of another side's.
    If the deployment drafts no tokens, there is nothing to compare."""
    side = ScriptedSide(lambda request: (12, 1.0))
    options = SpeedupOptions(num_prompts=6, temperature=1.0, rule="block", num_draft_tokens=3)
    await run(options, subject_of(side), lambda line: None)
    assert {(found.rule, found.num_draft_tokens) for found in side.calls} == {
        (Rule.BLOCK, 0),
        (Rule.BLOCK, 3),
    }
    assert {found.seed for found in side.calls} == {None}
    with pytest.raises(ConfigError, match="num_draft_tokens: 0"):
        await run(SpeedupOptions(), subject_of(side, num_draft_tokens=0), lambda line: None)


PROMPTS = tuple(BenchPrompt(f"p{i}", category) for i, category in enumerate("aabbb"))


def side_of(seconds: tuple[float, ...] | None, *completions: tuple[float, ...]) -> SideResult:
    """Completions of (tokens, seconds, rounds, drafted, accepted). Each is a turn, unless `seconds`
    has the times of turns, of one prompt each but the last."""
    done = tuple(Completion(tuple(range(int(n))), 0.0, *rest) for n, *rest in completions)
    if seconds is None:
        return SideResult(done, tuple(Work(one.num_tokens, one.seconds) for one in done))
    last = len(seconds) - 1
    numbers = [one.num_tokens for one in done]
    turns = zip([*numbers[:last], sum(numbers[last:])], seconds, strict=True)
    return SideResult(done, tuple(Work(*turn) for turn in turns))


def level(
    plain_s: tuple[float, ...] | None = None,
    fast_s: tuple[float, ...] | None = None,
    **others: float,
) -> Any:
    """The prompts' ratios of tokens/s are 1, 4, 2, 3 and 12. The last two answers are shorter."""
    sides = {
        "plain": side_of(plain_s, *[(20, 2.0)] * 5),
        "speculative": side_of(
            fast_s,
            (20, 2.0, 20, 10, 0),
            (20, 0.5, 5, 40, 15),
            (20, 1.0, 10, 20, 10),
            (18, 0.6, 6, 30, 12),
            (12, 0.1, 4, 20, 8),
        ),
    } | {name: side_of(None, *[(20, seconds)] * 5) for name, seconds in others.items()}
    return SETUP | compared(PROMPTS, sides, True)


SETUP = {
    "model": "demo",
    "draft_model": "ngram",
    "dtype": "bfloat16",
    "num_draft_tokens": 8,
    "temperature": 0.0,
    "rule": "greedy",
    "concurrency": 1,
    "bit_equal_rows": False,
}


def test_the_speedup_is_the_ratio_of_all_tokens_over_all_time() -> None:
    """The median of the prompts' ratios would be 3."""
    found = level()
    expected = {
        "speedup": (90 / 4.2) / (100 / 10.0),
        "plain_tokens_per_second": 100 / 10.0,
        "num_identical": 3,
        "speculative_tokens_per_second": 90 / 4.2,
        "acceptance_rate": 45 / 120,
        "tokens_per_round": 90 / 45,
        "repetitions": 5,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    first, second = found["categories"]["a"], found["categories"]["b"]
    assert first["speedup"] == pytest.approx((40 / 2.5) / (40 / 4.0))
    assert first["speculative_tokens_per_second"] == pytest.approx(40 / 2.5)
    assert second["acceptance_rate"] == pytest.approx(30 / 70)
    assert found["speedup_interval"] is None


def test_several_at_a_time_the_time_is_the_wall_time() -> None:
    """The time of a category is the sum over its requests."""
    found = level((1.0, 4.0), (0.5, 2.5))
    assert found["plain_tokens_per_second"] == pytest.approx(20.0)
    assert found["speedup"] == pytest.approx((90 / 3.0) / (100 / 5.0))
    assert found["repetitions"] == 2
    assert found["categories"]["a"]["speedup"] == pytest.approx((40 / 2.5) / (40 / 4.0))


@pytest.mark.parametrize(("num_turns", "has_interval"), [(20, True), (19, False)])
def test_a_category_has_an_interval_if_its_requests_ran_one_at_a_time(
    num_turns: int, has_interval: bool
) -> None:
    """The times of requests of one turn depend on each other. A category of 7 is too small."""
    prompts = [BenchPrompt(f"p{i}", "few" if i < 7 else "many") for i in range(20)]
    results = {
        name: side_of((seconds,) * num_turns, *[(20, seconds, 10, 8, 4)] * 20)
        for name, seconds in (("plain", 2.0), ("speculative", 1.0))
    }
    found = compared(prompts, results, True)
    few, many = (found["categories"][name] for name in ("few", "many"))
    assert (few["speedup"], few["speedup_interval"]) == (pytest.approx(2.0), None)
    assert many["speedup"] == pytest.approx(2.0)
    assert (many["speedup_interval"] is not None) == has_interval
    assert found["speedup_interval"] is not None


def sides(*seconds: float, drafted: int = 8, noise: float = 0.01) -> Any:
    """Plain decoding takes 1 s for each prompt, give or take `noise`."""
    off = [1 + noise * (-1) ** index for index, _ in enumerate(seconds)]
    fast = [(20, value, 10, drafted, drafted // 2) for value in seconds]
    results = {"plain": side_of(None, *((20, value, 20) for value in off))}
    prompts = (PROMPTS * 2)[: len(seconds)]
    results["speculative"] = side_of(None, *fast)
    return SETUP | compared(prompts, results, True)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (sides(*[0.5] * 8), "decoding runs at 2.00x the speed of plain decoding (95%"),
        (sides(*[2.0] * 8), "decoding runs at 0.50x the speed of plain decoding (95%"),
        (
            sides(*[0.9, 1.2, 0.8, 1.1] * 2),
            "no measurable difference between speculative and plain",
        ),
        (sides(0.9, 1.2, 0.8, drafted=0), "no drafts were proposed"),
        (
            sides(*[0.5] * 7),
            "at 2.00x the speed of plain decoding; too few repetitions for an "
            "interval (7, at least 8): give more prompts, with --num-prompts",
        ),
    ],
)
def test_the_headline_is_the_row_of_all_prompts(found: Any, said: str) -> None:
    line = report(found).shown[-1]
    assert said in line
    [*_, cells] = report(found).shown[0].rows
    assert cells[0] == "all"
    if "no drafts" in said:
        assert cells[2:4] == ["-", "-"]
        assert (found["speedup"], found["speedup_interval"]) == (None, None)
        assert "x the speed" not in line
        assert "interval" not in line
    else:
        assert float(cells[2]) == pytest.approx(found["speedup"], abs=1e-3)
    if interval := found["speedup_interval"]:
        low, high = interval
        assert cells[3] == f"{low:.3f} {high:.3f}"
        assert f"interval {low:.2f}x to {high:.2f}x over 8 repetitions" in line


def test_the_table_fits_a_terminal_of_80_columns_in_one_piece() -> None:
    prompts = [prompt for prompt in read_prompts() for _ in range(8)]
    done = [(20, 0.01, 10, 8, 4)] * len(prompts)
    results = {name: side_of(None, *done) for name in ("plain", "speculative")}
    shown = printed(*report(SETUP | compared(prompts, results, True)).shown, width=80)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("─\n") == 1
    assert "1.000 1.000  2000.000" in shown


@pytest.mark.parametrize(
    ("is_equal", "said"),
    [
        (True, "all should, because the target's rows are bit-equal"),
        (False, "others may differ where two tokens are almost equally likely"),
        (None, "all should if `outrider status` shows bit-equal rows"),
    ],
)
def test_identical_answers_are_explained(is_equal: bool | None, said: str) -> None:
    shown = printed(*report(level() | {"bit_equal_rows": is_equal}).shown)
    assert f"3 of 5 answers have the same tokens with and without drafts; {said}" in " ".join(
        shown.split()
    )


def test_answers_that_are_drawn_anew_are_not_compared() -> None:
    results = {name: side_of(None, (20, 1.0, 20, 8, 4)) for name in ("plain", "speculative")}
    found = SETUP | compared(PROMPTS[:1], results, False)
    assert found["num_identical"] is None
    assert "answers have the same tokens" not in printed(*report(found).shown)


@pytest.mark.parametrize(("seconds", "warned"), [(1.82, 0), (1.78, 1)])
def test_a_slow_baseline_is_warned_of(seconds: float, warned: int) -> None:
    """The report warns if plain decoding (2 s a prompt) is slower than 0.9 of a reference."""
    found = report(level(**{"the engine alone": seconds}))
    assert len(found.warnings) == warned
    assert all("the engine alone" in line and "below 0.90x" in line for line in found.warnings)
    shown = printed(*found.shown)
    assert f"plain decoding runs at {seconds / 2:.2f}x the speed of the engine alone" in shown
    assert "transformers generate" not in shown
