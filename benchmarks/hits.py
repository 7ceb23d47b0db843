"""`outrider bench hits`: how often a draft guesses what a round will come to.

The draft proposes, the target verifies, and what came of it is looked up among what was guessed
before: by rule and temperature, in the order of log q + g and in that of q, for some guesses of
each correction and for some outcomes of a whole round. Nothing is timed, so the rates belong to the
pair of models, to K and to the rule, and not to the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.table import Table

from outrider.errors import check
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.settings import check_range
from outrider.speculation.sampling_params import Rule

from .figures import to_json
from .prompt_options import PromptOptions, add_prompt_arguments, prompt_values

FAN_OUTS: Final = (1, 2, 3, 5)
"""Guesses of each correction."""
OUTCOMES: Final = (4, 8, 12, 16, 24)
"""Of a whole round, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode."""

    rule: Rule
    temperature: float


WAYS: Final = (
    Way(Rule.GREEDY, 0.0),
    *(
        Way(rule, temperature)
        for temperature in (0.7, 1.0)
        for rule in (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitOptions(PromptOptions):
    """What `bench hits` is asked for. Wrong values raise `SettingError`."""

    max_tokens: int = 64
    """As in `PromptOptions`, and fewer by default."""
    num_draft_tokens: int = 4
    """K."""

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        check_range("num_draft_tokens", self.num_draft_tokens, 1, NUM_DRAFT_TOKENS_MAX)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> HitOptions:
        """From what a parser with `add_arguments` returned."""
        return cls(**prompt_values(arguments), num_draft_tokens=arguments.num_draft_tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench hits`, but for those that describe the models."""
    defaults = HitOptions()
    add_prompt_arguments(parser, defaults)
    parser.add_argument(
        "--num-draft-tokens", type=int, default=defaults.num_draft_tokens, metavar="K",
        help="draft tokens a round [%(default)s]",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GuessedRound:
    """A round, and where what came of it stood among the guesses; None = nowhere."""

    num_drafted: int
    num_accepted: int
    by_noise: int | None
    """The correction's place in the order of log q + g, from 0 ..."""
    by_q: int | None
    """... and of q."""
    planned: int | None
    """The whole outcome's place among those that a draft would work out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayFigures:
    """What the rounds of one way to decode came to."""

    rule: str
    temperature: float
    num_rounds: int
    tokens_per_round: float
    by_noise: Mapping[int, float]
    """Guesses of each correction -> the share of rounds whose correction was among them, in the
    order of log q + g ..."""
    by_q: Mapping[int, float]
    """... and of q."""
    planned: Mapping[int, float]
    """Outcomes of a round -> the share of rounds whose outcome was among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HitReport:
    """The result of one `bench hits`."""

    model: str
    draft_model: str
    num_prompts: int
    max_tokens: int
    num_draft_tokens: int
    ways: Sequence[WayFigures]

    def to_json(self) -> str:
        """One JSON object on one line."""
        return to_json(asdict(self))


def way_figures(way: Way, rounds: Sequence[GuessedRound]) -> WayFigures:
    """Those of its rounds."""
    check(bool(rounds), "nothing was decoded")

    def shares(places: Sequence[int | None], counts: Sequence[int]) -> dict[int, float]:
        return {
            count: sum(place is not None and place < count for place in places) / len(places)
            for count in counts
        }

    return WayFigures(
        rule=way.rule.value,
        temperature=way.temperature,
        num_rounds=len(rounds),
        tokens_per_round=sum(entry.num_accepted + 1 for entry in rounds) / len(rounds),
        by_noise=shares([entry.by_noise for entry in rounds], FAN_OUTS),
        by_q=shares([entry.by_q for entry in rounds], FAN_OUTS),
        planned=shares([entry.planned for entry in rounds], OUTCOMES),
    )


def render(report: HitReport) -> Table:
    """The report for people."""
    table = Table(
        title=f"{report.draft_model} guesses {report.model}, K = {report.num_draft_tokens}"
    )
    for name in ("rule", "temperature", "rounds", "tokens a round"):
        table.add_column(name)
    for name, counts in (("log q + g", FAN_OUTS), ("q", FAN_OUTS), ("outcomes", OUTCOMES)):
        table.add_column(f"{name}: {', '.join(map(str, counts))}", justify="right")
    for way in report.ways:
        table.add_row(
            way.rule,
            f"{way.temperature:g}",
            str(way.num_rounds),
            f"{way.tokens_per_round:.2f}",
            *(
                " ".join(f"{share:.2f}" for share in shares.values())
                for shares in (way.by_noise, way.by_q, way.planned)
            ),
        )
    return table
