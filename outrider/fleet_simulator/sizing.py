"""The smallest fleet that keeps a time per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from outrider.fleet_simulator.figures import FleetFigures
from outrider.fleet_simulator.scenario import Demand, FleetSize, Scenario
from outrider.fleet_simulator.simulation import simulate
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import Role

ROLES: Final[tuple[Role, ...]] = ("target", "draft", "coordinator")
"""In the order in which they are found: those that cost most first."""
SEARCH_S: Final = (4.0, 60.0)
"""What is measured of each simulation while the fleet is looked for, at least and at most ..."""
SEARCH_ROUNDS: Final = 100_000
"""... so that there are about so many rounds; and half of that comes before it."""
TOLERANCE: Final = 0.02
"""Share of a number by which it may be larger than the smallest."""
GENEROUS: Final = 4
"""How many times as many of a role as it needs at least there are while another one is looked
for."""

HOPELESS: Final = 16
"""More of a role than so many times what it needs at least brings nothing more."""

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
    `tried` hears of each one that is simulated."""
    search = _Search(scenario, tpot_ms, free, tried)
    return search.found()


class _Search:
    """One role after the other, each with plenty of those that come later."""

    def __init__(
        self, scenario: Scenario, tpot_ms: float, free: Collection[Role], tried: Tried
    ) -> None:
        self._tpot_ms = tpot_ms
        least_s, most_s = SEARCH_S
        seconds = min(most_s, max(least_s, SEARCH_ROUNDS / self._rounds_per_second(scenario)))
        self._scenario = replace(
            scenario,
            losses=(),
            seconds=min(scenario.seconds, seconds),
            warm_up_s=min(scenario.warm_up_s, seconds / 2),
        )
        self._free = [role for role in ROLES if role in free]
        if scenario.drafting.is_plain and "draft" in self._free:
            self._free.remove("draft")
        self._tried = tried
        self._known: dict[FleetSize, bool] = {}

    def found(self) -> FleetSize | None:
        """See `smallest`."""
        alone = replace(
            self._scenario, fleet=FleetSize(targets=1, drafts=1),
            demand=Demand(
                sessions=1, prompt_tokens=self._scenario.demand.prompt_tokens,
                answer_tokens=math.inf,
            ),
        )  # fmt: skip
        if not keeps(simulate(alone), self._tpot_ms):
            return None
        least = {role: self._least(role) for role in self._free}
        fleet = self._scenario.fleet
        for role in self._free:
            fleet = _with(fleet, role, min(REPLICAS_MAX, GENEROUS * least[role]))
        for role in self._free:
            number = self._fewest(fleet, role, least[role])
            if number is None:
                return None
            fleet = _with(fleet, role, number)
        return fleet

    def _rounds_per_second(self, scenario: Scenario) -> float:
        """What keeping the time per token comes to."""
        demand = scenario.demand
        tokens = (demand.rate or 0.0) * demand.answer_tokens
        if demand.sessions is not None:
            tokens = demand.sessions / (self._tpot_ms / 1e3)
        return tokens / scenario.drafting.tokens_per_round

    def _least(self, role: Role) -> int:
        """What a role needs if all its replicas were busy all the time, with full steps."""
        scenario, drafting, times = self._scenario, self._scenario.drafting, self._scenario.times
        rounds = self._rounds_per_second(scenario)
        seats = times.max_num_seqs
        if role == "coordinator":
            busy_s = scenario.coordinator_s
        elif role == "draft":
            draft_s = 0.0 if times.draft is None else times.draft.step_seconds(seats, seats)
            busy_s = times.wait.factor * drafting.num_steps * draft_s / seats
        else:
            rows = round(1 + drafting.num_proposed)
            seats = max(1, min(scenario.target_seats, scenario.max_num_batched_tokens // rows))
            busy_s = times.verify.step_seconds(rows * seats, seats) / seats
        return min(REPLICAS_MAX, max(1, math.ceil(rounds * busy_s)))

    def _fewest(self, fleet: FleetSize, role: Role, least: int) -> int | None:
        """From `least` on up, or down, and then by halving what lies between. Where so many as
        there are keep the time, no more are looked at."""
        most = min(REPLICAS_MAX, HOPELESS * least)
        if self._known.get(fleet):
            most = fleet.of(role)
        low, high = 0, min(least, most)
        while not self._keeps(_with(fleet, role, high)):
            if high == most:
                return None
            low, high = high, min(most, math.ceil(high * 1.5))
        while high - low > max(1.0, TOLERANCE * high):
            # What was reckoned is nearly the least: below it most of the way is not worth a look.
            middle = (low + high) // 2 if low else max(1, math.floor(high * 0.9))
            if self._keeps(_with(fleet, role, middle)):
                high = middle
            else:
                low = middle
        return high

    def _keeps(self, fleet: FleetSize) -> bool:
        if fleet not in self._known:
            figures = simulate(replace(self._scenario, fleet=fleet))
            self._tried(fleet, figures)
            self._known[fleet] = keeps(figures, self._tpot_ms)
        return self._known[fleet]


def _with(fleet: FleetSize, role: Role, number: int) -> FleetSize:
    if role == "target":
        return replace(fleet, targets=number)
    return replace(fleet, drafts=number) if role == "draft" else replace(fleet, coordinators=number)
