"""What rounds take: engines' cost tables, put on lines through the times of measured rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.engine.step_costs import StepCosts
from outrider.limits import ENGINE_SEQUENCES_MAX
from outrider.speculation.sampling_params import Rule

from .rounds import Rounds

NOISE = 0.15
"""Standard deviation of a time, as a share of it ..."""
FACTOR_SPREAD = 0.5
"""... and of what a factor may turn out to be, about 1."""
FACTOR_MAX = 4.0


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds over those that a table says."""

    base_s: float = 0.0
    factor: float = 1.0

    def at(self, table_s: float) -> float:
        """The time to expect; never negative."""
        return max(0.0, self.base_s + self.factor * table_s)


AS_TOLD = Line()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way to decode, and what it is expected to bring."""

    rule: Rule
    num_draft_tokens: int
    """K; 0 = plain decoding."""
    look_ahead: int = 0
    """Outcomes of a round worked out ahead; 0 = the draft is waited for."""
    draft_replicas: float = 0
    """For each target replica, below 1 where several share one; 0 for plain decoding and
    look-ups."""
    hit_rate: float | None = None
    """Share of the rounds whose proposal is there before they begin; None without look-ahead."""
    tokens_per_second: float = 0.0
    """Of all sessions of a target replica together, prompts included."""
    speedup: float = 1.0
    """Over plain decoding of as many sessions."""
    tokens_per_round: float = 1.0
    proposed_per_round: float = 0.0
    """Draft tokens, mean over the rounds with a draft ..."""
    steps_per_round: float = 0.0
    """... and steps of its model: fewer than K where a look-up proposes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """The times of one target replica and its drafts."""

    target: StepCosts
    draft: StepCosts | None
    """None = a look-up, for which no replica is asked."""
    verify: Line = AS_TOLD
    """A step of the target in a round with a draft, over its table."""
    plain: Line = AS_TOLD
    """A round of plain decoding over the target's step."""
    wait: Line = AS_TOLD
    """The wait for a proposal over the steps of the draft's model."""
    rest_s: float = 0.0
    """What a round with a draft takes beside these two."""
    first: Line = AS_TOLD
    """The time to the first token over the target's step of the prompt."""
    round_trip_s: float = 0.0
    """Of the link between coordinator and draft, beside what messages take on one machine."""
    target_max_num_seqs: int = ENGINE_SEQUENCES_MAX
    """Sequences that share a step of the target ..."""
    max_num_seqs: int = ENGINE_SEQUENCES_MAX
    """... and of the draft."""
    shares_device: bool = False
    """Whether draft and target compute on the same cores, and so never at the same time."""

    def first_seconds(self, prompt_tokens: Iterable[int]) -> float:
        """To the first tokens of so many prompts, one after the other."""
        return sum(self.first.at(self.target.step_seconds(max(1, n))) for n in prompt_tokens)

    def seconds(self, rounds: Rounds, way: Option, sessions: int = 1) -> float:
        """All rounds but the first ones, decoded in this way, where so many sessions decode at a
        time."""
        if way.num_draft_tokens == 0:
            table_s = self.target.step_seconds(sessions, sessions, sessions * rounds.context)
            return rounds.num_later * self.plain.at(table_s)
        steps = _SharedSteps(self, rounds, way.draft_replicas or 1)
        if way.hit_rate is None:
            return steps.drafted_seconds(sessions)
        return rounds.num_later * steps.look_ahead_s(sessions, way, way.hit_rate)


@dataclass(frozen=True, slots=True)
class _SharedSteps:
    """Rounds whose steps are shared with others of the same mean."""

    times: ServiceTimes
    rounds: Rounds
    draft_replicas: float

    def drafted_seconds(self, sessions: int) -> float:
        """All rounds, with drafts that are waited for. Sessions that share a step go on together;
        they form as many groups as make the cycle shortest, in which each session has a round. One
        side works for one group at a time."""
        mean = 1.0 + self.rounds.proposed_per_round, self.rounds.steps_per_round

        def cycle_s(groups: int) -> float:
            together = sessions / groups
            draft_s = self.times.wait.factor * self._drafted_s(together, mean[1])
            busiest_s = max(self._verify_s(together, mean[0]), draft_s)
            return max(self._round_s(together, *mean), groups * busiest_s)

        groups = 1
        if not self.times.shares_device:
            while groups < sessions and cycle_s(groups + 1) < cycle_s(groups):
                groups += 1
        together = sessions / groups
        queue_s = cycle_s(groups) - self._round_s(together, *mean)
        return sum(
            number * (self._round_s(together, 1.0 + proposed, steps) + queue_s)
            for proposed, steps, number in self.rounds.kinds()
        )

    def look_ahead_s(self, sessions: int, way: Option, hit_rate: float) -> float:
        """A round with a draft that works out `way.look_ahead` outcomes while the target verifies.
        Where its own is among them it takes the target's step, or what the draft takes for all
        outcomes where that is longer; else the proposal is drafted after the outcome (Kumar et al.,
        arXiv 2603.03251, theorem 7). All outcomes grow a token a pass, the bonus from the second
        pass on; of more than a pass takes some wait for others."""
        times, k = self.times, way.num_draft_tokens
        verify_s = self._verify_s(sessions, 1.0 + k) + times.rest_s
        branches = math.ceil(sessions / self.draft_replicas) * way.look_ahead
        passes = (k + 1) * math.ceil(branches / times.max_num_seqs)
        step_s = self._draft_step_s(min(branches, times.max_num_seqs))
        ahead_s = times.wait.at(passes * step_s) + times.round_trip_s
        missed_s = (1 - hit_rate) * self._wait_s(sessions, k)
        if times.shares_device:
            return verify_s + ahead_s + missed_s
        return verify_s + hit_rate * max(0.0, ahead_s - verify_s) + missed_s

    def _round_s(self, together: float, rows: float, steps: float) -> float:
        """A round of so many sessions at once that finds no queue."""
        return self._wait_s(together, steps) + self._verify_s(together, rows) + self.times.rest_s

    def _verify_s(self, together: float, rows: float) -> float:
        """The target's part: own rows, and those of the others in its step."""
        all_rows = rows + (together - 1) * (1.0 + self.rounds.proposed_per_round)
        context = together * self.rounds.context
        return self.times.verify.at(self.times.target.step_seconds(all_rows, together, context))

    def _wait_s(self, together: float, steps: float) -> float:
        """The round trip counts in as far as a replica is asked: not where a look-up proposes."""
        link_s = self.times.round_trip_s * min(1.0, steps)
        return self.times.wait.at(self._drafted_s(together, steps)) + link_s

    def _drafted_s(self, together: float, steps: float) -> float:
        return steps * self._draft_step_s(max(1.0, together / self.draft_replicas))

    def _draft_step_s(self, sessions: float) -> float:
        draft = self.times.draft
        if draft is None:
            return 0.0
        return draft.step_seconds(sessions, sessions, sessions * self.rounds.context)
