"""`outrider bench acceptance`: how much of what a target writes a draft would have proposed.

The target writes every prompt's completion twice, at temperature 0 and at temperature 1, and the
draft then reads each of them once. No round is played, so the numbers belong to the pair of models
alone: not to K, not to the rule, not to the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outrider.errors import check
from outrider.speculation.text_acceptance import NUM_DEPTHS, acceptance_of_windows

from .figures import to_json
from .prompt_options import PromptOptions, add_prompt_arguments, prompt_values


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceOptions(PromptOptions):
    """What `bench acceptance` is asked for. Wrong values raise `SettingError`."""

    max_tokens: int = 128
    """As in `PromptOptions`, and fewer by default."""

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> AcceptanceOptions:
        """From what a parser with `add_arguments` returned."""
        return cls(**prompt_values(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench acceptance`, but for those that describe the models."""
    add_prompt_arguments(parser, AcceptanceOptions())


@dataclass(frozen=True, slots=True)
class PromptAcceptance:
    """What one prompt showed."""

    category: str
    hits: tuple[bool, ...]
    """Of each token written at temperature 0: whether the draft's likeliest is the same."""
    overlaps: tuple[float, ...]
    """Of each place of the text at temperature 1: sum over v of min(p(v), q(v))."""
    ratios: tuple[tuple[float, ...], ...]
    """Of the tokens x that the target wrote there min(1, q(x) / p(x)): as draft token 1 of a chain
    that begins at the first place, the second, ..; as draft token 2 of it; and so on. One tuple
    where the chain's beginning makes no difference."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Acceptance over some of the prompts."""

    greedy: float
    sampled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceReport:
    """The result of one `bench acceptance`."""

    model: str
    draft_model: str
    num_prompts: int
    max_tokens: int
    greedy: float
    """Share of the tokens at temperature 0 that are the draft's likeliest too."""
    sampled: float
    """Mean over the places at temperature 1 of sum min(p, q): a drawn draft token's chance."""
    by_position: tuple[float | None, ...]
    """At temperature 1, the chance that draft token i is accepted given that those before it were;
    None where no window came so far."""
    num_positions: int
    """Places at temperature 1."""
    num_positions_greedy: int
    by_category: Mapping[str, Rates]

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(asdict(self))


def summarise(
    options: AcceptanceOptions, found: Sequence[PromptAcceptance], *, model: str, draft_model: str
) -> AcceptanceReport:
    """The report on all prompts; places count alike, whichever prompt they are of."""
    check(bool(found), "nothing was measured")
    by_category: dict[str, list[PromptAcceptance]] = {}
    for entry in found:
        by_category.setdefault(entry.category, []).append(entry)
    overall = _rates(found)
    return AcceptanceReport(
        model=model,
        draft_model=draft_model,
        num_prompts=len(found),
        max_tokens=options.max_tokens,
        greedy=overall.greedy,
        sampled=overall.sampled,
        by_position=acceptance_of_windows([_windows(entry.ratios) for entry in found], NUM_DEPTHS),
        num_positions=sum(len(entry.overlaps) for entry in found),
        num_positions_greedy=sum(len(entry.hits) for entry in found),
        by_category={name: _rates(entries) for name, entries in by_category.items()},
    )


def _windows(ratios: Sequence[Sequence[float]]) -> list[npt.NDArray[np.float64]]:
    """As `acceptance_of_windows` takes them."""
    found = [np.asarray(depth, dtype=np.float64) for depth in ratios]
    return found if len(found) > 1 else [found[0][depth:] for depth in range(NUM_DEPTHS)]


def _rates(found: Sequence[PromptAcceptance]) -> Rates:
    hits = [hit for entry in found for hit in entry.hits]
    overlaps = [overlap for entry in found for overlap in entry.overlaps]
    return Rates(sum(hits) / len(hits), sum(overlaps) / len(overlaps))


def render(report: AcceptanceReport) -> Group:
    """The report for people."""
    title = f"{report.draft_model} reads {report.model}: {report.num_positions} places"
    table = Table(title=title)
    table.add_column("prompts")
    table.add_column("greedy", justify="right")
    table.add_column("sampled", justify="right")
    for name, rates in report.by_category.items():
        table.add_row(name, f"{rates.greedy:.3f}", f"{rates.sampled:.3f}")
    table.add_section()
    table.add_row("all", f"{report.greedy:.3f}", f"{report.sampled:.3f}")
    chances = ["-" if chance is None else f"{chance:.3f}" for chance in report.by_position]
    return Group(table, Text("sampled, by place in the proposal: " + " ".join(chances)))
