"""Predicts the outcome of a round before the target's verdict.

A round of K draft tokens has K + 1 kinds of outcome. For n = 0..K, n draft tokens are accepted, and
a correction follows (for n = K, the bonus). The target draws the correction by a race
(`gumbel_max.py`). The draft knows the noise of this race, and runs the race over its own
distribution q. Its guesses are the tokens with the highest log q + Gumbel noise. The draft also
predicts acceptance. Under coupled and greedy, acceptance is likelier if the draft token leads the
race by more. Under token and block, acceptance is likelier if the uniform random number u that
tests the token is smaller.

Predictions do not bias the output. Under token and block, tokens that are drafted for an outcome
use the next round's noise, which is independent of the noise that predictions use. Under coupled
and greedy, draft tokens never change which tokens are committed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outrider.errors import check
from outrider.limits import DRAFTED_SEEDS_MAX, LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.speculation.draft_sampling import LikelyTokens, arrival_order
from outrider.speculation.gumbel_max import RealArray
from outrider.speculation.random_streams import RoundNoise, verdict_keys
from outrider.speculation.sampling_params import Rule, SamplingParams

EVIDENCE_MAX = 16.0


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeGuesses:
    """A draft's guesses for a round of K draft tokens."""

    corrections: list[list[int]]
    """Row n has the guesses of the correction after n accepted tokens, best first. It lacks draft
    token n + 1, which was rejected. Row K, for the bonus, may be missing."""
    scores: RealArray
    """[K + 1, R], or [K, R] without the bonus: scores of at most R guesses a row, up to a constant
    for each row. A score is log q + Gumbel noise, or log q if the parameters are greedy. Scores
    descend in each row, and are -inf after the last guess."""
    evidence: RealArray
    """[K]: the evidence that each draft token is accepted, within +-`EVIDENCE_MAX`. Under coupled
    and greedy: the token's score minus the best other score of its row. Under token and block:
    -log u."""

    @property
    def num_drafted(self) -> int:
        return len(self.evidence)

    def rank(self, num_accepted: int, correction: int) -> int | None:
        """The index of `correction` in `corrections[num_accepted]`. None if it was not guessed."""
        guessed = self.corrections[num_accepted] if num_accepted < len(self.corrections) else []
        return guessed.index(correction) if correction in guessed else None


def guess_outcomes(
    rows: LikelyTokens, params: SamplingParams, noise: RoundNoise, drafted: Sequence[int]
) -> OutcomeGuesses:
    """For each number n of accepted tokens of `drafted`, guesses up to `RANKS_MAX` corrections.
    Row n of `rows` [K + 1] has the `likely_tokens` after n draft tokens. If row K is missing, the
    bonus is not guessed."""
    fits = len(rows) in (len(drafted), len(drafted) + 1)
    check(fits, f"{len(rows)} rows of likely tokens do not fit {len(drafted)} draft tokens")
    if params.greedy:
        with np.errstate(divide="ignore"):
            ids, scores = rows.ids, np.log(rows.mass)
    else:
        keys = verdict_keys([noise], [len(drafted) + 1])
        ids, scores = arrival_order(rows, keys[: len(rows)])
    ids, scores = ids[:, : RANKS_MAX + 1], scores[:, : RANKS_MAX + 1]
    num_drafted = len(drafted)
    is_drafted = np.zeros(ids.shape, dtype=bool)
    is_drafted[:num_drafted] = ids[:num_drafted] == np.array(drafted, dtype=np.int64)[:, None]
    own = np.where(is_drafted, scores, -np.inf).max(axis=1)[:num_drafted]
    order = np.argsort(is_drafted, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, 1)
    scores = np.take_along_axis(np.where(is_drafted, -np.inf, scores), order, 1)[:, :RANKS_MAX]
    if noise.rule.absolute_noise:
        with np.errstate(invalid="ignore"):
            evidence = np.nan_to_num(own - scores[:num_drafted, 0], nan=0.0)
    else:
        evidence = -np.log(np.fromiter(noise.accept_uniforms(num_drafted), np.float64))
    evidence = np.clip(evidence, -EVIDENCE_MAX, EVIDENCE_MAX)
    sizes = np.isfinite(scores).sum(axis=1).tolist()
    corrections = [row[:size] for row, size in zip(ids.tolist(), sizes, strict=True)]
    return OutcomeGuesses(corrections, scores, evidence)


_FADE = 1 - 1 / 500  # each new outcome multiplies the weight of earlier outcomes by this
_PRIOR_INFORMATION = 5.0
"""Initial Fisher information of each coefficient. About twenty outcomes give as much."""
_WEIGHT_MAX, _OFFSET_MAX = 8.0, 6.0
_STEP_MAX = 0.5  # largest change of a coefficient by one outcome
RANKS_MAX = 16  # largest number of guesses of one correction


class LikelyOutcome(NamedTuple):
    num_accepted: int
    rank: int
    """Index of the outcome's correction in row `num_accepted` of `OutcomeGuesses.corrections`."""
    chance: float


class _Coefficient:
    """A coefficient of a model, and its observed Fisher information."""

    def __init__(self, value: float, low: float, high: float) -> None:
        self.value, self._low, self._high = value, low, high
        self._information = _PRIOR_INFORMATION

    def step(self, slope: float, information: float) -> None:
        """Learns from one outcome. `slope` is the derivative of the outcome's log likelihood, and
        `information` is the negated second derivative."""
        self._information = self._information * _FADE + information
        step = min(max(slope / self._information, -_STEP_MAX), _STEP_MAX)
        self.value = min(max(self.value + step, self._low), self._high)


class _Corrections(_Coefficient):
    """Predicts which guess of a correction is right, by a softmax of coefficient times score."""

    def chances(self, scores: RealArray) -> RealArray:
        """The probabilities [N, R] that guesses with these `scores` [N, R] are right."""
        known = np.isfinite(scores)
        best = np.where(known[:, :1], scores[:, :1], 0.0)
        behind = np.where(known, scores - best, 0.0)
        weights: RealArray = np.exp(self.value * behind)
        weights[~known] = 0.0
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        return weights

    def note(self, scores: RealArray, rank: int) -> None:
        """Learns that, of the guesses with these `scores` [R], guess `rank` was right."""
        known = scores[np.isfinite(scores)]
        known = known - known[0]
        chances = self.chances(known[None])[0]
        mean = float(chances @ known)
        self.step(float(known[rank]) - mean, float(chances @ known**2) - mean**2)


class OutcomeModel:
    """Predicts outcomes of rounds, and learns from outcomes of earlier rounds."""

    def __init__(self) -> None:
        # Under coupled, these values fit a draft whose logits have errors as large as Gumbel noise.
        self._weight = _Coefficient(1.0, 0.0, _WEIGHT_MAX)
        offset = 0.0, -_OFFSET_MAX, _OFFSET_MAX
        self._offsets = [_Coefficient(*offset) for _ in range(NUM_DRAFT_TOKENS_MAX)]
        self._recovery = _Corrections(1.0, 0.0, _WEIGHT_MAX)
        self._bonus = _Corrections(1.0, 0.0, _WEIGHT_MAX)

    def _acceptance(self, index: int, evidence: float) -> float:
        """The probability that a draft token is accepted if all earlier ones are accepted."""
        total = self._weight.value * evidence + self._offsets[index].value
        return 1 / (1 + math.exp(-total))

    def note(self, guesses: OutcomeGuesses, num_accepted: int, rank: int | None) -> None:
        """Learns from a round. `rank` is the correction's `OutcomeGuesses.rank`."""
        for index in range(min(num_accepted + 1, guesses.num_drafted)):
            evidence = float(guesses.evidence[index])
            chance = self._acceptance(index, evidence)
            surprise, spread = (index < num_accepted) - chance, chance * (1 - chance)
            self._weight.step(surprise * evidence, spread * evidence**2)
            self._offsets[index].step(surprise, spread)
        if rank is not None:
            law = self._bonus if num_accepted == guesses.num_drafted else self._recovery
            law.note(guesses.scores[num_accepted], rank)

    def plan(self, guesses: OutcomeGuesses, num_guesses: int) -> list[LikelyOutcome]:
        """At most `num_guesses` and `LOOK_AHEAD_MAX` outcomes, the likeliest first."""
        accepted = [self._acceptance(*place) for place in enumerate(guesses.evidence.tolist())]
        reached = np.cumprod([1.0, *accepted])
        ends = reached * (1 - np.array([*accepted, 0.0]))
        rejected, whole = np.split(guesses.scores, [guesses.num_drafted])
        chances = np.concatenate([self._recovery.chances(rejected), self._bonus.chances(whole)])
        chances *= ends[: len(chances), None]
        flat = chances.ravel()
        chosen = np.argsort(-flat, kind="stable")[: min(num_guesses, LOOK_AHEAD_MAX)]
        num_accepted, rank = np.divmod(chosen, chances.shape[1])
        outcomes = zip(num_accepted.tolist(), rank.tolist(), flat[chosen].tolist(), strict=True)
        return [LikelyOutcome(*outcome) for outcome in outcomes if outcome[2] > 0.0]


class OutcomeModels:
    """The models that the sessions of a draft replica share, by rule and temperature. Under token
    and block, sessions with the same seed have the same noise. A shared model that learned from
    this noise in one session must not influence another session with the same seed. So only the
    first session with a seed uses a shared model, and each later session has its own model. A
    session that was taken over (a new epoch) counts as a later session, because it may repeat
    rounds that the store has lost."""

    def __init__(self, seeds_max: int = DRAFTED_SEEDS_MAX) -> None:
        """After `seeds_max` seeds, forgets all seeds, and the shared models of token and block."""
        self._seeds_max = seeds_max
        self._shared: dict[tuple[Rule, float], OutcomeModel] = {}
        self._first: dict[int, tuple[str, int]] = {}  # maps a seed to its first session and epoch
        self._alone: dict[str, tuple[int, OutcomeModel]] = {}  # session -> epoch, its own model

    def of(
        self, session_id: str, epoch: int, seed: int, rule: Rule, temperature: float
    ) -> OutcomeModel:
        """The model of a session. How well scores predict outcomes depends on the temperature."""
        if not rule.absolute_noise:
            if seed not in self._first and len(self._first) >= self._seeds_max:
                self._first.clear()
                self._shared = {
                    at: model for at, model in self._shared.items() if at[0].absolute_noise
                }
            if self._first.setdefault(seed, (session_id, epoch)) != (session_id, epoch):
                known, model = self._alone.get(session_id, (epoch, OutcomeModel()))
                if known != epoch:
                    model = OutcomeModel()
                self._alone[session_id] = epoch, model
                return model
        return self._shared.setdefault((rule, round(temperature, 1)), OutcomeModel())

    def forget(self, session_id: str) -> None:
        """Drops the model that only this session uses. The session's seed stays known."""
        self._alone.pop(session_id, None)
