"""`outrider plan --simulate`: what is simulated, the smallest fleet, and what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError
from rich.console import RenderableType

from benchmarks.report import table
from outrider.engine.step_costs import StepCosts
from outrider.errors import OutriderError, SettingError
from outrider.limits import (
    ENGINE_SEQUENCES_MAX,
    LOOK_AHEAD_MAX,
    NUM_DRAFT_TOKENS_MAX,
    REPLICAS_MAX,
)
from outrider.registry.registry import Role

from .round_times import Line, ServiceTimes
from .simulation import ROLES, Demand, FleetFigures, FleetSize, Pair, Scenario, simulate

REPORT_BYTES_MAX: Final = 2**24
MS_MAX: Final = 60_000.0
TABLE_ROWS_MAX: Final = 2**20
STAIRS_MAX: Final = 4_096
"""Rows of a table that grows for each begun so many; beyond, it goes on as a line."""
SEARCH_S: Final = (2.0, 10.0)
"""What is measured of each simulation while the fleet is looked for, at least and at most ..."""
SEARCH_ROUNDS: Final = 2_000
"""... so that there are about so many rounds; and half of that comes before it."""
TOLERANCE: Final = 0.02
"""Share of a number by which it may be larger than the smallest."""
GENEROUS: Final = 4
"""How many times as many of a role as it needs at least there are while another one is looked
for."""
HOPELESS: Final = 16
"""More of a role than so many times what it needs at least brings nothing more."""


def of_report(report: Mapping[str, Any], source: str) -> Pair:
    """From what `outrider plan --json` says, by its first temperature's choice. Raises
    `SettingError` where that is not what `source` has."""
    try:
        plan = next(iter(report["temperatures"].values()))
        chosen, costs = plan["chosen"], (report["target_costs"], report["draft_costs"])
        found = plan["times"] | dict(zip(("target", "draft"), costs, strict=True))
        k = chosen["num_draft_tokens"]
        chances = plan["acceptance"]["all"]["by_position"][chosen["rule"]][:k] if k else ()
        return Pair(
            name=f"{report['draft_model']} for {report['model']}",
            survival=tuple(accumulate((chance or 0.0 for chance in chances), mul)),
            num_proposed=float(chosen["proposed_per_round"]),
            num_steps=float(chosen["steps_per_round"]),
            look_ahead=int(chosen["look_ahead"]),
            hit_rate=float(chosen["hit_rate"] or 0.0),
            times=TypeAdapter(ServiceTimes).validate_python(found),
            round_trip_ms=float(report["round_trip_ms"]),
        )
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError, OutriderError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise SettingError(
            "from_report",
            f"{source} is not what this version's `outrider plan --json` prints: {why}",
        ) from error


def read_report(path: Path) -> Pair:
    """From a file. Raises `SettingError`."""
    try:
        with path.open("rb") as file:
            text = file.read(REPORT_BYTES_MAX + 1)
        if len(text) > REPORT_BYTES_MAX:
            raise SettingError("from_report", f"{path} is larger than {REPORT_BYTES_MAX} bytes")
        report = json.loads(text)
    except OSError as error:
        raise SettingError("from_report", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SettingError("from_report", f"{path} is not JSON: {error}") from error
    return of_report(report, str(path))


Points = tuple[tuple[int, float], ...]
"""Rows and ms of a step; 0 rows and a time for each begun so many of them."""


def _points(value: Any) -> Any:
    if ":" not in value:
        return ((0, value),)
    return tuple(tuple(part.split(":", 1)) for part in value.split("/"))


_Rows = Annotated[int, Field(ge=0, le=TABLE_ROWS_MAX)]
_Ms = Annotated[float, Field(ge=0, le=MS_MAX)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Table = Annotated[tuple[tuple[_Rows, _Ms], ...], BeforeValidator(_points)]


class _Numbers(BaseModel, extra="forbid", validate_default=True):
    """What `--from-numbers` says, by default as `bench emulate --scenario 70b-1b`."""

    verify_ms: _Table = "18.3"  # type: ignore[assignment]
    verify_tokens: int = Field(16, ge=1, le=TABLE_ROWS_MAX)
    draft_ms: _Table = "1.3"  # type: ignore[assignment]
    draft_branches: int = Field(64, ge=1, le=TABLE_ROWS_MAX)
    acceptance: Annotated[
        tuple[_Share, ...], BeforeValidator(lambda text: text.split("/"))
    ] = "0.8"  # type: ignore[assignment]  # fmt: skip
    num_draft_tokens: int = Field(6, ge=0, le=NUM_DRAFT_TOKENS_MAX)
    look_ahead: int = Field(0, ge=0, le=LOOK_AHEAD_MAX)
    hit_rate: _Share = 0.0
    rest_ms: _Ms = 0.0


def of_numbers(
    text: str,
    max_num_seqs: int = ENGINE_SEQUENCES_MAX,
    draft_max_num_seqs: int = ENGINE_SEQUENCES_MAX,
) -> Pair:
    """From `key=value,...` (`_Numbers`). So many sessions share a step of a target, or a
    draft. Raises `SettingError` naming what is wrong."""
    given: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _Numbers.model_fields:
            raise _wrong(f"unknown key {key!r}; known: {', '.join(_Numbers.model_fields)}")
        if key in given:
            raise _wrong(f"{key} is given twice")
        given[key] = value
    try:
        found = _Numbers.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise _wrong(f"{key}={first['input']!r} is wrong: {first['msg']}") from None
    k = found.num_draft_tokens
    if found.look_ahead > 0 and k == 0:
        raise _wrong(
            f"look_ahead {found.look_ahead} is wrong; with num_draft_tokens 0 it must be 0"
        )
    verify = _table("verify_ms", given, found.verify_ms, found.verify_tokens)
    # The last chance is that of all further positions.
    chances = (found.acceptance + found.acceptance[-1:] * k)[:k]
    times = ServiceTimes(
        target=verify,
        verify=verify,
        draft=_table("draft_ms", given, found.draft_ms, found.draft_branches),
        plain=Line(found.rest_ms / 1e3),
        rest_s=found.rest_ms / 1e3,
        max_num_seqs=draft_max_num_seqs,
    )
    return Pair(
        name=text or "70b-1b",
        survival=tuple(accumulate(chances, mul)),
        num_proposed=k,
        num_steps=k,
        look_ahead=found.look_ahead,
        hit_rate=found.hit_rate if found.look_ahead else 0.0,
        times=times,
        target_max_num_seqs=max_num_seqs,
    )


def _table(key: str, given: Mapping[str, str], points: Points, each: int) -> StepCosts:
    """A step's time: with lines between points, or growing for each begun so many rows."""
    rows = [row for row, _ in points]
    if rows == [0]:
        seconds = points[0][1] / 1e3
        begun = range(1, STAIRS_MAX // each + 2)
        ends = sorted({row for number in begun for row in ((number - 1) * each + 1, number * each)})
        rows = [*ends, ends[-1] + each]
        return StepCosts(tuple(rows), tuple(math.ceil(row / each) * seconds for row in rows))
    if rows[0] < 1 or sorted(set(rows)) != rows:
        raise _wrong(f"{key}={given[key]!r} is wrong; its rows must be whole numbers from 1 that "
                     "ascend")  # fmt: skip
    return StepCosts(tuple(rows), tuple(ms / 1e3 for _, ms in points))


def _wrong(reason: str) -> SettingError:
    return SettingError("from_numbers", reason)


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """One load on one fleet."""

    scenario: Scenario
    was_found: bool
    """Whether a number of its replicas is the smallest that keeps the time per token."""
    figures: FleetFigures | None
    """None where no fleet keeps it."""

    def values(self) -> dict[str, object]:
        """For JSON."""
        scenario, figures = self.scenario, self.figures
        return {
            "fleet": None if figures is None else asdict(scenario.fleet),
            "load": asdict(scenario.demand),
            "round_trip_ms": scenario.pair.round_trip_ms,
            "was_found": self.was_found,
            "figures": None if figures is None else asdict(figures),
        }


def simulated(
    scenario: Scenario,
    free: Collection[Role],
    tpot_ms: float | None,
    progress: Callable[[str], None],
) -> SimulatedFleet:
    """A scenario, whose numbers of the `free` roles are the smallest that keep a time per token."""
    if free and tpot_ms is not None:
        fleet = smallest(scenario, tpot_ms, free, progress)
        if fleet is None:
            return SimulatedFleet(scenario, True, None)
        scenario = replace(scenario, fleet=fleet)
    progress(f"simulating {in_words(scenario.fleet)}")
    return SimulatedFleet(scenario, bool(free), simulate(scenario))


def keeps(figures: FleetFigures, tpot_ms: float) -> bool:
    """Whether 99 % of the tokens are of requests that take no longer for one, and none is
    refused."""
    p99 = figures.tpot_ms_p99
    return p99 is not None and p99 <= tpot_ms and figures.num_refused == 0


def smallest(
    scenario: Scenario,
    tpot_ms: float,
    free: Collection[Role],
    progress: Callable[[str], None] = lambda line: None,
) -> FleetSize | None:
    """The fleet with the fewest targets, then drafts, then coordinators (within `TOLERANCE`), that
    keeps a time per token, before any loss; the numbers of roles that are not `free` are the
    scenario's. None where none does: a single session takes longer, or another role is too small.
    Each role has plenty of those that come later."""
    demand, pair = scenario.demand, scenario.pair
    tokens = (demand.rate or 0.0) * demand.answer_tokens
    if demand.sessions is not None:
        tokens = demand.sessions / (tpot_ms / 1e3)
    rounds = tokens / (1.0 + sum(pair.survival))
    seconds = min(scenario.seconds, max(SEARCH_S[0], min(SEARCH_S[1], SEARCH_ROUNDS / rounds)))
    scenario = replace(
        scenario, losses=(), seconds=seconds, warm_up_s=min(scenario.warm_up_s, seconds / 2)
    )
    one = FleetSize(targets=1, drafts=int(pair.has_drafts))
    endless = replace(demand, sessions=1, rate=None, answer_tokens=math.inf)
    if not keeps(simulate(replace(scenario, fleet=one, demand=endless)), tpot_ms):
        return None
    known: dict[FleetSize, bool] = {}

    def is_kept(fleet: FleetSize) -> bool:
        if fleet not in known:
            figures = simulate(replace(scenario, fleet=fleet))
            took = _one_decimal(figures.tpot_ms_p99)
            progress(f"{in_words(fleet)}: {took} ms a token for 99 % of them")
            known[fleet] = keeps(figures, tpot_ms)
        return known[fleet]

    needs = {role: rounds * _busy_s(scenario, role) for role in ROLES if role in free}
    fleet = scenario.fleet
    for role, need in needs.items():
        fleet = _with(fleet, role, _whole_number(GENEROUS * need))
    for role, need in needs.items():
        most = fleet.of(role) if known.get(fleet) else _whole_number(HOPELESS * need)

        def enough(number: int, fleet: FleetSize = fleet, role: Role = role) -> bool:
            return is_kept(_with(fleet, role, number))

        number = _fewest(enough, _whole_number(need), most)
        if number is None:
            return None
        fleet = _with(fleet, role, number)
    return fleet


def _busy_s(scenario: Scenario, role: Role) -> float:
    """How long a round keeps one replica of a role busy, in full steps."""
    pair, seats = scenario.pair, scenario.pair.times.max_num_seqs
    if role == "coordinator":
        return scenario.coordinator_s
    if role == "draft":
        return pair.k * pair.costs("draft").step_seconds(seats, seats) / seats
    rows = round(1 + pair.num_proposed)
    tokens_max = scenario.config.target.max_num_batched_tokens
    seats = max(1, min(pair.target_seats, tokens_max // rows))
    return pair.costs("target").step_seconds(rows * seats, seats) / seats


def _whole_number(replicas: float) -> int:
    return min(REPLICAS_MAX, max(1, math.ceil(replicas)))


def _fewest(is_kept: Callable[[int], bool], least: int, most: int) -> int | None:
    """From `least` on up, or down, and then by halving what lies between; None where not even
    `most` are enough."""
    low, high = 0, min(least, most)
    while not is_kept(high):
        if high == most:
            return None
        low, high = high, min(most, math.ceil(high * 1.5))
    while high - low > max(1.0, TOLERANCE * high):
        # What was reckoned is nearly the least: below it most of the way is not worth a look.
        middle = (low + high) // 2 if low else max(1, math.floor(high * 0.9))
        low, high = (low, middle) if is_kept(middle) else (middle, high)
    return high


def _with(fleet: FleetSize, role: Role, number: int) -> FleetSize:
    return replace(fleet, **{f"{role}s": number})


def in_words(fleet: FleetSize) -> str:
    """A fleet's size."""
    return ", ".join(_counted(fleet.of(role), role) for role in ROLES)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def tables(fleets: Sequence[SimulatedFleet], tpot_ms: float | None) -> Iterator[RenderableType]:
    """For people. Replicas and their busy shares are targets, drafts, coordinators; times are p50,
    p99."""
    pair, seconds = fleets[0].scenario.pair, fleets[0].scenario.seconds
    ahead = f", fan-out {pair.look_ahead}" if pair.look_ahead else ""
    served = [(one.scenario, one.figures) for one in fleets if one.figures is not None]
    if served:
        yield table(
            f"Simulated: {pair.name}; K = {pair.k}{ahead}, {seconds:g} s",
            ("load", "T, D, C", "tokens/s", "ms a token", "ms to the first",
             "wait for a draft, ms", "of all time", "hits", "busy T, D, C", "sessions a step"),
            [tuple(_cells(*one)) for one in served],
        )  # fmt: skip
    if served and fleets[0].scenario.losses:
        yield table(
            "What a loss costs",
            ("fleet", "lost", "at, s", "back, s", "tokens/s before", "after the pause",
             "worst second", "sessions paused", "ms p50", "longest"),
            [
                (
                    in_words(scenario.fleet), loss.role, f"{loss.at_s:g}",
                    "-" if loss.back_s is None else f"{loss.back_s:g}",
                    _one_decimal(loss.tokens_per_second_before),
                    _one_decimal(loss.tokens_per_second_after),
                    str(loss.tokens_in_worst_second), str(loss.num_paused),
                    f"{loss.pause_ms_p50:.0f}", f"{loss.pause_ms_max:.0f}",
                )
                for scenario, figures in served
                for loss in figures.losses
            ],
        )  # fmt: skip
    for one in fleets:
        load, fleet = _load(one.scenario.demand), in_words(one.scenario.fleet)
        if one.figures is None:
            yield f"No number of replicas keeps {tpot_ms:g} ms a token for {load}."
        elif one.was_found:
            yield f"For {load}: {fleet} keep {tpot_ms:g} ms a token, before any loss."


def _cells(scenario: Scenario, figures: FleetFigures) -> Iterator[str]:
    roles = (figures.targets, figures.drafts, figures.coordinators)
    yield _load(scenario.demand)
    yield ", ".join(str(scenario.fleet.of(role)) for role in ROLES)
    yield f"{figures.tokens_per_second:.1f}"
    yield f"{_one_decimal(figures.tpot_ms_p50)}, {_one_decimal(figures.tpot_ms_p99)}"
    yield f"{_one_decimal(figures.ttft_ms_p50)}, {_one_decimal(figures.ttft_ms_p99)}"
    yield f"{figures.draft_ms:.1f}"
    yield f"{figures.draft_share:.2f}"
    yield f"{figures.hit_rate:.2f}"
    yield ", ".join(f"{role.busy:.2f}" for role in roles)
    yield f"{figures.targets.sessions_per_step:.1f}"


def _load(demand: Demand) -> str:
    if demand.sessions is not None:
        return _counted(demand.sessions, "session")
    return f"{demand.rate:g} requests a second"


def _one_decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
