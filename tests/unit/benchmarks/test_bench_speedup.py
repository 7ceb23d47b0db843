"""`bench speedup`: its requests and statistics, with a scripted side."""

from dataclasses import replace
from typing import Any

import pytest
from bench_sides import ScriptedSide, subject_of
from command_lines import printed

from benchmarks.measurement import Completion, SideResult
from benchmarks.prompts import BenchPrompt, read_prompts
from benchmarks.speedup import SpeedupOptions, compared, report, run
from outrider.errors import ConfigError
from outrider.request import GenerateRequest
from outrider.speculation.sampling_params import Rule

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
    assert found["speedup"] == pytest.approx(1.0)
    assert {name: one["speedup"] for name, one in found["categories"].items()} == pytest.approx(
        {"chat": 1, "code": 1, "math": 1, "rewrite": 3, "summary": 1, "extract": 1}
    )
    assert found["engine_tokens_per_second"] is None
    assert lines[-1] == "prompt 12 of 12: extract"
    assert side.most_running == 1
    await run(replace(options, concurrency=4), subject, lines.append)
    assert side.most_running == 4


async def test_sampling_uses_the_rule_asked_for_and_the_bound_asked_for() -> None:
    """If the deployment drafts no tokens, there is nothing to compare."""
    side = ScriptedSide(lambda request: (12, 1.0))
    options = SpeedupOptions(num_prompts=6, temperature=1.0, rule="block", num_draft_tokens=3)
    await run(options, subject_of(side), lambda line: None)
    assert {(found.rule, found.num_draft_tokens) for found in side.calls} == {
        (Rule.BLOCK, 0), (Rule.BLOCK, 3),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="num_draft_tokens: 0"):
        await run(SpeedupOptions(), subject_of(side, num_draft_tokens=0), lambda line: None)


PROMPTS = tuple(BenchPrompt(f"p{i}", category) for i, category in enumerate("aabbb"))


def side_of(seconds: float | None, *completions: tuple[float, ...]) -> SideResult:
    """Completions of (tokens, seconds, rounds, drafted, accepted). Without `seconds`, they ran one
    after the other."""
    done = tuple(Completion(tuple(range(int(n))), 0.0, *rest) for n, *rest in completions)
    return SideResult(done, sum(one.seconds for one in done) if seconds is None else seconds)


def level(plain_s: float | None = None, fast_s: float | None = None, **others: float) -> Any:
    """The ratios of tokens/s are 1, 4, 2, 3 and 12. The last two answers are shorter."""
    sides = {
        "plain": side_of(plain_s, *[(20, 2.0)] * 5),
        "speculative": side_of(
            fast_s, (20, 2.0, 20, 10, 0), (20, 0.5, 5, 40, 15), (20, 1.0, 10, 20, 10),
            (18, 0.6, 6, 30, 12), (12, 0.1, 4, 20, 8),
        ),
    } | {name: side_of(None, *[(20, seconds)] * 5) for name, seconds in others.items()}  # fmt: skip
    setup = {
        "model": "demo", "draft_model": "ngram", "dtype": "bfloat16", "num_draft_tokens": 8,
        "temperature": 0.0, "rule": "greedy", "concurrency": 2 if plain_s else 1,
    }  # fmt: skip
    return setup | compared(PROMPTS, sides, plain_s is not None)


def test_figures_are_medians_of_ratios_and_totals_over_totals() -> None:
    """The speed-up is a median. The ratio of total rates would be 90 / 4.2 to 100 / 10 = 2.14."""
    found = level()
    expected = {
        "speedup": 3.0, "plain_tokens_per_second": 100 / 10.0, "num_identical": 3,
        "speculative_tokens_per_second": 90 / 4.2, "acceptance_rate": 45 / 120,
        "tokens_per_round": 90 / 45,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    first, second = found["categories"]["a"], found["categories"]["b"]
    assert (first["speedup"], second["speedup"]) == pytest.approx((2.5, 3.0))
    assert first["speculative_tokens_per_second"] == pytest.approx(40 / 2.5)
    assert second["acceptance_rate"] == pytest.approx(30 / 70)


def test_several_at_a_time_the_speedup_is_the_ratio_of_totals() -> None:
    """The time of a side is its wall time. The time of a category is the sum over its requests."""
    found = level(5.0, 3.0)
    assert found["plain_tokens_per_second"] == pytest.approx(20.0)
    assert found["speedup"] == pytest.approx((90 / 3.0) / (100 / 5.0))
    assert found["categories"]["a"]["speedup"] == pytest.approx((40 / 2.5) / (40 / 4.0))
    one, several = (printed(*report(each).shown) for each in (level(), found))
    assert "plain decoding, in the median over the prompts" in " ".join(one.split())
    assert "plain decoding, in total" in " ".join(several.split())


@pytest.mark.parametrize(("seconds", "warned"), [(1.82, 0), (1.78, 1)])
def test_a_slow_baseline_is_warned_of(seconds: float, warned: int) -> None:
    """The report warns if plain decoding (2 s a prompt) is slower than 0.9 of a reference."""
    found = report(level(**{"the engine alone": seconds}))
    assert len(found.warnings) == warned
    assert all("the engine alone" in line and "below 0.90x" in line for line in found.warnings)
    shown = printed(*found.shown)
    row = next(line for line in shown.splitlines() if " all " in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "all", "5", "3.000", "10.000", "21.429", "0.375", "2.000", "3",
    ]  # fmt: skip
    assert f"plain decoding runs at {seconds / 2:.2f}x the speed of the engine alone" in shown
    assert "transformers generate" not in shown
