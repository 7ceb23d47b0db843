"""What `outrider plan` is asked for. Imports nothing that computes."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from benchmarks.options import Options, PromptOptions, numbers, option, whole_numbers
from outrider.errors import ConfigError, SettingError
from outrider.limits import (
    MAX_TOKENS_DEFAULT,
    REPLICAS_MAX,
    SEED_MAX,
    SESSIONS_PER_COORDINATOR_MAX,
    TEMPERATURE_MAX,
)
from outrider.registry.registry import Role
from outrider.settings import check_range

BUILT_IN_PROMPTS: Final = 12
"""Of the built-in ones, where neither a file nor a number is named."""
TEMPERATURES_MAX: Final = 8
COORDINATOR_S: Final = 0.00029
"""Of a coordinator's one thread for a round, as `outrider bench overhead` measures it."""
SECONDS: Final = 10.0
SESSIONS_MAX: Final = 10_000
RATE_MAX: Final = 10_000.0
PROMPT_TOKENS_MAX: Final = 2**17
ROUND_TRIP_MS_MAX: Final = 10_000.0
RUNS_MAX: Final = 64
"""Loads and fleets that one command looks at."""
LOSSES_MAX: Final = 16
_LOSS: Final = re.compile(r"(\w+)@([\d.]+)(?:-([\d.]+))?")
ROLES: Final[tuple[Role, ...]] = ("target", "draft", "coordinator")
"""In the order in which their numbers are found: those that cost most first."""
MS_MAX: Final = 60_000.0
NUMBERS: Final = {
    "verify_ms": "18.3", "verify_tokens": "16", "draft_ms": "1.3", "draft_branches": "64",
    "acceptance": "0.8", "num_draft_tokens": "6", "look_ahead": "0", "hit_rate": "0",
    "rest_ms": "0",
}  # fmt: skip
"""Keys of `--from-numbers`, and what they are where they are not named: those of `bench emulate
--scenario 70b-1b`."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PromptOptions):
    """What `outrider plan` is asked for. Wrong values raise `SettingError`."""

    max_tokens: int = 96
    temperature: tuple[float, ...] = option(
        (0.0, 1.0), "temperatures to plan for; the first is validated", low=0,
        high=TEMPERATURE_MAX, metavar="T[,T..]", parse=numbers,
    )  # fmt: skip
    round_trip_ms: float = option(
        0.0, "of the link between coordinator and draft, beside what messages take on one machine",
        low=0, high=ROUND_TRIP_MS_MAX, metavar="MS", parse=float,
    )  # fmt: skip
    concurrency: int = option(
        1, "sessions that a target replica decodes at a time", low=1,
        high=SESSIONS_PER_COORDINATOR_MAX,
    )  # fmt: skip
    separate_draft: bool = option(
        False,
        "plan for drafts with a device of their own, also where here they share the target's",
    )
    plot: Path | None = option(
        None, "write the speed-up over K there, as an SVG", metavar="FILE", parse=Path
    )
    validate: bool = option(False, "run the real thing, and print predicted beside measured")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("temperature", len(self.temperature), 1, TEMPERATURES_MAX)
        if len(set(self.temperature)) < len(self.temperature):
            given = ",".join(f"{temperature:g}" for temperature in self.temperature)
            raise SettingError("temperature", f"{given!r} is wrong; one is named twice")
        if self.plot is not None and not self.plot.absolute().parent.is_dir():
            raise SettingError("plot", f"{self.plot} cannot be written: there is no such folder")
        if self.validate:
            self._check_validation()

    def _check_validation(self) -> None:
        """What is measured is one session at a time on this machine."""
        for name, value, allowed in (
            ("concurrency", self.concurrency, 1),
            ("round_trip_ms", self.round_trip_ms, 0),
            ("separate_draft", self.separate_draft, False),
        ):
            if value != allowed:
                raise SettingError(
                    name,
                    f"{value} cannot be validated here; with --validate it must be {allowed}",
                )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, **others: object) -> PlanOptions:
        """From what a parser with `add_arguments` returned; without a file or a number some of the
        built-in prompts."""
        if arguments.num_prompts is None and arguments.prompts is None:
            others["num_prompts"] = BUILT_IN_PROMPTS
        return super().from_arguments(arguments, **others)


@dataclass(frozen=True, slots=True)
class Loss:
    """One replica of a role that goes without a word; another may take its place, with nothing
    held."""

    role: Role
    at_s: float
    """Since measuring began."""
    back_s: float = math.inf


Counts = tuple[int, ...]
"""Numbers of replicas to look at; empty = the smallest that keeps the time per token."""


def _counts(text: str) -> Counts:
    return () if text == "auto" else whole_numbers(text)


_TO_LOOK_AT: Final = "to look at; auto = the fewest that keep --tpot-ms [auto]"


def _losses(text: str) -> tuple[Loss, ...]:
    found = []
    for part in text.split(","):
        match = _LOSS.fullmatch(part.strip())
        try:
            if match is None or match[1] not in ROLES:
                raise ValueError
            back_s = math.inf if match[3] is None else float(match[3])
            found.append(Loss(cast(Role, match[1]), float(match[2]), back_s))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{part!r} is wrong; it must be ROLE@SECONDS or ROLE@SECONDS-SECONDS with one of "
                f"{', '.join(ROLES)}"
            ) from None
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(Options):
    """What `outrider plan --simulate` is asked for. Wrong values raise `SettingError`."""

    from_report: Path | None = option(
        None, "simulate what `outrider plan --json` printed before, and run no model",
        metavar="FILE", parse=Path,
    )  # fmt: skip
    from_numbers: str | None = option(
        None, "simulate a pair of such numbers, and run no model "
        f"[{','.join(f'{key}={value}' for key, value in NUMBERS.items())}]; a time may be a table, "
        "ROWS:MS/ROWS:MS, and the acceptance one by position, A/A/..",
        metavar="KEY=VALUE,..", parse=str,
    )  # fmt: skip
    sessions: tuple[int, ...] = option(
        (), "sessions at a time: where one ends the next begins", low=1, high=SESSIONS_MAX,
        metavar="N[,N..]", parse=whole_numbers,
    )  # fmt: skip
    rate: tuple[float, ...] = option(
        (), "requests a second instead", low=0.001, high=RATE_MAX, metavar="R[,R..]", parse=numbers
    )
    prompt_tokens: int = option(256, "tokens of a prompt", low=1, high=PROMPT_TOKENS_MAX)
    answer_tokens: int = option(256, "tokens of an answer, mean", low=1, high=MAX_TOKENS_DEFAULT)
    targets: Counts = option(
        (),
        f"targets {_TO_LOOK_AT}",
        low=1,
        high=REPLICAS_MAX,
        metavar="N[,N..]|auto",
        parse=_counts,
    )
    drafts: Counts = option(
        (), f"drafts {_TO_LOOK_AT}", low=1, high=REPLICAS_MAX, metavar="N[,N..]|auto", parse=_counts
    )
    coordinators: Counts = option(
        (),
        f"coordinators {_TO_LOOK_AT}",
        low=1,
        high=REPLICAS_MAX,
        metavar="N[,N..]|auto",
        parse=_counts,
    )
    tpot_ms: float | None = option(
        None, "time per token that 99 % of the tokens are to keep", low=0.001, high=MS_MAX,
        metavar="MS", parse=float,
    )  # fmt: skip
    lose: tuple[Loss, ...] = option(
        (), "lose a target, draft or coordinator at that second, silently, and have another one at "
        "a later second", metavar="ROLE@S[-S],..", parse=_losses,
    )  # fmt: skip
    simulated_seconds: float = option(
        SECONDS, "that are measured", low=1, high=3_600, metavar="S", parse=float
    )
    coordinator_ms: float = option(
        1e3 * COORDINATOR_S, "of a coordinator's one thread for a round; see `bench overhead`",
        low=0, high=1_000, metavar="MS", parse=float,
    )  # fmt: skip
    simulation_seed: int = option(0, "of what is left to chance", low=0, high=SEED_MAX)
    round_trip_ms: float = 0.0
    """Of the link between coordinator and draft; 0 = the plan's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("round_trip_ms", self.round_trip_ms, 0, ROUND_TRIP_MS_MAX)
        if self.from_report is not None and self.from_numbers is not None:
            raise SettingError("from_numbers", "and --from-report exclude each other")
        if bool(self.sessions) == bool(self.rate):
            raise ConfigError("--sessions or --rate is needed: say what load, and only one kind")
        self.check_counts("target", "coordinator")
        if len(self.lose) > LOSSES_MAX:
            raise SettingError("lose", f"{len(self.lose)} losses are more than {LOSSES_MAX}")
        for loss in self.lose:
            check_range("lose", loss.at_s, 0, self.simulated_seconds)
            if loss.back_s <= loss.at_s:
                raise SettingError("lose", f"{loss.at_s:g}-{loss.back_s:g}: must be back later")
        runs = math.prod(max(1, len(self.counts(role))) for role in ROLES)
        runs *= len(self.sessions) + len(self.rate)
        if runs > RUNS_MAX:
            raise SettingError("targets", f"and the like make {runs} runs; {RUNS_MAX} are allowed")

    def check_counts(self, *roles: Role) -> None:
        """Raises `ConfigError` where numbers of these roles are to be found, and for no time."""
        if self.tpot_ms is None and not all(self.counts(role) for role in roles):
            raise ConfigError(
                "--tpot-ms is needed to find numbers of replicas; or name --targets, "
                "--coordinators and, where a model drafts, --drafts"
            )

    @property
    def needs_no_models(self) -> bool:
        """Whether the pair is known."""
        return self.from_report is not None or self.from_numbers is not None

    def counts(self, role: Role) -> Counts:
        """Numbers of replicas of a role."""
        return cast(Counts, getattr(self, f"{role}s"))
