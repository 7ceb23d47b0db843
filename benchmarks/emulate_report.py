"""What `bench emulate` says: its figures as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from rich.table import Table

from outrider.speculation.sampling_params import Rule

from .emulate_pair import expected_tokens
from .emulate_rounds import Hits, TimedRounds
from .emulate_scenarios import PLAIN, Mode, Pair
from .figures import to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFigures:
    """One mode at one K and rule."""

    tokens_per_second: float
    num_draft_tokens: int
    """K."""
    rule: str
    tokens_per_round: float
    fraction_of_ideal: float
    """Of the tokens that a round is expected to commit over the target's step alone."""
    look_ahead_hit_rate: float | None
    """Null where nothing is drafted ahead."""
    overhead_ms_p50: float
    """Of a round's time beside the target's step and, where nothing is drafted ahead, the K steps
    of the draft."""
    hits: Hits | None
    """Null as that rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateReport:
    """The result of one `bench emulate`."""

    scenario: str
    seed: int
    tokens: int
    """Of each mode's session ..."""
    dropped: int
    """... and those at its beginning that do not count."""
    look_ahead_outcomes: int
    """Of a round that the draft was to work out ahead, where it does so."""
    deviation: float
    """Of log q - log p before both are normalised."""
    acceptance: Mapping[str, float]
    """By rule: of each draft token whose predecessors were accepted."""
    modes: Mapping[str, ModeFigures]
    """By mode, each at its faster rule."""
    by_rule: Mapping[str, Mapping[str, ModeFigures]]
    """Rule -> mode -> figures."""
    round_trip_ms: float
    with_round_trip: Mapping[str, ModeFigures]
    """By mode, with so much more between coordinator and draft."""

    def to_json(self) -> str:
        """One JSON object on one line; a mode's name is a key of it."""
        values = asdict(self)
        modes = values.pop("modes")
        delayed = {"ms": values.pop("round_trip_ms"), **values.pop("with_round_trip")}
        return to_json(values | modes | {"with_round_trip": delayed})


def figures(
    pair: Pair, mode: Mode, rule: Rule, num_draft_tokens: int, timed: TimedRounds
) -> ModeFigures:
    """Those of a mode's rounds."""
    steps = pair.scenario.steps
    expected = expected_tokens(pair.acceptance[rule], num_draft_tokens)
    ideal = expected / steps.verify_ms * 1e3
    return ModeFigures(
        tokens_per_second=timed.tokens_per_second,
        num_draft_tokens=num_draft_tokens,
        rule=rule.value,
        tokens_per_round=timed.tokens_per_round,
        fraction_of_ideal=timed.tokens_per_second / ideal,
        look_ahead_hit_rate=timed.hit_rate if mode.looks_ahead else None,
        overhead_ms_p50=timed.overhead_ms(
            steps.verify_ms, 0.0 if mode.looks_ahead else steps.draft_ms
        ),
        hits=timed.hits(num_draft_tokens) if mode.looks_ahead else None,
    )


def render(report: EmulateReport) -> Table:
    """The report for people."""
    accepted = ", ".join(f"{rule} {share:.3f}" for rule, share in report.acceptance.items())
    table = Table(
        title=f"{report.scenario}, deviation {report.deviation}, acceptance {accepted};\n"
        f"tokens {report.dropped + 1} to {report.tokens} of each mode",
        caption="of ideal: rounds of one verification each are 1; hits: rounds whose proposal was\n"
        "there when they began; ms over: the median of what a round took beside the models",
    )
    table.add_column("mode", no_wrap=True)
    table.add_column("rule, K", no_wrap=True)
    for heading in ("tokens/s", "over plain", "per round", "of ideal", "hits", "ms over"):
        table.add_column(heading, justify="right")
    plain = report.modes[PLAIN.name].tokens_per_second
    for name, found in _rows(report):
        table.add_row(*_row(name, found, plain))
    return table


def _rows(report: EmulateReport) -> Iterator[tuple[str, ModeFigures]]:
    """Each mode, then what it has under the other rule, then with the round trip."""
    for name, best in report.modes.items():
        yield name, best
        for by_mode in report.by_rule.values():
            if name in by_mode and by_mode[name].rule != best.rule:
                yield name, by_mode[name]
        if name in report.with_round_trip:
            yield f"  + {report.round_trip_ms:g} ms", report.with_round_trip[name]


def _row(name: str, found: ModeFigures, plain: float) -> tuple[str, ...]:
    return (
        name,
        f"{found.rule} {found.num_draft_tokens}" if found.num_draft_tokens else "-",
        f"{found.tokens_per_second:.1f}",
        f"{found.tokens_per_second / plain:.2f}x",
        f"{found.tokens_per_round:.2f}",
        f"{found.fraction_of_ideal:.2f}",
        "-" if found.look_ahead_hit_rate is None else f"{found.look_ahead_hit_rate:.2f}",
        f"{found.overhead_ms_p50:.2f}",
    )
