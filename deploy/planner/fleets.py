"""`outrider plan --simulate`: fleets of stated sizes, or the smallest one, under a stated load.

pair      times and acceptance of a target and a draft: of a plan, of a report, or as numbers
options   load, fleets and losses, as flags
sizing    the smallest fleet that keeps a time per token
tables    what came of it
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from outrider.config import DeploymentConfig
from outrider.engine.step_costs import StepCosts
from outrider.errors import OutriderError, SettingError
from outrider.limits import (
    ENGINE_SEQUENCES_MAX,
    LOOK_AHEAD_MAX,
    NUM_DRAFT_TOKENS_MAX,
    REPLICAS_MAX,
)
from outrider.registry.registry import Role

from .options import MS_MAX, NUMBERS, ROLES, SimulationOptions
from .round_times import Line, ServiceTimes
from .simulation import (
    Demand,
    Drafting,
    FleetFigures,
    FleetSize,
    Scenario,
    simulate,
)

REPORT_BYTES_MAX: Final = 2**24
TABLE_ROWS_MAX: Final = 2**20
STAIRS_MAX: Final = 4_096
"""Steps of a table that grows for each begun so many rows; beyond, it goes on as a line."""
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


@dataclass(frozen=True, slots=True)
class SimulatedPair:
    """A target and a draft as a simulation needs them."""

    name: str
    drafting: Drafting
    times: ServiceTimes
    round_trip_ms: float = 0.0
    """Of the link that the plan was made for."""
    target_max_num_seqs: int | None = None
    """Sessions that share a step of a target; None = as many as of a draft, by `times`."""

    @property
    def has_drafts(self) -> bool:
        """Whether it needs draft replicas."""
        return not self.drafting.is_plain and self.times.draft is not None

    def values(self) -> dict[str, object]:
        """What is simulated of it, for JSON."""
        return {"name": self.name, "drafting": asdict(self.drafting), "times": asdict(self.times)}


def of_report(report: Mapping[str, Any], source: str) -> SimulatedPair:
    """From what `outrider plan --json` says, by its first temperature's choice. Raises
    `SettingError` where that is not what `source` has."""
    try:
        plan = next(iter(report["temperatures"].values()))
        chosen, found = plan["chosen"], plan["times"]
        times = ServiceTimes(
            target=_costs(report["target_costs"]),
            verify=_costs(found["verify"]),
            draft=None if report["draft_costs"] is None else _costs(report["draft_costs"]),
            plain=Line(**found["plain"]),
            wait=Line(**found["wait"]),
            rest_s=float(found["rest_s"]),
            first=Line(**found["first"]),
            max_num_seqs=int(found["max_num_seqs"]),
        )
        k = int(chosen["num_draft_tokens"])
        chances = plan["acceptance"]["all"]["by_position"][chosen["rule"]][:k] if k else ()
        drafting = Drafting(
            survival=tuple(accumulate((chance or 0.0 for chance in chances), mul)),
            num_proposed=float(chosen["proposed_per_round"]),
            num_steps=float(chosen["steps_per_round"]),
            look_ahead=int(chosen["look_ahead"]),
            hit_rate=float(chosen["hit_rate"] or 0.0),
        )
        name = f"{report['draft_model']} for {report['model']}"
        return SimulatedPair(name, drafting, times, float(report["round_trip_ms"]))
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError, OutriderError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise SettingError(
            "from_report",
            f"{source} is not what this version's `outrider plan --json` prints: {why}",
        ) from error


def read_report(path: Path) -> SimulatedPair:
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


def of_numbers(
    text: str,
    max_num_seqs: int = ENGINE_SEQUENCES_MAX,
    draft_max_num_seqs: int = ENGINE_SEQUENCES_MAX,
) -> SimulatedPair:
    """From `key=value,...` (`NUMBERS`). So many sessions share a step of a target, or a draft.
    Raises `SettingError` naming what is wrong."""
    values = dict(NUMBERS)
    given: set[str] = set()
    for item in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in NUMBERS:
            _refuse(f"unknown key {key!r}; known: {', '.join(NUMBERS)}")
        if key in given:
            _refuse(f"{key} is given twice")
        given.add(key)
        values[key] = value
    num = _whole("num_draft_tokens", values, 0, NUM_DRAFT_TOKENS_MAX)
    look_ahead = _whole("look_ahead", values, 0, LOOK_AHEAD_MAX)
    if look_ahead > 0 and num == 0:
        _refuse(f"look_ahead {look_ahead} is wrong; with num_draft_tokens 0 it must be 0")
    verify = _table("verify_ms", "verify_tokens", values)
    rest_s = _number("rest_ms", values["rest_ms"], MS_MAX) / 1e3
    times = ServiceTimes(
        target=verify,
        verify=verify,
        draft=_table("draft_ms", "draft_branches", values),
        plain=Line(rest_s),
        rest_s=rest_s,
        max_num_seqs=draft_max_num_seqs,
    )
    # The last chance is that of all further positions.
    chances = [_number("acceptance", part, 1.0) for part in values["acceptance"].split("/")]
    by_position = [chances[min(depth, len(chances) - 1)] for depth in range(num)]
    drafting = Drafting(
        survival=tuple(accumulate(by_position, mul)),
        num_proposed=num,
        num_steps=num,
        look_ahead=look_ahead,
        hit_rate=_number("hit_rate", values["hit_rate"], 1.0) if look_ahead else 0.0,
    )
    return SimulatedPair(text or "70b-1b", drafting, times, target_max_num_seqs=max_num_seqs)


def _costs(found: Mapping[str, Any]) -> StepCosts:
    known = {field.name: found[field.name] for field in fields(StepCosts)}
    return StepCosts(**known | {name: tuple(known[name]) for name in ("rows", "seconds")})


def _table(key: str, each_key: str, values: Mapping[str, str]) -> StepCosts:
    """A step's time: for each begun so many rows, or `ROWS:MS/ROWS:MS/...` with lines between."""
    text = values[key]
    if ":" not in text:
        each = _whole(each_key, values, 1, TABLE_ROWS_MAX)
        return _stairs(_number(key, text, MS_MAX) / 1e3, each)
    pairs = [part.partition(":") for part in text.split("/")]
    rows = [_number(key, first, TABLE_ROWS_MAX) for first, _, _ in pairs]
    seconds = [_number(key, last, MS_MAX) / 1e3 for _, _, last in pairs]
    if any(row < 1 or row != int(row) for row in rows) or sorted(set(rows)) != rows:
        _refuse(f"{key}={text!r} is wrong; its rows must be whole numbers from 1 that ascend")
    return StepCosts(tuple(map(int, rows)), tuple(seconds))


def _stairs(seconds: float, each: int) -> StepCosts:
    """A table of so many seconds for each begun `each` rows."""
    if each == 1:
        return StepCosts((1, 2), (seconds, 2 * seconds))
    points: dict[int, float] = {}
    for number in range(1, STAIRS_MAX // each + 2):
        points[(number - 1) * each + 1] = points[number * each] = number * seconds
    last = max(points)
    points[last + each] = points[last] + seconds
    return StepCosts(tuple(points), tuple(points.values()))


def _number(
    key: str, text: str, highest: float, *, lowest: float = 0, whole: bool = False
) -> float:
    try:
        value = float(int(text) if whole else float(text))
    except ValueError:
        value = math.nan
    if not lowest <= value <= highest:
        what = "whole number" if whole else "number"
        _refuse(f"{key}={text!r} is wrong; it must be a {what} from {lowest:g} to {highest:g}")
    return value


def _whole(key: str, values: Mapping[str, str], lowest: int, highest: int) -> int:
    return int(_number(key, values[key], highest, lowest=lowest, whole=True))


def _refuse(reason: str) -> None:
    raise SettingError("from_numbers", reason)


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
            "round_trip_ms": scenario.round_trip_s * 1e3,
            "was_found": self.was_found,
            "figures": None if figures is None else asdict(figures),
        }


def simulated(
    options: SimulationOptions,
    pair: SimulatedPair,
    config: DeploymentConfig,
    progress: Callable[[str], None],
) -> tuple[SimulatedFleet, ...]:
    """Every load on every fleet. What replicas take at a time is the deployment's."""
    if not pair.has_drafts and any(loss.role == "draft" for loss in options.lose):
        raise SettingError("lose", "draft is wrong; this pair has no draft replicas")
    if pair.has_drafts:
        options.check_counts("draft")
    return tuple(
        _simulated(options, scenario, progress) for scenario in _scenarios(options, pair, config)
    )


def _scenarios(
    options: SimulationOptions, pair: SimulatedPair, config: DeploymentConfig
) -> Iterator[Scenario]:
    demands = [
        Demand(
            sessions=sessions, rate=rate, prompt_tokens=options.prompt_tokens,
            answer_tokens=float(options.answer_tokens),
        )
        for sessions, rate in (
            *((number, None) for number in options.sessions),
            *((None, rate) for rate in options.rate),
        )
    ]  # fmt: skip
    drafts = (options.drafts or (1,)) if pair.has_drafts else (0,)
    counts = product(options.targets or (1,), drafts, options.coordinators or (1,))
    sizes = [FleetSize(targets=t, drafts=d, coordinators=c) for t, d, c in counts]
    for demand, size in product(demands, sizes):
        yield Scenario(
            fleet=size,
            demand=demand,
            drafting=pair.drafting,
            times=pair.times,
            config=config,
            target_max_num_seqs=pair.target_max_num_seqs,
            round_trip_s=(options.round_trip_ms or pair.round_trip_ms) / 1e3,
            coordinator_s=options.coordinator_ms / 1e3,
            losses=options.lose,
            seconds=options.simulated_seconds,
            seed=options.simulation_seed,
        )


def _simulated(
    options: SimulationOptions, scenario: Scenario, progress: Callable[[str], None]
) -> SimulatedFleet:
    free = [role for role in ROLES if not options.counts(role)]
    if not scenario.has_drafts and "draft" in free:
        free.remove("draft")
    if free and options.tpot_ms is not None:

        def tried(fleet: FleetSize, figures: FleetFigures) -> None:
            took = "-" if figures.tpot_ms_p99 is None else f"{figures.tpot_ms_p99:.1f}"
            progress(f"{in_words(fleet)}: {took} ms a token for 99 % of them")

        found = smallest(scenario, options.tpot_ms, free, tried)
        if found is None:
            return SimulatedFleet(scenario, True, None)
        scenario = replace(scenario, fleet=found)
    progress(f"simulating {in_words(scenario.fleet)}")
    return SimulatedFleet(scenario, bool(free), simulate(scenario))


Tried = Callable[[FleetSize, FleetFigures], None]


def keeps(figures: FleetFigures, tpot_ms: float) -> bool:
    """Whether 99 % of the tokens are of requests that take no longer for one, and none is
    refused."""
    p99 = figures.tpot_ms_p99
    return p99 is not None and p99 <= tpot_ms and figures.num_refused == 0


def smallest(
    scenario: Scenario, tpot_ms: float, free: Collection[Role], tried: Tried
) -> FleetSize | None:
    """The fleet with the fewest targets, then drafts, then coordinators (within `TOLERANCE`), that
    keeps a time per token, before any loss; the numbers of roles that are not `free` are the
    scenario's. None where none does: a single session takes longer, or another role is too small.
    `tried` hears of each one that is simulated. Each role has plenty of those that come later."""
    rounds = _rounds_per_second(scenario, tpot_ms)
    seconds = min(scenario.seconds, max(SEARCH_S[0], min(SEARCH_S[1], SEARCH_ROUNDS / rounds)))
    scenario = replace(
        scenario, losses=(), seconds=seconds, warm_up_s=min(scenario.warm_up_s, seconds / 2)
    )
    one = FleetSize(targets=1, drafts=int(scenario.has_drafts))
    endless = replace(scenario.demand, sessions=1, rate=None, answer_tokens=math.inf)
    if not keeps(simulate(replace(scenario, fleet=one, demand=endless)), tpot_ms):
        return None
    known: dict[FleetSize, bool] = {}

    def is_kept(fleet: FleetSize) -> bool:
        if fleet not in known:
            figures = simulate(replace(scenario, fleet=fleet))
            tried(fleet, figures)
            known[fleet] = keeps(figures, tpot_ms)
        return known[fleet]

    roles = [role for role in ROLES if role in free]
    needs = {role: _needed(scenario, role, rounds) for role in roles}
    fleet = scenario.fleet
    for role in roles:
        fleet = _with(fleet, role, _whole_number(GENEROUS * needs[role]))
    for role in roles:
        least, most = _whole_number(needs[role]), _whole_number(HOPELESS * needs[role])
        if known.get(fleet):
            most = fleet.of(role)
        number = _fewest(lambda n: is_kept(_with(fleet, role, n)), least, most)  # noqa: B023
        if number is None:
            return None
        fleet = _with(fleet, role, number)
    return fleet


def _rounds_per_second(scenario: Scenario, tpot_ms: float) -> float:
    """What keeping the time per token comes to."""
    demand = scenario.demand
    tokens = (demand.rate or 0.0) * demand.answer_tokens
    if demand.sessions is not None:
        tokens = demand.sessions / (tpot_ms / 1e3)
    return tokens / scenario.drafting.tokens_per_round


def _needed(scenario: Scenario, role: Role, rounds: float) -> float:
    """What a role needs if all its replicas were busy all the time, with full steps."""
    drafting, seats = scenario.drafting, scenario.times.max_num_seqs
    if role == "coordinator":
        busy_s = scenario.coordinator_s
    elif role == "draft":
        passes = len(drafting.survival)
        busy_s = passes * scenario.costs("draft").step_seconds(seats, seats) / seats
    else:
        rows = round(1 + drafting.num_proposed)
        tokens_max = scenario.config.target.max_num_batched_tokens
        seats = max(1, min(scenario.target_seats, tokens_max // rows))
        busy_s = scenario.costs("target").step_seconds(rows * seats, seats) / seats
    return rounds * busy_s


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
        if is_kept(middle):
            high = middle
        else:
            low = middle
    return high


def _with(fleet: FleetSize, role: Role, number: int) -> FleetSize:
    return replace(fleet, **{f"{role}s": number})


def in_words(fleet: FleetSize) -> str:
    """A fleet's size."""
    return ", ".join(_counted(fleet.of(role), role) for role in ROLES)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
        load = _load(one.scenario.demand)
        if one.figures is None:
            said = f"No number of replicas keeps {options.tpot_ms:g} ms a token for {load}."
            yield Text(said, style="bold")
        elif one.was_found:
            said = f"{in_words(one.scenario.fleet)} keep {options.tpot_ms:g} ms a token"
            yield Text(f"For {load}: {said}, before any loss.", style="bold")


def _load(demand: Demand) -> str:
    if demand.sessions is not None:
        return _counted(demand.sessions, "session")
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
            size = ", ".join(str(one.scenario.fleet.of(role)) for role in ROLES)
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
