"""The rounds that commit a given text of the target, and the times of these rounds. The times come
from the engines' cost tables, corrected by linear functions fitted to measured rounds.

Drafts do not change the distribution of the target's text x. Given x, the rounds are a Markov
chain, so the expected number of rounds can be computed without decoding. At a place of the text, p
is the target's distribution and q is the draft's, both after all transforms:

| rule | chance that the first n tokens of a proposal are accepted, given the text |
| --- | --- |
| token | prod_{i<=n} min(1, q(x_i) / p(x_i)) |
| block | min_{m<=n} min(1, prod_{i<=m} q(x_i) / p(x_i)) |
| coupled | prod_{i<=n} P(the draft draws x_i, given that the target does) |
| greedy | 1 if each x_i with i<=n is the draft's likeliest token, otherwise 0 |

Token: x_1..x_n is drafted and accepted with chance prod min(p, q), and the target writes x_1..x_n
with chance prod p. The table has the quotient of these chances. Block: x_1..x_n is drafted and
accepted with chance q(x_1..x_n) pi_n (docs/exactness.md; Sun et al., ICLR 2025, lemma 3). The table
has this chance divided by prod p. Coupled: `outrider.bench.acceptance.matched` has the formula.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from outrider.bench.acceptance import Answer, Array, Sample
from outrider.config.deployment import DraftConfig
from outrider.drafters.drafter import DraftRequest
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import ENGINE_SEQUENCES_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.replica.lookups import build_lookup
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

NOISE = 0.15
"""Assumed relative standard deviation of a measured time."""
FACTOR_SPREAD = 0.5
"""Assumed standard deviation of `Line.factor` around 1."""
FACTOR_MAX = 4.0


def survival(rule: Rule, steps: Sequence[float]) -> Array:
    """The chances that at least 1, 2, ... tokens of a proposal are accepted, given the text.
    `steps` has the values of `Answer.steps` for the tokens of the proposal."""
    values = np.asarray(steps, dtype=np.float64)
    if rule is not Rule.BLOCK:
        return np.minimum(values, 1.0).cumprod()
    with np.errstate(divide="ignore"):  # Sums of logarithms, because products may overflow.
        products = np.exp(np.minimum(np.cumsum(np.log(values)), 0.0))
    return np.asarray(np.minimum.accumulate(products))


class Attempt(NamedTuple):
    """A drafter's proposal at one place of a text."""

    num_proposed: int
    num_steps: int
    """Number of steps of the draft model; 0 if a look-up proposes or nothing is proposed."""
    survival: Sequence[float]
    """The result of the function `survival`, without draft tokens beyond the end of the text."""


class Rounds(NamedTuple):
    """Expected counts over the rounds that commit some texts. The first round of a text has no
    draft. All other rounds are *later* rounds."""

    num_texts: float
    num_tokens: float
    contexts: float
    """The session's number of tokens at the start of a round, summed over all later rounds."""
    reached: Array
    """[K]: how often a token at depth 1, 2, ... was tested."""
    accepted: Array
    """[K]: how often a token at depth 1, 2, ... was accepted."""
    kinds: Array
    """[P, S]: number of later rounds with P proposed tokens and S steps of the draft model."""

    @property
    def num_later(self) -> float:
        return float(self.kinds.sum())

    @property
    def num_rounds(self) -> float:
        return self.num_texts + self.num_later

    @property
    def context(self) -> float:
        return self._mean(self.contexts)

    @property
    def tokens_per_round(self) -> float:
        return self.num_tokens / self.num_rounds

    @property
    def by_position(self) -> tuple[float | None, ...]:
        """For depth 1, 2, ..., the chance that a draft token is accepted if all earlier draft
        tokens were accepted; None for depths that were not reached."""
        pairs = zip(self.accepted.tolist(), self.reached.tolist(), strict=True)
        return tuple(accepted / reached if reached > 0 else None for accepted, reached in pairs)

    def chances(self, k: int) -> list[float]:
        """`by_position` of the first K depths, with 0 in place of None."""
        return [chance or 0.0 for chance in self.by_position[:k]]

    @property
    def proposed_per_round(self) -> float:
        return self._mean(np.arange(len(self.kinds)) @ self.kinds.sum(axis=1))

    @property
    def steps_per_round(self) -> float:
        return self._mean(np.arange(len(self.kinds)) @ self.kinds.sum(axis=0))

    def _mean(self, total: float) -> float:
        return float(total) / self.num_later if self.num_later > 0 else 0.0


def total(parts: Sequence[Rounds]) -> Rounds:
    """The rounds of several texts together."""
    fields: Any = map(sum, zip(*parts, strict=True))
    return Rounds(*fields)


def replay(num_tokens: int, attempt_at: Callable[[int], Attempt], prompt_tokens: int = 0) -> Rounds:
    """The rounds of one text of `num_tokens` >= 1. `attempt_at(t)` returns the proposal of a round
    that begins after t >= 1 tokens of the text. Calls `attempt_at` with ascending t."""
    visits = np.zeros(num_tokens + 1)
    visits[1] = 1.0
    contexts, kinds = 0.0, np.zeros((NUM_DRAFT_TOKENS_MAX + 1, NUM_DRAFT_TOKENS_MAX + 1))
    reached, accepted = np.zeros((2, NUM_DRAFT_TOKENS_MAX))
    for start in range(1, num_tokens):
        visit = visits[start]
        if visit <= 0.0:
            continue
        num_proposed, num_steps, known = attempt_at(start)
        contexts += visit * (prompt_tokens + start)
        kinds[num_proposed, num_steps] += visit
        chances = visit * np.array([1.0, *known, 0.0])
        reached[: len(known)] += chances[: len(known)]
        accepted[: len(known)] += chances[1:-1]
        for num_accepted, chance in enumerate(chances[:-1] - chances[1:]):
            visits[min(num_tokens, start + num_accepted + 1)] += chance
    return Rounds(1.0, num_tokens, contexts, reached, accepted, kinds)


class Script:
    """Drafts for one text after another, like a drafter for successive sessions. So a look-up can
    copy from earlier answers."""

    def __init__(self, draft: DraftConfig, temperature: float) -> None:
        self._draft = draft
        self._lookup = build_lookup(draft)
        self._sampling = SamplingParams(temperature=temperature)

    def attempt(self, text: Answer, start: int, bound: int, rule: Rule) -> Attempt:
        """The proposal of at most `bound` tokens after the first `start` tokens of an answer."""
        draft, num_steps, guessed = self._draft, bound, None
        if self._lookup is not None:
            token_ids = (*text.prompt_ids, *text.token_ids[:start])
            request = DraftRequest(
                session_id=f"plan-{text.seed}",
                tenant="",
                token_ids=token_ids,
                prompt_length=len(text.prompt_ids),
                num_draft_tokens=bound,
                sampling=self._sampling,
                rule=rule,
                noise=RoundNoise(text.seed, rule, len(token_ids)),
            )
            guess = self._lookup.guess(request)
            num_steps = min(bound, draft.hybrid_model_tokens)
            if not draft.drafter.name or guess.score >= draft.hybrid_min_score:
                guessed, num_steps = guess.token_ids, 0
        num_proposed = num_steps if guessed is None else len(guessed)
        left = text.token_ids[start : start + num_proposed]
        steps: Sequence[float] = text.steps(rule)[start : start + len(left)]
        if guessed is not None:
            steps = [float(a == b) for a, b in zip(guessed, left, strict=False)]
        return Attempt(num_proposed, num_steps, survival(rule, steps).tolist())

    def rounds(self, text: Answer, rule: Rule, num_draft_tokens: int) -> Rounds:
        def attempt_at(start: int) -> Attempt:
            # A round with n draft tokens may commit n + 1 tokens: the last comes from the target.
            wanted = min(num_draft_tokens, text.max_tokens - start - 1)
            return self.attempt(text, start, wanted, rule) if wanted else Attempt(0, 0, ())

        try:
            return replay(len(text.token_ids), attempt_at, len(text.prompt_ids))
        finally:
            if self._lookup is not None:
                self._lookup.release(f"plan-{text.seed}")


def scripted(
    draft: DraftConfig, sample: Sample, rule: Rule, num_draft_tokens: int
) -> tuple[Rounds, ...]:
    script = Script(draft, sample.temperature)
    return tuple(script.rounds(text, rule, num_draft_tokens) for text in sample.texts)


@dataclass(frozen=True)
class Line:
    """Corrects a time from a cost table to `base_s + factor * time`."""

    base_s: float = 0.0
    factor: float = 1.0

    def at(self, table_s: float) -> float:
        return max(0.0, self.base_s + self.factor * table_s)


def fitted(pairs: Sequence[tuple[float, float]]) -> Line:
    """The least-squares line through `pairs`. A pair has a time from a cost table and a measured
    time. The less certain the factor is, the more it is pulled towards 1 (ridge regression)."""
    if not pairs:
        return Line()
    x, y = np.array(pairs, dtype=np.float64).T
    pull = (NOISE * float(y.mean()) / FACTOR_SPREAD) ** 2 / len(pairs)
    along = float(((x - x.mean()) * (y - y.mean())).mean())
    factor = (along + pull) / (float(x.var()) + pull) if pull > 0 else 1.0
    factor = min(max(factor, 0.0), FACTOR_MAX)
    return Line(float(y.mean() - factor * x.mean()), factor)


@dataclass(frozen=True)
class Option:
    """A way to decode, and its expected speed."""

    rule: Rule
    num_draft_tokens: int
    """K; 0 = plain decoding."""
    look_ahead: int = 0
    """Number of outcomes for which the draft drafts ahead; 0 = rounds wait for the draft."""
    draft_replicas: float = 0
    """Number of drafts per target; below 1 if targets share a draft, 0 if no model drafts."""
    hit_rate: float | None = None
    """Share of rounds whose proposals are ready when the rounds begin; None = no look-ahead."""
    tokens_per_second: float = 0.0
    """Speed of all sessions of a target replica together, including the time for prefills."""
    speedup: float = 1.0
    """Speed relative to plain decoding of the same number of sessions."""
    tokens_per_round: float = 1.0
    proposed_per_round: float = 0.0
    """Mean number of draft tokens of a later round (see `Rounds`)."""
    steps_per_round: float = 0.0
    """Mean number of steps of the draft model in a later round."""


@dataclass(frozen=True)
class ServiceTimes:
    """The times of one target replica and its drafts."""

    target: StepCosts
    draft: StepCosts | None
    """None = a look-up drafts."""
    verify: Line = Line()
    """Turns the time of a target's step into the wait for a verdict."""
    plain: Line = Line()
    """Turns the time of a target's step into the time of a round of plain decoding."""
    wait: Line = Line()
    """Turns the time of the draft's steps into the wait for a proposal."""
    rest_s: float = 0.0
    """Time of a round with a draft, without the waits for the verdict and the proposal."""
    first: Line = Line()
    """Turns the time of the target's step for the prompt into the time to the first token."""
    round_trip_s: float = 0.0
    """Extra round-trip time between coordinator and draft; 0 = both are on one machine."""
    target_max_num_seqs: int = ENGINE_SEQUENCES_MAX
    max_num_seqs: int = ENGINE_SEQUENCES_MAX
    """Largest number of sequences in a step of the draft."""
    shares_device: bool = False
    """Whether draft and target share cores or a device, so that only one computes at a time."""

    def seconds(self, rounds: Rounds, way: Option, sessions: int = 1) -> float:
        """Total time of the later rounds of a session, if `sessions` run at a time."""
        if way.num_draft_tokens == 0:
            table_s = self.target.step_seconds(sessions, sessions, sessions * rounds.context)
            return rounds.num_later * self.plain.at(table_s)
        steps = _SharedSteps(self, rounds, way.draft_replicas or 1)
        if way.hit_rate is None:
            return steps.drafted_seconds(sessions)
        return rounds.num_later * steps.look_ahead_s(sessions, way, way.hit_rate)


@dataclass(frozen=True)
class _SharedSteps:
    """The times of rounds that share steps with rounds of other sessions. All sessions are assumed
    to have the same mean numbers of draft tokens and steps."""

    times: ServiceTimes
    rounds: Rounds
    draft_replicas: float

    def drafted_seconds(self, sessions: int) -> float:
        """Total time of rounds that wait for their drafts. Sessions that share a step form a group.
        Target and draft each serve one group at a time. In a cycle, every session has one round.
        The number of groups is chosen for the shortest cycle."""
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
            for (proposed, steps), number in np.ndenumerate(self.rounds.kinds)
            if number
        )

    def look_ahead_s(self, sessions: int, way: Option, hit_rate: float) -> float:
        """Time of a round whose draft drafts for `way.look_ahead` outcomes while the target
        verifies (Kumar et al., arXiv 2603.03251, theorem 7). A hit takes as long as the slower of
        the target's step and the draft's work for all outcomes. After a miss, the proposal is
        drafted once the outcome is known. A pass of the draft adds one token to each of at most
        `max_num_seqs` outcomes. Each outcome takes K + 1 passes: one for the outcome's last token,
        and K for the tokens of the proposal."""
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
        """Time of a round that waits in no queue. `together` sessions share a step."""
        return self._wait_s(together, steps) + self._verify_s(together, rows) + self.times.rest_s

    def _verify_s(self, together: float, rows: float) -> float:
        all_rows = rows + (together - 1) * (1.0 + self.rounds.proposed_per_round)
        context = together * self.rounds.context
        return self.times.verify.at(self.times.target.step_seconds(all_rows, together, context))

    def _wait_s(self, together: float, steps: float) -> float:
        """The wait for a proposal. It includes the round trip only if the draft runs steps."""
        link_s = self.times.round_trip_s * min(1.0, steps)
        return self.times.wait.at(self._drafted_s(together, steps)) + link_s

    def _drafted_s(self, together: float, steps: float) -> float:
        return steps * self._draft_step_s(max(1.0, together / self.draft_replicas))

    def _draft_step_s(self, sessions: float) -> float:
        context, draft = sessions * self.rounds.context, self.times.draft
        return 0.0 if draft is None else draft.step_seconds(sessions, sessions, context)
