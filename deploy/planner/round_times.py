"""What rounds take: an engine's cost table, moved to where measured rounds stood."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from outrider.engine.step_costs import StepCosts
from outrider.errors import check
from outrider.limits import ENGINE_SEQUENCES_MAX

from .rounds import Rounds

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
    pull = (NOISE * float(y.mean()) / FACTOR_SPREAD) ** 2 / len(pairs)
    along = float(((x - x.mean()) * (y - y.mean())).mean())
    factor = (along + pull) / (float(x.var()) + pull) if pull > 0 else 1.0
    factor = min(max(factor, 0.0), FACTOR_MAX)
    return Line(float(y.mean() - factor * x.mean()), factor)


class MeasuredStep(NamedTuple):
    """One step of one session."""

    rows: int
    context: int
    seconds: float


def rebased(costs: StepCosts, steps: Sequence[MeasuredStep]) -> StepCosts:
    """The table with its base moved to where steps stood: to the line over it that they are fitted
    by, and for each number of rows as close to these steps' mean as they are many; it never
    falls. What sessions and contexts cost is the table's."""
    found: dict[int, list[float]] = {rows: [] for rows in costs.rows}
    for rows, context, seconds in steps:
        base_s = seconds - costs.attention_seconds(rows, context)
        found.setdefault(rows, []).append(base_s)
    pairs = [(costs.step_seconds(rows), one) for rows, times in found.items() for one in times]
    line, all_rows = fitted(pairs), sorted(found)
    weights = [LINE_STEPS + len(found[num]) for num in all_rows]
    moved = [
        max(0.0, (LINE_STEPS * line.at(costs.step_seconds(num)) + sum(found[num])) / weight)
        for num, weight in zip(all_rows, weights, strict=True)
    ]
    return replace(costs, rows=tuple(all_rows), seconds=_rising(moved, weights))


def _rising(values: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """The closest values that never fall, by weighted squares: neighbours that do are pooled."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        num = 1
        while pools and pools[-1][0] > value:
            before, heavy, others = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, num = weight + heavy, num + others
        pools.append((value, weight, num))
    return tuple(value for value, _, num in pools for _ in range(num))


GROUPS_IN_STEP: Final = 2
"""Groups that settle into taking turns; of more, each comes at any time, and where it finds a step
running it waits for half of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a target replica is given."""

    sessions: int = 1
    """That decode at a time, at least one."""
    round_trip_s: float = 0.0
    """Of the link between coordinator and draft, beside what messages take on one machine."""
    draft_replicas: int = 1
    """That share the sessions of this target replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """The times of one target replica and its drafts."""

    target: StepCosts
    """The target's steps on their own."""
    verify: StepCosts
    """The target's steps in rounds with a draft."""
    draft: StepCosts | None
    """None = a look-up, for which no replica is asked."""
    plain: Line = AS_TOLD
    """A round of plain decoding over the target's step."""
    wait: Line = AS_TOLD
    """The wait for a proposal over the steps of the draft's model."""
    rest_s: float = 0.0
    """What a round with a draft takes beside these two."""
    first: Line = AS_TOLD
    """The time to the first token over the target's step of the prompt."""
    max_num_seqs: int = ENGINE_SEQUENCES_MAX
    """Sequences that share a step of the draft."""
    shares_device: bool = False
    """Whether draft and target compute on the same cores, and so never at the same time."""

    def first_seconds(self, prompt_tokens: Iterable[int]) -> float:
        """To the first tokens of so many prompts, one after the other."""
        return sum(self.first.at(self.target.step_seconds(max(1, n))) for n in prompt_tokens)

    def plain_seconds(self, rounds: Rounds, load: Load) -> float:
        """All rounds but the first ones, of sessions of which so many decode at a time."""
        num = load.sessions
        table_s = self.target.step_seconds(num, num, round(num * rounds.context))
        return rounds.num_later * self.plain.at(table_s)

    def drafted_seconds(self, rounds: Rounds, load: Load) -> float:
        """The same with a draft that is waited for. Sessions that share a step go on together: they
        gather in as many groups as keep the busier side busy."""
        shared = _SharedSteps(self, rounds, load)
        groups = 1 if self.shares_device else min(GROUPS_IN_STEP, load.sessions)
        while groups < load.sessions and not self.shares_device:
            together = load.sessions / (groups + 1)
            if (groups + 1) * shared.busiest_s(together) > shared.round_s(together):
                break
            groups += 1
        together = load.sessions / groups
        alone_s, busy_s = shared.round_s(together), shared.busiest_s(together)
        queue_s = max(0.0, groups * busy_s - alone_s)
        if groups > GROUPS_IN_STEP:
            queue_s += (groups - 1) * busy_s / alone_s * busy_s / 2
        return sum(
            number * (shared.round_s(together, 1.0 + proposed, steps) + queue_s)
            for proposed, steps, number in rounds.kinds()
        )

    def look_ahead_seconds(
        self, rounds: Rounds, load: Load, num_draft_tokens: int, num_outcomes: int, hit_rate: float
    ) -> float:
        """The same with a draft that looks ahead: that works out so many outcomes while the target
        verifies, among which the round's own is with chance `hit_rate`. A round whose proposal is
        there takes the target's step, or what the draft takes for all outcomes where that is
        longer; else the proposal is drafted after the outcome (Kumar et al., arXiv 2603.03251,
        theorem 7). All outcomes grow a token a pass, the bonus from the second pass on; of more
        than a pass takes some wait for others."""
        check(self.draft is not None, "only a model looks ahead")
        shared, k, num = _SharedSteps(self, rounds, load), num_draft_tokens, load.sessions
        verify_s = shared.verify_s(num, 1.0 + k, 1.0 + k) + self.rest_s
        branches = math.ceil(num / load.draft_replicas) * num_outcomes
        rows = min(branches, self.max_num_seqs)
        passes = (k + 1) * math.ceil(branches / self.max_num_seqs)
        ahead_s = self.wait.at(passes * shared.draft_step_s(rows)) + load.round_trip_s
        draft_s = shared.wait_s(num, k)
        if self.shares_device:
            return rounds.num_later * (verify_s + ahead_s + (1 - hit_rate) * draft_s)
        late_s = hit_rate * max(0.0, ahead_s - verify_s)
        return rounds.num_later * (verify_s + late_s + (1 - hit_rate) * draft_s)


class _SharedSteps:
    """Times of rounds that share their steps with as many others of the same mean."""

    def __init__(self, times: ServiceTimes, rounds: Rounds, load: Load) -> None:
        self._times, self._load = times, load
        self._context = rounds.context
        self._rows, self._steps = 1.0 + rounds.proposed_per_round, rounds.steps_per_round

    def round_s(
        self, together: float, rows: float | None = None, steps: float | None = None
    ) -> float:
        """A round of so many sessions at once, of the mean kind or this one, that finds nothing
        before it in a queue."""
        rows, steps = self._rows if rows is None else rows, self._steps if steps is None else steps
        return self.wait_s(together, steps) + self.verify_s(together, rows) + self._times.rest_s

    def busiest_s(self, together: float) -> float:
        """How long such a round keeps the busier side busy."""
        draft_s = self._times.wait.factor * self._drafted_s(together, self._steps)
        return max(self.verify_s(together, self._rows), draft_s)

    def verify_s(self, together: float, rows: float, others: float = 0.0) -> float:
        """The target's part: own rows, and those of the others in its step."""
        others = others or self._rows

        def table_s(sessions: int) -> float:
            all_rows = max(1, round(rows + (sessions - 1) * others))
            context = round(sessions * self._context)
            return self._times.verify.step_seconds(all_rows, sessions, context)

        return _between(table_s, together)

    def wait_s(self, together: float, steps: float) -> float:
        """The round trip counts in as far as a replica is asked: not where a look-up proposes."""
        link_s = self._load.round_trip_s * min(1.0, steps)
        return self._times.wait.at(self._drafted_s(together, steps)) + link_s

    def draft_step_s(self, sessions: int) -> float:
        """One step of the draft's model."""
        draft = self._times.draft
        if draft is None:
            return 0.0
        return draft.step_seconds(sessions, sessions, round(sessions * self._context))

    def _drafted_s(self, together: float, steps: float) -> float:
        sessions = max(1.0, together / self._load.draft_replicas)
        return steps * _between(self.draft_step_s, sessions)


def _between(seconds: Callable[[int], float], sessions: float) -> float:
    """Of steps that so many sessions share on average."""
    fewer = math.floor(sessions)
    part = sessions - fewer
    return seconds(fewer) if part == 0 else (1 - part) * seconds(fewer) + part * seconds(fewer + 1)
