"""What measured rounds make of an engine's cost table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from outrider.engine.step_costs import StepCosts
from outrider.errors import check
from outrider.limits import ENGINE_SEQUENCES_MAX

from .acceptance import RoundKind, Rounds

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


@dataclass(frozen=True, slots=True)
class LookAheadPlan:
    """Rounds whose likely outcomes the draft works out while the target verifies."""

    num_draft_tokens: int
    num_outcomes: int
    hit_rate: float
    """Share of the rounds whose proposal is among them."""


@dataclass(frozen=True, slots=True)
class _Means:
    """Of the rounds that share steps."""

    rows: float
    steps: float
    context: float


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
        later = rounds.num_rounds - rounds.num_texts
        if later <= 0:
            return 0.0
        context = round(load.sessions * rounds.contexts / later)
        table_s = self.target.step_seconds(load.sessions, load.sessions, context)
        return later * self.plain.at(table_s)

    def drafted_seconds(self, rounds: Rounds, load: Load) -> float:
        """The same with a draft that is waited for."""
        later = sum(rounds.kinds.values())
        if later <= 0:
            return 0.0
        means = _Means(
            rows=1 + rounds.proposed_per_round,
            steps=rounds.steps_per_round,
            context=rounds.contexts / later,
        )
        groups = self._num_groups(means, load)
        together = load.sessions / groups
        alone_s = self._cycle(means, together, load)
        busy_s = self._busiest(means, together, load)
        queue_s = max(0.0, groups * busy_s - alone_s)
        if groups > GROUPS_IN_STEP:
            queue_s += (groups - 1) * busy_s / alone_s * busy_s / 2
        return sum(
            number * (self._round(kind, means, together, load) + queue_s)
            for kind, number in rounds.kinds.items()
        )

    def look_ahead_seconds(self, rounds: Rounds, load: Load, plan: LookAheadPlan) -> float:
        """The same with a draft that looks ahead. A round whose proposal is there takes the
        target's step, or what the draft takes for all outcomes where that is longer; else the
        proposal is drafted after the outcome (Kumar et al., arXiv 2603.03251, theorem 7). All
        outcomes grow a token a pass, the bonus from the second pass on; of more than a pass takes
        some wait for others."""
        later = sum(rounds.kinds.values())
        check(self.draft is not None, "only a model looks ahead")
        if later <= 0 or self.draft is None:
            return 0.0
        k, context = plan.num_draft_tokens, rounds.contexts / later
        means = _Means(rows=1.0 + k, steps=float(k), context=context)
        verify_s = self._verify(means.rows, means, load.sessions) + self.rest_s
        sessions = math.ceil(load.sessions / load.draft_replicas)
        branches = sessions * plan.num_outcomes
        passes = (k + 1) * math.ceil(branches / self.max_num_seqs)
        rows = min(branches, self.max_num_seqs)
        pass_s = self.draft.step_seconds(rows, rows, round(rows * context))
        ahead_s = self.wait.at(passes * pass_s) + load.round_trip_s
        draft_s = self._wait(k, means, load.sessions, load)
        if self.shares_device:
            return later * (verify_s + ahead_s + (1 - plan.hit_rate) * draft_s)
        late_s = max(0.0, ahead_s - verify_s)
        hit, miss = plan.hit_rate, 1 - plan.hit_rate
        return later * (verify_s + hit * late_s + miss * draft_s)

    def _num_groups(self, means: _Means, load: Load) -> int:
        if self.shares_device:
            return 1
        groups = min(GROUPS_IN_STEP, load.sessions)
        while groups < load.sessions:
            together = load.sessions / (groups + 1)
            busy_s = (groups + 1) * self._busiest(means, together, load)
            if busy_s > self._cycle(means, together, load):
                break
            groups += 1
        return groups

    def _cycle(self, means: _Means, together: float, load: Load) -> float:
        """From one round to the next, of a group that finds nobody before it."""
        wait_s = self._wait(means.steps, means, together, load)
        return wait_s + self._verify(means.rows, means, together) + self.rest_s

    def _busiest(self, means: _Means, together: float, load: Load) -> float:
        """What a group keeps the busier side busy."""
        verify_s = self._verify(means.rows, means, together)
        return max(verify_s, self._draft_steps(means.steps, means, together, load))

    def _round(self, kind: RoundKind, means: _Means, together: float, load: Load) -> float:
        verify_s = self._verify(1.0 + kind.num_proposed, means, together)
        return self._wait(kind.num_steps, means, together, load) + verify_s + self.rest_s

    def _verify(self, rows: float, means: _Means, together: float) -> float:
        """The target's part: own rows, and those of the others in its step."""

        def table_s(sessions: int) -> float:
            all_rows = max(1, round(rows + (sessions - 1) * means.rows))
            return self.verify.step_seconds(all_rows, sessions, round(sessions * means.context))

        return _between(table_s, together)

    def _wait(self, steps: float, means: _Means, together: float, load: Load) -> float:
        """The round trip counts in as far as a replica is asked: not where a look-up proposes."""
        table_s = self._draft_table(steps, means, together, load)
        return self.wait.at(table_s) + load.round_trip_s * min(1.0, steps)

    def _draft_steps(self, steps: float, means: _Means, together: float, load: Load) -> float:
        return self.wait.factor * self._draft_table(steps, means, together, load)

    def _draft_table(self, steps: float, means: _Means, together: float, load: Load) -> float:
        draft = self.draft
        if draft is None:
            return 0.0

        def table_s(sessions: int) -> float:
            slots = round(sessions * means.context)
            return draft.step_seconds(sessions, sessions, slots)

        return steps * _between(table_s, max(1.0, together / load.draft_replicas))


def _between(seconds: Callable[[int], float], sessions: float) -> float:
    """Of steps that so many sessions share on average."""
    fewer = math.floor(sessions)
    part = sessions - fewer
    if part == 0:
        return seconds(fewer)
    return (1 - part) * seconds(fewer) + part * seconds(fewer + 1)
