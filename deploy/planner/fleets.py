"""`outrider plan --simulate`: the pair that is simulated, the smallest fleet, and its tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter
from rich.console import RenderableType

from benchmarks.report import table
from outrider.engine.emulated_spec import parse_numbers
from outrider.engine.step_costs import StepCosts
from outrider.errors import SettingError
from outrider.limits import LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX, REPLICAS_MAX
from outrider.registry.registry import Role
from outrider.speculation.sampling_params import Rule

from .devices import Parts, Share
from .round_times import Line, Option, ServiceTimes
from .simulation import ROLES, Fleet, FleetFigures, Pair, Scenario, Workload, simulate

MS_MAX = 60_000.0
SEARCH_S = 5.0
"""What is measured of each simulation while the fleet is looked for; half of that comes before."""
TOLERANCE = 0.02
"""Share of a number by which it may be larger than the smallest."""
GENEROUS = 4
"""How many times as many of a role as it needs at least there are while another one is looked
for."""
HOPELESS = 16
"""More of a role than so many times what it needs at least brings nothing more."""


def read_report(path: Path) -> Pair:
    """The pair of what `outrider plan --json` printed. Raises `SettingError`."""
    try:
        found = json.loads(path.read_bytes())
        return TypeAdapter(Pair).validate_python(found["pair"])
    except OSError as error:
        raise SettingError("from_report", f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise SettingError(
            "from_report",
            f"{path} is not what this version's `outrider plan --json` prints: {error}",
        ) from error


def _table(value: str) -> StepCosts:
    points = [part.split(":", 1) for part in value.split("/")]
    if points == [[value]]:
        points = [["1", value], ["2", value]]
    rows, times = zip(*((int(num), float(ms)) for num, ms in points), strict=True)
    if rows[0] < 1 or list(rows) != sorted(set(rows)) or not all(0 <= ms <= MS_MAX for ms in times):
        raise ValueError("it must be MS or ROWS:MS/ROWS:MS, whose rows ascend")
    return StepCosts(rows, tuple(ms / 1e3 for ms in times))


_Table = Annotated[StepCosts, BeforeValidator(_table)]


class _Numbers(BaseModel, extra="forbid", validate_default=True):
    """What `--from-numbers` says; by default about what `bench emulate` does."""

    verify_ms: _Table = "1:18.3/16:18.3/32:36.6"  # type: ignore[assignment]
    draft_ms: _Table = "1:1.3/64:1.3/128:2.6"  # type: ignore[assignment]
    acceptance: Annotated[
        tuple[Share, ...], Parts
    ] = "0.8"  # type: ignore[assignment]  # fmt: skip
    num_draft_tokens: int = Field(6, ge=0, le=NUM_DRAFT_TOKENS_MAX)
    look_ahead: int = Field(0, ge=0, le=LOOK_AHEAD_MAX)
    hit_rate: Share = 0.0
    rest_ms: float = Field(0.0, ge=0, le=MS_MAX)

    def pair(self, name: str, target_seats: int, draft_seats: int) -> Pair:
        k, rest_s = self.num_draft_tokens, self.rest_ms / 1e3
        # The last chance is that of all further positions.
        chances = (self.acceptance + self.acceptance[-1:] * k)[:k]
        return Pair(
            name=name,
            times=ServiceTimes(
                target=self.verify_ms, draft=self.draft_ms, plain=Line(rest_s),
                rest_s=rest_s, target_max_num_seqs=target_seats, max_num_seqs=draft_seats,
            ),
            way=Option(
                rule=Rule.TOKEN, num_draft_tokens=k, look_ahead=self.look_ahead if k else 0,
                hit_rate=self.hit_rate, proposed_per_round=k, steps_per_round=k,
            ),
            survival=tuple(accumulate(chances, mul)),
        )  # fmt: skip


def of_numbers(text: str, target_seats: int, draft_seats: int) -> Pair:
    """From `key=value,...` (`_Numbers`). So many sessions share a step of a target, or a draft.
    Raises `ConfigError` naming what is wrong."""
    found = parse_numbers(_Numbers, text, "--from-numbers")
    return found.pair(text or "70b-1b", target_seats, draft_seats)


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """One workload on one fleet."""

    load: Workload
    fleet: Fleet | None
    """None where no fleet keeps the time per token."""
    was_found: bool
    """Whether a number of its replicas is the smallest that keeps it."""
    figures: FleetFigures | None


def simulated(
    scenario: Scenario,
    free: Collection[Role],
    tpot_ms: float | None,
    progress: Callable[[str], None],
) -> SimulatedFleet:
    """A scenario, whose numbers of the `free` roles are the smallest that keep a time per token."""
    fleet: Fleet | None = scenario.fleet
    if free and tpot_ms is not None:
        fleet = smallest(scenario, tpot_ms, free, progress)
    figures = None
    if fleet is not None:
        progress(f"simulating {in_words(fleet)}")
        figures = simulate(replace(scenario, fleet=fleet))
    return SimulatedFleet(scenario.workload, fleet, bool(free), figures)


def keeps(figures: FleetFigures, tpot_ms: float) -> bool:
    """Whether 99 % of the tokens are of requests that take no longer for one, and none is
    refused."""
    return figures.tpot_ms is not None and figures.tpot_ms[1] <= tpot_ms and not figures.num_refused


def smallest(
    scenario: Scenario,
    tpot_ms: float,
    free: Collection[Role],
    progress: Callable[[str], None] = lambda line: None,
) -> Fleet | None:
    """The fleet with the fewest targets, then drafts, then coordinators (within `TOLERANCE`), that
    keeps a time per token; the numbers of roles that are not `free` are the
    scenario's. None where none does.
    Each role has plenty of those that come later."""
    workload = scenario.workload
    tokens = (workload.rate or 0.0) * workload.answer_tokens
    if workload.sessions is not None:
        tokens = workload.sessions / (tpot_ms / 1e3)
    rounds = tokens / (1.0 + sum(scenario.pair.survival))
    seconds = min(scenario.seconds, SEARCH_S)
    scenario = replace(scenario, seconds=seconds, warm_up_s=min(scenario.warm_up_s, seconds / 2))

    @cache
    def is_kept(fleet: Fleet) -> bool:
        figures = simulate(replace(scenario, fleet=fleet))
        _, p99 = figures.tpot_ms or (0.0, 0.0)
        progress(f"{in_words(fleet)}: {p99:.1f} ms a token for 99 % of them")
        return keeps(figures, tpot_ms)

    needs = {role: rounds * _busy_s(scenario, role) for role in ROLES if role in free}
    fleet = scenario.fleet
    for role, need in needs.items():
        fleet = _with(fleet, role, GENEROUS * need)
    for role, need in needs.items():
        enough = lambda number: is_kept(_with(fleet, role, number))  # noqa: B023, E731
        number = _fewest(enough, math.ceil(need), math.ceil(HOPELESS * need))
        if number is None:
            return None
        fleet = _with(fleet, role, number)
    return fleet


def _busy_s(scenario: Scenario, role: Role) -> float:
    """How long a round keeps one replica of a role busy at least."""
    pair = scenario.pair
    if role == "coordinator":
        return scenario.coordinator_s
    costs, seats, rows = pair.costs(role), pair.seats(role), 1.0
    if role == "target":
        rows += pair.way.proposed_per_round
        seats = max(1, min(seats, int(scenario.config.target.max_num_batched_tokens / rows)))
    step_s = min(costs.step_seconds(rows * n, n) / n for n in (1, seats))
    return step_s * (len(pair.survival) if role == "draft" else 1)


def _fewest(enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """From `least` on up, and then by halving what lies between; None where not even `most` are
    enough."""
    low, high = least - 1, least
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(most, math.ceil(high * 1.5))
    while high - low > max(1.0, TOLERANCE * high):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _with(fleet: Fleet, role: Role, number: float) -> Fleet:
    return replace(fleet, **{f"{role}s": min(REPLICAS_MAX, max(1, math.ceil(number)))})


def in_words(fleet: Fleet) -> str:
    """A fleet's size."""
    return ", ".join(_counted(fleet.of(role), role) for role in ROLES)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def tables(
    fleets: Sequence[SimulatedFleet], pair: Pair, tpot_ms: float | None
) -> Iterator[RenderableType]:
    """For people. Replicas and their busy shares are targets, drafts, coordinators; times are p50,
    p99."""
    rows = []
    for one in fleets:
        load = _load(one.load)
        if one.fleet is None or one.figures is None:
            yield f"No number of replicas keeps {tpot_ms:g} ms a token for {load}."
            continue
        if one.was_found:
            yield f"For {load}: {in_words(one.fleet)} keep {tpot_ms:g} ms a token."
        named = {"load": load, "replicas": tuple(asdict(one.fleet).values())}
        rows.append(named | asdict(one.figures))
    if rows:
        yield table(f"Simulated: {pair.name}; K = {len(pair.survival)}", rows)


def _load(workload: Workload) -> str:
    if workload.sessions is not None:
        return _counted(workload.sessions, "session")
    return f"{workload.rate:g} requests a second"
