"""Predicts the outcome of a round before the target's verdict.

A round of K draft tokens has K + 1 kinds of outcome: n tokens are accepted, and a correction
follows (for n = K the bonus). The correction wins a race over the target's distribution, or over
the residual after a rejection. Every process knows the noise of this race. So a draft runs the same
race over its own distribution q, and guesses the first tokens to arrive (ordered by log q + Gumbel
noise) instead of the likeliest ones. Under coupled and with q = p this is the target's race.

Acceptance of draft token i is predicted in a similar way. Under coupled and greedy the race decides
it: the larger the token's lead over the next one, the more certain is its acceptance. Under token
and block a uniform u decides it: the smaller u, the likelier is acceptance.

Predictions use the noise of the current round. Tokens that are drafted for an outcome have the next
round's noise, so predictions say nothing about them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import check
from outrider.limits import (
    DRAFTED_SEEDS_MAX,
    LOOK_AHEAD_MAX,
    NUM_DRAFT_TOKENS_MAX,
)
from outrider.speculation.draft_sampling import LikelyTokens, arrival_order, likely_tokens
from outrider.speculation.gumbel_max import IntArray, RealArray
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import draft_tree
from outrider.speculation.random_streams import RoundNoise, verdict_keys
from outrider.speculation.sampling_params import Rule, SamplingParams

EVIDENCE_MAX = 16.0
"""Bound of the evidence for or against a draft token. A probability of e^-16 is practically 0."""


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeGuesses:
    """What a draft predicts for a round of K draft tokens. `OutcomeModel` turns this into
    probabilities."""

    corrections: list[list[int]]
    """For n = 0..K accepted tokens: the guesses of the correction, best first, without the rejected
    draft token. The last row, the bonus, may be missing."""
    scores: RealArray
    """[K + 1, R] or [K, R]: log q + Gumbel noise of each guess, up to a constant for each row;
    under greedy the logit. Each row falls, and is -inf after the last guess."""
    evidence: RealArray
    """[K]: evidence that each draft token is accepted, within +-`EVIDENCE_MAX`. Under coupled and
    greedy: its score minus that of the best other token. Under token and block: -log u."""

    @property
    def num_drafted(self) -> int:
        return len(self.evidence)

    def rank(self, num_accepted: int, correction: int) -> int | None:
        """The index of this correction among the guesses; None if it is not one of them."""
        guessed = self.corrections[num_accepted] if num_accepted < len(self.corrections) else []
        return guessed.index(correction) if correction in guessed else None


def likely_rows(
    logits: Tensor, params: SamplingParams, vocabulary: DraftVocabulary | None = None
) -> LikelyTokens:
    """The likeliest tokens of a draft's `logits` [R, V] and their masses (under greedy their
    logits), for parameters without penalties. With a `vocabulary` the logits are those of its
    columns, and tokens have the target's ids. Raises as `likely_tokens` does."""
    check(not params.penalised, "penalties would count draft tokens")
    if vocabulary is not None:
        params = vocabulary.params(params)
    if not params.greedy:
        return likely_tokens(logits, params, vocabulary=vocabulary)
    found = logits.topk(min(RANKS_MAX + 1, logits.shape[1]), dim=1)
    values, columns = torch.stack([found.values.double(), found.indices.double()]).cpu().numpy()
    ids = columns.astype(np.int64)
    return LikelyTokens(ids if vocabulary is None else vocabulary.token_ids[ids], values)


def guess_outcomes(
    rows: LikelyTokens,
    params: SamplingParams,
    noise: RoundNoise,
    drafted: Sequence[int],
    count: int,
) -> OutcomeGuesses:
    """Guesses up to `count` corrections for each possible number of accepted tokens, for the tokens
    `drafted` in the round of `noise`. Row n of `rows` [K + 1] has the likely tokens after the first
    n draft tokens, from `likely_rows`; except under greedy, the rows that the tokens were drawn
    from are equal to those. Without the last row the bonus is not guessed."""
    check(len(rows) in (len(drafted), len(drafted) + 1), "one row for each outcome")
    if params.greedy:
        ids, scores = rows.ids, rows.mass
    else:
        keys = verdict_keys([noise], [draft_tree((), len(drafted))])
        ids, scores = arrival_order(rows, keys[: len(rows)])
    own, ids, scores = _apart(drafted, ids[:, : count + 1], scores[:, : count + 1])
    evidence = _evidence(noise, drafted, own, scores[: len(drafted), 0])
    scores = scores[:, :count]
    sizes = np.isfinite(scores).sum(axis=1).tolist()
    corrections = [row[:size] for row, size in zip(ids.tolist(), sizes, strict=True)]
    return OutcomeGuesses(corrections, scores, evidence)


def _apart(
    drafted: Sequence[int], ids: IntArray, scores: RealArray
) -> tuple[RealArray, IntArray, RealArray]:
    """Removes each draft token from its row (the first K rows). Returns the tokens' scores [K],
    -inf if not listed, and the rows without them."""
    num_drafted = len(drafted)
    found = np.zeros(ids.shape, dtype=bool)
    found[:num_drafted] = ids[:num_drafted] == np.array(drafted, dtype=np.int64)[:, None]
    own = np.where(found, scores, -np.inf).max(axis=1)[:num_drafted]
    order = np.argsort(found, axis=1, kind="stable")
    scores = np.where(found, -np.inf, scores)
    return own, np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)


def _evidence(
    noise: RoundNoise, drafted: Sequence[int], own: RealArray, others: RealArray
) -> RealArray:
    """`own` [K] are the scores of the draft tokens, -inf if not listed; `others` those of the best
    other guesses."""
    if not noise.rule.absolute_noise:
        found = -np.log(np.fromiter(noise.accept_uniforms(len(drafted)), np.float64))
    else:
        with np.errstate(invalid="ignore"):
            found = np.nan_to_num(own - others, nan=0.0)
    return np.clip(found, -EVIDENCE_MAX, EVIDENCE_MAX)


_FADE = 1 - 1 / 500
"""Factor by which past outcomes lose weight with each new one."""
_PRIOR_WEIGHT = 1.0
_PRIOR_OFFSET = 0.0
_PRIOR_SHARPNESS = 1.0
"""Initial coefficients. Under coupled they suit a draft whose logits have errors of the size of the
Gumbel noise."""
_PRIOR_INFORMATION = 5.0
"""Initial information about each coefficient. It weighs as much as about twenty outcomes."""
_WEIGHT_MAX = 8.0
_OFFSET_MAX = 6.0
_STEP_MAX = 0.5
"""Largest change by a single outcome."""
RANKS_MAX = 16
"""Most guesses of one correction."""


class LikelyOutcome(NamedTuple):
    """A predicted outcome, and its probability."""

    num_accepted: int
    rank: int
    """Index of the right guess among those of the correction."""
    chance: float


class _Coefficient:
    """One coefficient of a model, and its observed information: how much has been learned about
    it."""

    def __init__(self, value: float, low: float, high: float) -> None:
        self.value = value
        self._low = low
        self._high = high
        self._information = _PRIOR_INFORMATION

    def step(self, slope: float, information: float) -> None:
        """Updates the value by one outcome: by the slope of its log likelihood, and by the negated
        curvature, which is its information."""
        self._information = self._information * _FADE + information
        step = min(max(slope / self._information, -_STEP_MAX), _STEP_MAX)
        self.value = min(max(self.value + step, self._low), self._high)


class _Corrections(_Coefficient):
    """The probability of each guess of a correction, from its score."""

    def chances(self, scores: RealArray) -> RealArray:
        """The probabilities of the guesses of each row [N, R], whose `scores` fall. A row without
        guesses has zeros."""
        known = np.isfinite(scores)
        best = np.where(known[:, :1], scores[:, :1], 0.0)
        behind = np.where(known, scores - best, 0.0)
        weights: RealArray = np.exp(self.value * behind)
        weights[~known] = 0.0
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        return weights

    def note(self, scores: RealArray, rank: int) -> None:
        """Learns that the guess of this rank was right; `scores` [R]."""
        known = scores[np.isfinite(scores)]
        known = known - known[0]
        chances = self.chances(known[None])[0]
        mean = float(chances @ known)
        self.step(float(known[rank]) - mean, float(chances @ known**2) - mean**2)


class OutcomeModel:
    """Learns from the rounds of one rule, and chooses the likeliest outcomes of the next one."""

    def __init__(self) -> None:
        self._weight = _Coefficient(_PRIOR_WEIGHT, 0.0, _WEIGHT_MAX)
        self._offsets = [
            _Coefficient(_PRIOR_OFFSET, -_OFFSET_MAX, _OFFSET_MAX)
            for _ in range(NUM_DRAFT_TOKENS_MAX)
        ]
        self._recovery, self._bonus = (
            _Corrections(_PRIOR_SHARPNESS, 0.0, _WEIGHT_MAX) for _ in range(2)
        )

    def _acceptance(self, depth: int, evidence: float) -> float:
        """The probability that a draft token of this depth and evidence is accepted, if all before
        it are."""
        total = self._weight.value * evidence + self._offsets[depth].value
        return 1 / (1 + math.exp(-total))

    def note(self, guesses: OutcomeGuesses, num_accepted: int, rank: int | None) -> None:
        """Learns from a round: how many draft tokens were accepted, and which guess the correction
        was (None = none of them)."""
        for depth in range(min(num_accepted + 1, guesses.num_drafted)):
            evidence = float(guesses.evidence[depth])
            chance = self._acceptance(depth, evidence)
            surprise, spread = (depth < num_accepted) - chance, chance * (1 - chance)
            self._weight.step(surprise * evidence, spread * evidence**2)
            self._offsets[depth].step(surprise, spread)
        if rank is not None:
            law = self._bonus if num_accepted == guesses.num_drafted else self._recovery
            law.note(guesses.scores[num_accepted], rank)

    def plan(self, guesses: OutcomeGuesses, num_guesses: int) -> list[LikelyOutcome]:
        """The `num_guesses` likeliest outcomes of a round, likeliest first: at most
        `LOOK_AHEAD_MAX`, and no more than were guessed."""
        evidence = guesses.evidence.tolist()
        accepted = [self._acceptance(*place) for place in enumerate(evidence)]
        reached = np.cumprod([1.0, *accepted])
        ends = reached * (1 - np.array([*accepted, 0.0]))
        num_drafted = guesses.num_drafted
        rows = [
            self._recovery.chances(guesses.scores[:num_drafted]),
            self._bonus.chances(guesses.scores[num_drafted:]),
        ]
        chances = np.concatenate(rows)
        chances *= ends[: len(chances), None]
        flat = chances.ravel()
        chosen = np.argsort(-flat, kind="stable")[: min(num_guesses, LOOK_AHEAD_MAX)]
        width = chances.shape[1]
        return [
            LikelyOutcome(place // width, place % width, chance)
            for place, chance in zip(chosen.tolist(), flat[chosen].tolist(), strict=True)
            if chance > 0.0
        ]


class OutcomeModels:
    """The models that the sessions of a draft replica share, by rule and temperature.

    Under rules whose noise is keyed by the round, only the first session of each seed uses the
    shared model. A later session with this seed has the same noise, on which the first one's
    outcomes depend, so it has a model of its own.
    """

    def __init__(self, seeds_max: int = DRAFTED_SEEDS_MAX) -> None:
        """After `seeds_max` seeds, all seeds are forgotten, with the models that their sessions
        have taught."""
        self._seeds_max = seeds_max
        self._shared: dict[tuple[Rule, float], OutcomeModel] = {}
        self._first: dict[int, str] = {}
        """The first session of each seed."""
        self._alone: dict[str, OutcomeModel] = {}
        """The models of sessions whose seed was used before."""

    def of(self, session_id: str, seed: int, rule: Rule, temperature: float) -> OutcomeModel:
        """The model that a session uses. How far a draft's scores can be trusted depends on the
        temperature, which is rounded to one decimal."""
        if not rule.absolute_noise:
            if seed not in self._first and len(self._first) >= self._seeds_max:
                self._first.clear()
                self._shared = {at: one for at, one in self._shared.items() if at[0].absolute_noise}
            if self._first.setdefault(seed, session_id) != session_id:
                return self._alone.setdefault(session_id, OutcomeModel())
        return self._shared.setdefault((rule, round(temperature, 1)), OutcomeModel())

    def forget(self, session_id: str) -> None:
        """Forgets the own model of a session that has ended. Its seed stays known."""
        self._alone.pop(session_id, None)
