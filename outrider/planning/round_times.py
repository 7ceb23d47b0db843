"""What rounds last: the engines' tables, put where measured rounds stood.

    round = wait for a proposal + target's step + rest
    wait  = messages + link + draft's steps, one for each token that its model draws
    plain = target's step + what the loop takes beside it

A table is measured in a tight loop, with the caches to itself. So each part is what a rehearsal has
made of its table (`fitting`): a line over it, or the table once more; without one it is believed.

Sessions that share a step hear of it at the same time and go on together. So those of a deployment
gather in groups: as many as find the busier of the two sides free, because where one more has to
wait, it soon waits beside another, and joins it. Of two groups only one can wait: they stay two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from outrider.engine.step_costs import StepCosts
from outrider.errors import check
from outrider.limits import ENGINE_SEQUENCES_MAX
from outrider.planning.fitting import AS_TOLD, Line
from outrider.planning.replay import RoundKind, Rounds

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
