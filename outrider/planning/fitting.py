"""What measured rounds make of an engine's cost table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from outrider.engine.step_costs import StepCosts
from outrider.errors import check

NOISE: Final = 0.15
"""Standard deviation of a time, as a share of it ..."""
FACTOR_SPREAD: Final = 0.5
"""... and of what a factor may turn out to be, about 1."""
FACTOR_MAX: Final = 4.0
LINE_STEPS: Final = 4.0
"""Steps of one size that weigh as much as the line through those of all sizes."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds over those that a table says."""

    base_s: float = 0.0
    factor: float = 1.0

    def at(self, table_s: float) -> float:
        """The time to expect; never negative."""
        return max(0.0, self.base_s + self.factor * table_s)


AS_TOLD: Final = Line()
"""The table itself."""


def fitted(pairs: Sequence[tuple[float, float]]) -> Line:
    """The line of least squares through (table's, measured) seconds. Its factor, 0 to `FACTOR_MAX`,
    is drawn towards 1 as far as noise may have made it; without any pair the table is believed."""
    if not pairs:
        return AS_TOLD
    x, y = np.array(pairs, dtype=np.float64).T
    check(bool(np.isfinite(x).all() and np.isfinite(y).all()), "times must be finite")
    pull = (NOISE * float(y.mean()) / FACTOR_SPREAD) ** 2 / len(pairs)
    along = float(((x - x.mean()) * (y - y.mean())).mean())
    factor = (along + pull) / (float(x.var()) + pull) if pull > 0 else 1.0
    factor = min(max(factor, 0.0), FACTOR_MAX)
    return Line(float(y.mean() - factor * x.mean()), factor)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of one session."""

    rows: int
    context: int
    seconds: float


def rebased(costs: StepCosts, steps: Sequence[MeasuredStep]) -> StepCosts:
    """The table with its base moved to where steps stood: to the line over it that they are fitted
    by, and for each number of rows as close to these steps' mean as they are many; it never
    falls. What sessions and contexts cost is the table's."""
    found: dict[int, list[float]] = {}
    for step in steps:
        beside_s = costs.attention_seconds(step.rows, step.context)
        found.setdefault(step.rows, []).append(step.seconds - beside_s)
    line = fitted(
        [(costs.step_seconds(rows), second) for rows, times in found.items() for second in times]
    )
    moved, weights = {}, {}
    for rows in sorted({*costs.rows, *found}):
        times = found.get(rows, [])
        told = line.at(costs.step_seconds(rows))
        weights[rows] = LINE_STEPS + len(times)
        moved[rows] = max(0.0, (LINE_STEPS * told + sum(times)) / weights[rows])
    seconds = _rising(moved, weights)
    return replace(costs, rows=tuple(seconds), seconds=tuple(seconds.values()))


def _rising(values: Mapping[int, float], weights: Mapping[int, float]) -> dict[int, float]:
    """The closest values that never fall, by weighted squares: neighbours that do are pooled."""
    pools: list[tuple[float, float, list[int]]] = []
    for rows, value in values.items():
        weight, members = weights[rows], [rows]
        while pools and pools[-1][0] > value:
            before, heavy, others = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight += heavy
            members = [*others, *members]
        pools.append((value, weight, members))
    return {rows: value for value, _, members in pools for rows in members}
