"""What `bench peers` says: one table, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outrider.speculation.sampling_params import Rule

from .figures import to_json
from .measurement import Decoding, SideResult

OURS_PLAIN: Final = "outrider plain"
OURS_SPECULATIVE: Final = "outrider speculative"
_PLAIN: Final = (" plain", "transformers")
"""Ends the names of sides without drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSetup:
    """What all sides share."""

    model: str
    draft_model: str
    dtype: str
    num_draft_tokens: int
    """The bound K of Outrider."""
    num_prompts: int
    max_tokens: int
    rule: str
    """Of Outrider above temperature 0."""
    threads: int
    """Of each peer, and of Outrider's services in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One side at one level."""

    tokens_per_second: float
    """All tokens / all wall time, prefill included."""
    num_tokens: int
    time_to_first_token_ms: float | None
    """Median over the prompts, one at a time; None where it is not known."""
    same_tokens: int | None
    """Prompts on which it wrote the tokens of Outrider's plain decoding: at temperature 0 all, but
    for near ties, which bfloat16 may break either way. None above it, and where ids are not
    known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """All sides at one temperature and number of requests at a time."""

    temperature: float
    concurrency: int
    sides: Mapping[str, Figures]

    def best(self, *, plain: bool) -> str | None:
        """The fastest peer's side, of those without drafts or of all; None without a peer."""
        rates = {
            name: found.tokens_per_second
            for name, found in self.sides.items()
            if name not in (OURS_PLAIN, OURS_SPECULATIVE) and (not plain or name.endswith(_PLAIN))
        }
        return max(rates, key=rates.__getitem__, default=None)

    def ratio(self, ours: str, theirs: str | None) -> float | None:
        """Our tokens/s over theirs."""
        if theirs is None:
            return None
        return self.sides[ours].tokens_per_second / self.sides[theirs].tokens_per_second

    def values(self) -> dict[str, object]:
        """By names in JSON."""
        plain, fastest = self.best(plain=True), self.best(plain=False)
        return {
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "fastest_plain_peer": plain,
            "plain_ratio": self.ratio(OURS_PLAIN, plain),
            "fastest_peer": fastest,
            "speculative_ratio": self.ratio(OURS_SPECULATIVE, fastest),
            "first_token_ratio": self._first_token_ratio(),
            "sides": {name: asdict(found) for name, found in self.sides.items()},
        }

    def _first_token_ratio(self) -> float | None:
        """Our time to the first token over the shortest of a peer, plain."""
        times = {name: found.time_to_first_token_ms for name, found in self.sides.items()}
        ours, _ = times.pop(OURS_PLAIN), times.pop(OURS_SPECULATIVE)
        known = [time for time in times.values() if time]
        return ours / min(known) if ours and known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersReport:
    """The result of one `bench peers`."""

    setup: PeersSetup
    settings: Mapping[str, Mapping[str, object]]
    """Of each peer's side: versions, precision, variables and options."""
    missing: Mapping[str, str]
    """Why a peer, or one of its modes, was not measured."""
    levels: tuple[Level, ...]

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(
            {
                **asdict(self.setup),
                "levels": [level.values() for level in self.levels],
                "settings": self.settings,
                "missing": self.missing,
            }
        )


def level_of(decoding: Decoding, concurrency: int, results: Mapping[str, SideResult]) -> Level:
    """The figures of all sides, which decoded the same prompts."""
    exact = decoding.rule is Rule.GREEDY
    ours = results[OURS_PLAIN]

    def figures(found: SideResult) -> Figures:
        times = [each.first_token_s for each in found.completions if each.first_token_s is not None]
        pairs = zip(found.completions, ours.completions, strict=True)
        known = exact and all(each.token_ids for each in (*found.completions, *ours.completions))
        return Figures(
            tokens_per_second=found.tokens_per_second,
            num_tokens=found.num_tokens,
            time_to_first_token_ms=median(times) * 1000 if times and concurrency == 1 else None,
            same_tokens=sum(a.token_ids == b.token_ids for a, b in pairs) if known else None,
        )

    return Level(
        temperature=decoding.temperature,
        concurrency=concurrency,
        sides={name: figures(found) for name, found in results.items()},
    )


def render(report: PeersReport) -> Group:
    """The report for people."""
    setup = report.setup
    table = Table(
        title=f"{setup.model} with {setup.draft_model}, K <= {setup.num_draft_tokens}, "
        f"{setup.dtype}, rule {setup.rule}, {setup.num_prompts} prompts of at most "
        f"{setup.max_tokens} tokens, {setup.threads} threads; tokens/s (ms to the first token)"
    )
    table.add_column("")
    for level in report.levels:
        table.add_column(f"T {level.temperature:g}, {level.concurrency} at a time", justify="right")
    for name in dict.fromkeys(name for level in report.levels for name in level.sides):
        table.add_row(name, *(_cell(level.sides.get(name)) for level in report.levels))
    for name in report.missing:
        table.add_row(name, *("missing" for _ in report.levels))
    table.add_section()
    for title, side, plain in (
        ("plain / fastest plain peer", OURS_PLAIN, True),
        ("speculative / fastest peer", OURS_SPECULATIVE, False),
    ):
        ratios = [level.ratio(side, level.best(plain=plain)) for level in report.levels]
        table.add_row(title, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    return Group(table, *(Text(f"{name}: {why}") for name, why in report.missing.items()))


def _cell(found: Figures | None) -> str:
    if found is None:
        return "-"
    first = found.time_to_first_token_ms
    return f"{found.tokens_per_second:.1f}" + ("" if first is None else f" ({first:.0f})")
