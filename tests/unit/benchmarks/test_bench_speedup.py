"""Options, requests and statistics of `bench speedup`, over a side that decodes nothing."""

import io
import json
import math
from typing import Any

import pytest
from bench_sides import ScriptedSide
from rich.console import Console

from benchmarks.measurement import Completion, Decoding, SideResult
from benchmarks.prompts import BenchPrompt
from benchmarks.report import to_json
from benchmarks.speedup import SpeedupOptions, Subject, compared, report, run
from outrider.errors import ConfigError
from outrider.speculation.sampling_params import Rule


def subject(side: ScriptedSide, num_draft_tokens: int = 8) -> Subject:
    return Subject(
        client=side, model="demo", draft_model="ngram", dtype="bfloat16",
        num_draft_tokens=num_draft_tokens, target=None,
    )  # fmt: skip


async def test_each_concurrency_is_measured_alone_and_references_once() -> None:
    levels = SpeedupOptions(concurrency=(1, 4), num_prompts=12).levels()
    assert [(level.concurrency, not level.no_reference) for level in levels] == [
        ((1,), True),
        ((4,), False),
    ]
    for level, most in zip(levels, (1, 4), strict=True):
        side = ScriptedSide(lambda prompt, decoding: (12, 2.0))
        found = await run(level, subject(side), lambda line: None)
        assert side.most_running == most
        assert found["concurrency"] == most


async def test_the_whole_of_it_over_the_built_in_prompts() -> None:
    """Speculation takes a third of the time in `rewrite` and as long elsewhere. Temperature 0 is
    greedy, and the deployment says how much is drafted."""

    def script(prompt: BenchPrompt, decoding: Decoding) -> tuple[int, float]:
        helped = decoding.num_draft_tokens > 0 and prompt.category == "rewrite"
        return 12, 1.0 if helped else 3.0

    lines: list[str] = []
    options = SpeedupOptions(num_prompts=12)
    found = await run(options, subject(ScriptedSide(script), 5), lines.append)
    assert (found["num_prompts"], found["rule"], found["num_draft_tokens"]) == (12, "greedy", 5)
    assert found["speedup"] == pytest.approx(1.0)
    assert {name: one["speedup"] for name, one in found["categories"].items()} == pytest.approx(
        {"chat": 1, "code": 1, "math": 1, "rewrite": 3, "summary": 1, "extract": 1}
    )
    assert all(one["num_prompts"] == 2 for one in found["categories"].values())
    assert found["engine_tokens_per_second"] is None
    assert lines[-1] == "prompt 12 of 12: extract"


async def test_sampling_uses_the_rule_asked_for_and_the_bound_asked_for() -> None:
    side = ScriptedSide(lambda prompt, decoding: (12, 1.0))
    options = SpeedupOptions(num_prompts=6, temperature=1.0, rule="block", num_draft_tokens=3)
    await run(options, subject(side), lambda line: None)
    assert {(found.rule, found.num_draft_tokens) for _, found in side.calls} == {
        (Rule.BLOCK, 0), (Rule.BLOCK, 3),
    }  # fmt: skip


async def test_a_deployment_that_drafts_nothing_has_nothing_to_compare() -> None:
    side = ScriptedSide(lambda prompt, decoding: (12, 1.0))
    with pytest.raises(ConfigError, match="num_draft_tokens: 0"):
        await run(SpeedupOptions(), subject(side, 0), lambda line: None)
    assert not side.calls


PROMPTS = tuple(BenchPrompt(f"p{i}", category) for i, category in enumerate("aabbb"))


def level(sides: dict[str, SideResult], concurrency: int = 1) -> dict[str, Any]:
    setup = {
        "model": "demo", "draft_model": "ngram", "dtype": "bfloat16", "num_draft_tokens": 8,
        "max_tokens": 64, "temperature": 0.0, "rule": "greedy", "concurrency": concurrency,
    }  # fmt: skip
    return setup | compared(PROMPTS, sides, concurrency > 1)


def completion(
    num_tokens: int, seconds: float, rounds: int = 1, drafted: int = 0, accepted: int = 0
) -> Completion:
    return Completion(tuple(range(num_tokens)), 0.0, seconds, rounds, drafted, accepted)


def result(*completions: Completion, seconds: float | None = None) -> SideResult:
    total = sum(found.seconds for found in completions) if seconds is None else seconds
    return SideResult(completions, total)


def both_sides() -> dict[str, SideResult]:
    """Ratios of tokens/s: 1, 4, 2, 3 and 12; the last with half as many tokens as plain."""
    plain = [completion(20, 2.0) for _ in PROMPTS]
    fast = [
        completion(20, 2.0, rounds=20, drafted=10, accepted=0),
        completion(20, 0.5, rounds=5, drafted=40, accepted=15),
        completion(20, 1.0, rounds=10, drafted=20, accepted=10),
        completion(18, 0.6, rounds=6, drafted=30, accepted=12),
        completion(12, 0.1, rounds=4, drafted=20, accepted=8),
    ]
    return {"plain": result(*plain), "speculative": result(*fast)}


def test_figures_are_medians_of_ratios_and_totals_over_totals() -> None:
    """The speed-up is not a ratio of wall times: the sides may write different numbers of tokens;
    and not the ratio of totals, which here is 90 / 4.2 to 100 / 10 = 2.14. Acceptance and tokens a
    round are the speculative side's."""
    found = level(both_sides())
    assert found["speedup"] == pytest.approx(3.0)
    assert found["plain_tokens_per_second"] == pytest.approx(100 / 10.0)
    assert found["speculative_tokens_per_second"] == pytest.approx(90 / 4.2)
    assert found["acceptance_rate"] == pytest.approx(45 / 120)
    assert found["tokens_per_round"] == pytest.approx(90 / 45)
    assert found["num_identical"] == 3
    first, second = found["categories"]["a"], found["categories"]["b"]
    assert (first["speedup"], second["speedup"]) == pytest.approx((2.5, 3.0))
    assert first["speculative_tokens_per_second"] == pytest.approx(40 / 2.5)
    assert second["acceptance_rate"] == pytest.approx(30 / 70)
    assert second["tokens_per_round"] == pytest.approx(50 / 20)


def test_several_at_a_time_the_speedup_is_the_ratio_of_totals() -> None:
    """The wall time is that of the whole side, less than the sum over requests; of a category it
    is the sum over its requests on both sides."""
    sides = both_sides()
    sides["plain"] = result(*sides["plain"].completions, seconds=5.0)
    sides["speculative"] = result(*sides["speculative"].completions, seconds=3.0)
    found = level(sides, concurrency=2)
    assert found["plain_tokens_per_second"] == pytest.approx(20.0)
    assert found["speedup"] == pytest.approx((90 / 3.0) / (100 / 5.0))
    assert found["categories"]["a"]["speedup"] == pytest.approx((40 / 2.5) / (40 / 4.0))


def test_several_concurrencies_are_told_beside_the_first_one() -> None:
    """What one report says stays where it is; each of several is found by its number, too. NaN is
    no JSON."""
    alone = json.loads(to_json(report([level(both_sides())]).values))
    both = json.loads(to_json(report([level(both_sides(), n) for n in (1, 16)]).values))
    found = both.pop("by_concurrency")
    assert both == alone
    assert (alone["speedup"], alone["speculative_tokens_per_second"]) == (3.0, 21.4286)
    assert list(found) == ["1", "16"]
    assert found["1"]["speedup"] == alone["speedup"]
    assert found["1"]["categories"] == alone["categories"]
    assert found["16"]["speedup"] == pytest.approx((90 / 4.2) / (100 / 10.0), abs=1e-4)
    sides = both_sides()
    sides["the engine alone"] = result(*[completion(20, 1.0) for _ in PROMPTS], seconds=math.nan)
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(report([level(sides)]).values)


def test_the_table_shows_categories_totals_and_references() -> None:
    sides = both_sides()
    sides["the engine alone"] = result(*[completion(20, 1.6) for _ in PROMPTS])
    output = io.StringIO()
    Console(file=output, width=120).print(*report([level(sides)]).shown, sep="\n")
    shown = output.getvalue()
    row = next(line for line in shown.splitlines() if " all " in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "all", "5", "3.000", "10.000", "21.429", "0.375", "2.000", "3",
    ]  # fmt: skip
    assert "plain decoding runs at 0.80x the speed of the engine alone (12.5)" in shown
    assert "transformers generate" not in shown


@pytest.mark.parametrize(("seconds", "warned"), [(1.81, 0), (1.79, 1)])
def test_a_slow_baseline_is_warned_of(seconds: float, warned: int) -> None:
    """Under 0.9 of a reference; plain takes 2 s a prompt here."""
    sides = both_sides()
    assert report([level(sides)]).warnings == []
    sides["the engine alone"] = result(*[completion(20, 2.0) for _ in PROMPTS])
    sides["transformers generate"] = result(*[completion(20, seconds) for _ in PROMPTS])
    found = report([level(sides)]).warnings
    assert len(found) == warned
    assert all("transformers generate" in line and "slow baseline" in line for line in found)
