"""`outrider plan --simulate`: fleets of stated sizes, or the smallest one, under a stated load."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, cast

from outrider.config import DeploymentConfig
from outrider.errors import ConfigError, SettingError
from outrider.fleet_simulator import sizing
from outrider.fleet_simulator.figures import FleetFigures
from outrider.fleet_simulator.scenario import (
    COORDINATOR_S,
    SECONDS,
    Demand,
    FleetSize,
    Loss,
    Scenario,
)
from outrider.fleet_simulator.simulation import simulate
from outrider.limits import MAX_TOKENS_DEFAULT, REPLICAS_MAX, SEED_MAX, SILENT_DRAFT_S
from outrider.registry.registry import ROLES, Role
from outrider.settings import check_range

from .number_options import numbers, whole_numbers
from .simulated_pair import NUMBERS, SimulatedPair

AUTO: Final = "auto"
SESSIONS_MAX: Final = 100_000
RATE_MAX: Final = 100_000.0
PROMPT_TOKENS_MAX: Final = 2**20
TPOT_MS_MAX: Final = 60_000.0
SIMULATED_SECONDS_MAX: Final = 3_600.0
COORDINATOR_MS_MAX: Final = 1_000.0
ROUND_TRIP_MS_MAX: Final = 10_000.0
RUNS_MAX: Final = 64
"""Loads and fleets that one command looks at."""
LOSSES_MAX: Final = 16
OWN: Final = (
    "sessions", "rate", "prompt_tokens", "answer_tokens", "targets", "drafts", "coordinators",
    "tpot_ms", "lose", "simulated_seconds", "coordinator_ms", "simulation_seed", "from_report",
    "from_numbers",
)  # fmt: skip
"""Options that say nothing without `--simulate`."""
_LOSS: Final = re.compile(r"(\w+)@([\d.]+)(?:-([\d.]+))?")

Counts = tuple[int, ...]
"""Numbers of replicas to look at; empty = the smallest that keeps the time per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What `outrider plan --simulate` is asked for. Wrong values raise `SettingError`."""

    sessions: tuple[int, ...] = ()
    """At a time; empty where a rate is given."""
    rate: tuple[float, ...] = ()
    """Requests a second."""
    prompt_tokens: int = 256
    answer_tokens: int = 256
    """Mean."""
    targets: Counts = ()
    drafts: Counts = ()
    coordinators: Counts = ()
    tpot_ms: float | None = None
    """What 99 % of the tokens are to keep where numbers of replicas are found."""
    lose: tuple[Loss, ...] = ()
    simulated_seconds: float = SECONDS
    coordinator_ms: float = 1e3 * COORDINATOR_S
    round_trip_ms: float = 0.0
    """Of the link between coordinator and draft; 0 = the plan's own."""
    simulation_seed: int = 0
    from_report: Path | None = None
    from_numbers: str | None = None
    """Where the pair's times and acceptance come from, if not from a plan that is made now."""

    def __post_init__(self) -> None:
        if self.from_report is not None and self.from_numbers is not None:
            raise SettingError("from_numbers", "and --from-report exclude each other")
        if bool(self.sessions) == bool(self.rate):
            raise ConfigError("--sessions or --rate is needed: say what load, and only one kind")
        for sessions in self.sessions:
            check_range("sessions", sessions, 1, SESSIONS_MAX)
        for rate in self.rate:
            check_range("rate", rate, 0.001, RATE_MAX)
        check_range("prompt_tokens", self.prompt_tokens, 1, PROMPT_TOKENS_MAX)
        check_range("answer_tokens", self.answer_tokens, 1, MAX_TOKENS_DEFAULT)
        check_range("tpot_ms", self.tpot_ms, 0.001, TPOT_MS_MAX)
        check_range("simulated_seconds", self.simulated_seconds, 1, SIMULATED_SECONDS_MAX)
        check_range("coordinator_ms", self.coordinator_ms, 0, COORDINATOR_MS_MAX)
        check_range("round_trip_ms", self.round_trip_ms, 0, ROUND_TRIP_MS_MAX)
        check_range("simulation_seed", self.simulation_seed, 0, SEED_MAX)
        for role in ROLES:
            for number in self.counts(role):
                check_range(f"{role}s", number, 1, REPLICAS_MAX)
        if self.tpot_ms is None and not all(self.counts(role) for role in ROLES):
            raise ConfigError(
                "--tpot-ms is needed to find numbers of replicas; or name --targets, --drafts and "
                "--coordinators"
            )
        self._check_losses()
        runs = math.prod(max(1, len(self.counts(role))) for role in ROLES)
        runs *= len(self.sessions) + len(self.rate)
        if runs > RUNS_MAX:
            raise SettingError("targets", f"and the like make {runs} runs; {RUNS_MAX} are allowed")

    def _check_losses(self) -> None:
        if len(self.lose) > LOSSES_MAX:
            raise SettingError("lose", f"{len(self.lose)} losses are more than {LOSSES_MAX}")
        for loss in self.lose:
            check_range("lose", loss.at_s, 0, self.simulated_seconds)
            if loss.back_s <= loss.at_s:
                raise SettingError("lose", f"{loss.at_s:g}-{loss.back_s:g}: must be back later")

    def counts(self, role: Role) -> Counts:
        """Numbers of replicas of a role."""
        return cast(Counts, getattr(self, f"{role}s"))

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> SimulationOptions:
        """From what a parser with `add_arguments` returned."""
        values: dict[str, Any] = {
            name: getattr(arguments, name) for name in (*OWN, "round_trip_ms")
        }
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """One load on one fleet."""

    scenario: Scenario
    was_found: bool
    """Whether a number of its replicas is the smallest that keeps the time per token."""
    figures: FleetFigures | None
    """None where no fleet keeps it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a simulation."""
    group = parser.add_argument_group(
        "a simulated fleet",
        "with --simulate the plan is tried on fleets of any size, on a virtual clock",
    )
    default = SimulationOptions(sessions=(1,), tpot_ms=1.0)
    group.add_argument("--simulate", action="store_true", help="simulate a fleet, too")
    group.add_argument(
        "--from-report", type=Path, metavar="FILE",
        help="simulate what `outrider plan --json` printed before, and run no model",
    )  # fmt: skip
    stated = ",".join(f"{key}={value}" for key, value in NUMBERS.items())
    group.add_argument(
        "--from-numbers", metavar="KEY=VALUE,..",
        help=f"simulate a pair of such numbers, and run no model [{stated}]; a time may be a "
        "table, ROWS:MS/ROWS:MS, and the acceptance one by position, A/A/..",
    )  # fmt: skip
    group.add_argument(
        "--sessions", type=whole_numbers, default=(), metavar="N[,N..]",
        help="sessions at a time: where one ends the next begins",
    )  # fmt: skip
    group.add_argument(
        "--rate", type=numbers, default=(), metavar="R[,R..]", help="requests a second instead"
    )
    for flag, value, words in (
        ("--prompt-tokens", default.prompt_tokens, "of a prompt"),
        ("--answer-tokens", default.answer_tokens, "of an answer, mean"),
    ):
        group.add_argument(
            flag, type=int, default=value, metavar="N", help=f"tokens {words} [%(default)s]"
        )
    for role in ROLES:
        group.add_argument(
            f"--{role}s", type=_counts, default=(), metavar="N[,N..]|auto",
            help=f"{role}s to look at; auto = the fewest that keep --tpot-ms [auto]",
        )  # fmt: skip
    group.add_argument(
        "--tpot-ms", type=float, metavar="MS",
        help="time per token that 99 %% of the tokens are to keep",
    )  # fmt: skip
    group.add_argument(
        "--lose", type=_losses, default=(), metavar="ROLE@S[-S],..",
        help="lose a target, draft or coordinator at that second, and have it back at another",
    )  # fmt: skip
    group.add_argument(
        "--simulated-seconds", type=float, default=default.simulated_seconds, metavar="S",
        help="that are measured [%(default)g]",
    )  # fmt: skip
    group.add_argument(
        "--coordinator-ms", type=float, default=default.coordinator_ms, metavar="MS",
        help="of a coordinator's one thread for a round; see `bench capacity` [%(default)g]",
    )  # fmt: skip
    group.add_argument(
        "--simulation-seed", type=int, default=default.simulation_seed, metavar="N",
        help="of what is left to chance [%(default)s]",
    )  # fmt: skip


def _counts(text: str) -> Counts:
    return () if text == AUTO else whole_numbers(text)


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


def run(
    options: SimulationOptions,
    pair: SimulatedPair,
    config: DeploymentConfig,
    progress: Callable[[str], None],
) -> tuple[SimulatedFleet, ...]:
    """Every load on every fleet. What replicas take at a time is the deployment's."""
    if pair.drafting.is_plain and any(loss.role == "draft" for loss in options.lose):
        raise SettingError("lose", "draft is wrong; decoding is plain, and has none")
    return tuple(
        _simulated(options, scenario, progress) for scenario in _scenarios(options, pair, config)
    )


def _scenarios(
    options: SimulationOptions, pair: SimulatedPair, config: DeploymentConfig
) -> Iterator[Scenario]:
    prompt, answer = options.prompt_tokens, float(options.answer_tokens)
    demands = [
        *(Demand(sessions=n, prompt_tokens=prompt, answer_tokens=answer) for n in options.sessions),
        *(Demand(rate=rate, prompt_tokens=prompt, answer_tokens=answer) for rate in options.rate),
    ]
    counts = [options.counts(role) or (1,) for role in sizing.ROLES]
    sizes = [
        FleetSize(targets=targets, drafts=drafts, coordinators=coordinators)
        for targets, drafts, coordinators in product(*counts)
    ]
    for demand, size in product(demands, sizes):
        yield Scenario(
            fleet=size,
            demand=demand,
            drafting=pair.drafting,
            times=pair.times,
            target_max_num_seqs=pair.target_max_num_seqs,
            round_trip_s=(options.round_trip_ms or pair.round_trip_ms) / 1e3,
            coordinator_s=options.coordinator_ms / 1e3,
            max_num_batched_tokens=config.target.max_num_batched_tokens,
            draft_timeout_s=config.coordinator.draft_timeout_ms / 1e3 + SILENT_DRAFT_S,
            sessions_max=config.coordinator.max_sessions,
            losses=options.lose,
            seconds=options.simulated_seconds,
            seed=options.simulation_seed,
        )


def _simulated(
    options: SimulationOptions, scenario: Scenario, progress: Callable[[str], None]
) -> SimulatedFleet:
    free: Sequence[Role] = [role for role in ROLES if not options.counts(role)]
    if free and options.tpot_ms is not None:

        def tried(fleet: FleetSize, figures: FleetFigures) -> None:
            took = "-" if figures.tpot_ms_p99 is None else f"{figures.tpot_ms_p99:.1f}"
            progress(f"{in_words(fleet)}: {took} ms a token for 99 % of them")

        found = sizing.smallest(scenario, options.tpot_ms, free, tried)
        if found is None:
            return SimulatedFleet(scenario, True, None)
        scenario = replace(scenario, fleet=found)
    progress(f"simulating {in_words(scenario.fleet)}")
    return SimulatedFleet(scenario, bool(free), simulate(scenario))


def in_words(fleet: FleetSize) -> str:
    """A fleet's size."""
    return ", ".join(counted(fleet.of(role), role) for role in sizing.ROLES)


def counted(number: int, what: str) -> str:
    """So many of them."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
