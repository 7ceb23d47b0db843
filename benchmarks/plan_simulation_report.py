"""What simulated fleets came to: for JSON, and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from outrider.fleet_simulator.figures import FleetFigures
from outrider.fleet_simulator.scenario import Demand

from .plan_simulation import SimulatedFleet, SimulationOptions, counted, in_words
from .simulated_pair import SimulatedPair


def values(fleets: Sequence[SimulatedFleet]) -> list[dict[str, object]]:
    """An object for each, of numbers that JSON knows."""
    return [
        {
            "fleet": None if one.figures is None else asdict(one.scenario.fleet),
            "load": asdict(one.scenario.demand),
            "round_trip_ms": one.scenario.round_trip_s * 1e3,
            "was_found": one.was_found,
            "figures": None if one.figures is None else asdict(one.figures),
        }
        for one in fleets
    ]


def pair_values(pair: SimulatedPair) -> dict[str, object]:
    """What was simulated of a pair."""
    return {"name": pair.name, "drafting": asdict(pair.drafting), "times": asdict(pair.times)}


def tables(
    options: SimulationOptions, pair: SimulatedPair, fleets: Sequence[SimulatedFleet]
) -> Iterator[Table | Text]:
    """For people."""
    drafting = pair.drafting
    how = f"K = {len(drafting.survival)}"
    if drafting.look_ahead:
        how += f", fan-out {drafting.look_ahead}"
    served = [one for one in fleets if one.figures is not None]
    if served:
        yield _served(f"Simulated: {pair.name}; {how}, {options.simulated_seconds:g} s", served)
    if served and options.lose:
        yield _lost(served)
    for one in fleets:
        if one.figures is None:
            yield Text(
                f"No number of replicas keeps {options.tpot_ms:g} ms a token for "
                f"{_load(one.scenario.demand)}.",
                style="bold",
            )
        elif one.was_found:
            yield Text(
                f"For {_load(one.scenario.demand)}: {in_words(one.scenario.fleet)} keep "
                f"{options.tpot_ms:g} ms a token, before any loss.",
                style="bold",
            )


def _load(demand: Demand) -> str:
    if demand.sessions is not None:
        return counted(demand.sessions, "session")
    return f"{demand.rate:g} requests a second"


def _served(title: str, fleets: Sequence[SimulatedFleet]) -> Table:
    """Replicas and their busy shares are targets, drafts, coordinators; times are p50, p99."""
    table = Table(title=title)
    table.add_column("load")
    for heading in (
        "T, D, C", "tokens/s", "ms a token", "ms to the first", "wait for a draft, ms",
        "of all time", "drafts had others", "hits", "busy T, D, C", "sessions a step",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for one in fleets:
        if one.figures is not None:
            fleet = one.scenario.fleet
            size = f"{fleet.targets}, {fleet.drafts}, {fleet.coordinators}"
            table.add_row(_load(one.scenario.demand), size, *_cells(one.figures))
    return table


def _cells(figures: FleetFigures) -> Iterator[str]:
    yield f"{figures.tokens_per_second:.1f}"
    yield f"{_one_decimal(figures.tpot_ms_p50)}, {_one_decimal(figures.tpot_ms_p99)}"
    yield f"{_one_decimal(figures.ttft_ms_p50)}, {_one_decimal(figures.ttft_ms_p99)}"
    yield f"{figures.draft_ms:.1f}"
    for share in (figures.draft_share, figures.rounds_queued, figures.hit_rate):
        yield f"{share:.2f}"
    roles = (figures.targets, figures.drafts, figures.coordinators)
    yield ", ".join(f"{role.busy:.2f}" for role in roles)
    yield f"{figures.targets.sessions_per_step:.1f}"


def _one_decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _lost(fleets: Sequence[SimulatedFleet]) -> Table:
    table = Table(title="What a loss costs")
    table.add_column("fleet")
    table.add_column("lost")
    for heading in (
        "at, s", "back, s", "tokens/s before", "after the pause", "worst second",
        "sessions paused", "ms p50", "longest",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for one in fleets:
        for loss in () if one.figures is None else one.figures.losses:
            table.add_row(
                in_words(one.scenario.fleet), loss.role, f"{loss.at_s:g}",
                "-" if loss.back_s is None else f"{loss.back_s:g}",
                _one_decimal(loss.tokens_per_second_before),
                _one_decimal(loss.tokens_per_second_after),
                str(loss.tokens_in_worst_second), str(loss.num_paused),
                f"{loss.pause_ms_p50:.0f}", f"{loss.pause_ms_max:.0f}",
            )  # fmt: skip
    return table
