"""What `bench speedup` says: statistics over finished completions, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outrider.errors import check

from .measurement import Side, SideResult
from .prompts import BenchPrompt

JSON_DIGITS: Final = 4
"""Decimals of a number in the JSON report."""
PLAIN_SHARE_MIN: Final = 0.9
"""What plain decoding through the services must reach of each reference's tokens/s: a slow baseline
is not a speed-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Speculative against plain decoding on some of the prompts."""

    num_prompts: int
    speedup: float
    """Median over the prompts of the ratio of speculative to plain tokens/s; with several requests
    at a time the ratio of the totals."""
    plain_tokens_per_second: float
    """All tokens / all wall time, prefill included."""
    speculative_tokens_per_second: float
    acceptance_rate: float | None
    """Accepted / proposed draft tokens; None where none were proposed."""
    tokens_per_round: float
    """Committed tokens / rounds, with speculation."""
    num_tokens_plain: int
    num_tokens_speculative: int
    num_identical: int
    """Prompts on which both sides wrote the same tokens. At temperature 0 all of them, but for
    near ties, which bfloat16 may break either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What was measured."""

    model: str
    draft_model: str
    dtype: str
    num_draft_tokens: int
    """The bound K."""
    max_tokens: int
    temperature: float
    rule: str
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupReport:
    """The result of one `bench speedup`."""

    setup: Setup
    overall: Comparison
    categories: Mapping[str, Comparison]
    """In the order of the prompts. With several requests at a time a category's wall time is the
    sum over its requests, since categories run side by side."""
    engine_tokens_per_second: float | None
    """The same prompts, one at a time, without services; None where skipped, as the next."""
    transformers_generate_tokens_per_second: float | None

    def values(self) -> dict[str, object]:
        """All of it, by its names in JSON."""
        return {
            **asdict(self.setup),
            **asdict(self.overall),
            "engine_tokens_per_second": self.engine_tokens_per_second,
            "transformers_generate_tokens_per_second": (
                self.transformers_generate_tokens_per_second
            ),
            "categories": self.compared(),
        }

    def compared(self) -> dict[str, object]:
        """The comparisons by category."""
        return {name: asdict(found) for name, found in self.categories.items()}


def to_json(reports: Sequence[SpeedupReport]) -> str:
    """One JSON object on one line: the first report's; of several, with each one's comparisons
    under `by_concurrency` besides."""
    value = reports[0].values()
    if len(reports) > 1:
        value["by_concurrency"] = {
            str(report.setup.concurrency): {
                **asdict(report.overall),
                "categories": report.compared(),
            }
            for report in reports
        }
    return json.dumps(_rounded(value), allow_nan=False)


def summarise(
    setup: Setup, prompts: Sequence[BenchPrompt], results: Mapping[str, SideResult]
) -> SpeedupReport:
    """The report on the results of all sides over the same prompts."""
    plain, speculative = results[Side.PLAIN], results[Side.SPECULATIVE]
    several = setup.concurrency > 1
    check(
        len(prompts) == len(plain.completions) == len(speculative.completions) > 0,
        "both sides must have decoded every prompt",
    )
    categories = {
        name: compare(part(plain, chosen), part(speculative, chosen), several)
        for name, chosen in places_by_category(prompts).items()
    }
    return SpeedupReport(
        setup=setup,
        overall=compare(plain, speculative, several),
        categories=categories,
        engine_tokens_per_second=_rate(results.get(Side.ENGINE)),
        transformers_generate_tokens_per_second=_rate(results.get(Side.TRANSFORMERS)),
    )


def compare(plain: SideResult, speculative: SideResult, several: bool) -> Comparison:
    """Compares two sides that decoded the same prompts, `several` at a time or one by one."""
    pairs = list(zip(plain.completions, speculative.completions, strict=True))
    if several:
        speedup = speculative.tokens_per_second / plain.tokens_per_second
    else:
        speedup = median(fast.tokens_per_second / slow.tokens_per_second for slow, fast in pairs)
    drafted = _sum(speculative, "num_draft_tokens")
    accepted = _sum(speculative, "num_accepted_draft_tokens")
    num_rounds = _sum(speculative, "num_rounds")
    check(num_rounds > 0, "tokens were committed without a round")
    return Comparison(
        num_prompts=len(pairs),
        speedup=speedup,
        plain_tokens_per_second=plain.tokens_per_second,
        speculative_tokens_per_second=speculative.tokens_per_second,
        acceptance_rate=accepted / drafted if drafted else None,
        tokens_per_round=speculative.num_tokens / num_rounds,
        num_tokens_plain=plain.num_tokens,
        num_tokens_speculative=speculative.num_tokens,
        num_identical=sum(slow.token_ids == fast.token_ids for slow, fast in pairs),
    )


def render(report: SpeedupReport) -> Group:
    """The report for people."""
    table = Table(title=_title(report.setup))
    table.add_column("prompts")
    for heading in ("number", "plain", "speculative", "accepted", "per round"):
        table.add_column(heading, justify="right")
    speedup = "speed-up" if report.setup.concurrency > 1 else "median speed-up"
    table.add_column(speedup, justify="right", style="bold")
    for name, found in report.categories.items():
        table.add_row(*_row(name, found))
    table.add_section()
    table.add_row(*_row("all", report.overall))
    return Group(table, *_reference_lines(report))


def warnings(report: SpeedupReport) -> list[str]:
    """What forbids to take the speed-up as it stands, a line each."""
    plain = report.overall.plain_tokens_per_second
    return [
        f"warning: plain decoding runs at {plain / rate:.2f}x the speed of {name}; under "
        f"{PLAIN_SHARE_MIN:.2f}x the speed-up is over a slow baseline"
        for name, rate in _references(report).items()
        if plain / rate < PLAIN_SHARE_MIN
    ]


def places_by_category(prompts: Sequence[BenchPrompt]) -> dict[str, list[int]]:
    """Where the prompts of each category stand, in the order of the prompts."""
    places: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        places.setdefault(prompt.category, []).append(index)
    return places


def part(result: SideResult, chosen: Sequence[int]) -> SideResult:
    """What a side did of the chosen prompts alone; its time is the sum over them."""
    completions = tuple(result.completions[index] for index in chosen)
    return SideResult(completions, sum(completion.seconds for completion in completions))


def _rate(result: SideResult | None) -> float | None:
    return None if result is None else result.tokens_per_second


def _sum(result: SideResult, name: str) -> int:
    return sum(getattr(completion, name) for completion in result.completions)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, JSON_DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value


def _title(setup: Setup) -> str:
    return (
        f"{setup.model} with {setup.draft_model}, K <= {setup.num_draft_tokens}, {setup.dtype}, "
        f"temperature {setup.temperature:g}, rule {setup.rule}, {setup.concurrency} at a time; "
        "tokens/s"
    )


def _row(name: str, found: Comparison) -> tuple[str, ...]:
    accepted = "-" if found.acceptance_rate is None else f"{found.acceptance_rate:.0%}"
    return (
        name,
        str(found.num_prompts),
        f"{found.plain_tokens_per_second:.1f}",
        f"{found.speculative_tokens_per_second:.1f}",
        accepted,
        f"{found.tokens_per_round:.2f}",
        f"{found.speedup:.2f}x",
    )


def _reference_lines(report: SpeedupReport) -> list[Text]:
    plain = report.overall.plain_tokens_per_second
    return [
        Text(
            f"plain decoding through the services runs at {plain / rate:.2f}x the speed of {name} "
            f"({plain:.1f} against {rate:.1f} tokens/s over all)"
        )
        for name, rate in _references(report).items()
    ]


def _references(report: SpeedupReport) -> dict[str, float]:
    """Tokens/s by reference, of those that were measured."""
    found = {
        "the engine alone": report.engine_tokens_per_second,
        "transformers generate": report.transformers_generate_tokens_per_second,
    }
    return {name: rate for name, rate in found.items() if rate is not None}
