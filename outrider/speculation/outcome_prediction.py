"""Guessing what a round will come to, before the target says it.

A round of K draft tokens has K + 1 kinds of outcome: n of them are accepted, and a correction
follows (n = K: the bonus). The correction is the winner of a race over the target's distribution or
over what is left of it after a refusal, in which each token has a number that anyone can compute.
So a draft does better than to guess its likeliest tokens: it runs the same race over its own
distribution q and takes the first tokens that arrive (an order by log q + Gumbel noise). Under
coupled that race, with q = p, is the target's own.

Whether draft token i is accepted is foretold likewise. Under coupled and greedy it is what its race
had to decide, and is the surer the further it is ahead of the next token. Under token and block a
number u is drawn for it, and a small one is sure to pass.

The numbers are those of the current round. What is drafted for an outcome has numbers of its own,
so that guessing says nothing about them.
"""

from __future__ import annotations

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
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

EVIDENCE_MAX = 16.0
"""Of a draft token's acceptance: e^-16 is as good as never."""


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeGuesses:
    """What a draft expects of a round of K draft tokens, before anything is known of how right it
    is."""

    corrections: list[list[int]]
    """For n = 0..K accepted tokens what the correction may be, the best guess first; never the
    draft token that must have been refused. The last of them, the bonus, may be lacking."""
    scores: RealArray
    """[K + 1, R], or [K, R]: of each guess log q + g up to a number for each row, or under greedy
    the logit; falling, and -inf behind the last of them."""
    evidence: RealArray
    """[K]: how much speaks for each draft token: under coupled and greedy its score less that of
    the best guess beside it, under token and block -log u; at most `EVIDENCE_MAX` either way."""

    @property
    def num_drafted(self) -> int:
        return len(self.evidence)

    def rank(self, num_accepted: int, correction: int) -> int | None:
        """Which guess this correction is; None if it is none."""
        guessed = self.corrections[num_accepted] if num_accepted < len(self.corrections) else []
        return guessed.index(correction) if correction in guessed else None


def likely_rows(
    logits: Tensor, params: SamplingParams, vocabulary: DraftVocabulary | None = None
) -> LikelyTokens:
    """The likeliest tokens of a draft's `logits` [R, V] under parameters without penalties, and
    their masses, under greedy their logits; with a `vocabulary` logits are its columns, and tokens
    have the target's ids. Raises what `target_probabilities` does."""
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
    """Guesses up to `count` corrections for each number of tokens that may be accepted of those
    that were `drafted` in the round of `noise`. `rows` [K + 1] are the draft's, as `likely_rows`
    or, but for greedy, what the tokens were drawn from: row n says what follows the first n draft
    tokens. Without the last one the bonus is not guessed."""
    check(len(rows) in (len(drafted), len(drafted) + 1), "one row for each outcome")
    if params.greedy:
        ids, scores = rows.ids, rows.mass
    else:
        keys = noise.tree_keys(draft_tree((), len(drafted)))
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
    """Takes the draft tokens out of their rows, the first K: their scores [K], -inf where they are
    not listed, and the rows without them."""
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
    """`own` [K] are the draft tokens' scores, -inf where they are not among the first, and `others`
    those of the best guesses beside them."""
    if not noise.rule.absolute_noise:
        found = -np.log(np.fromiter(noise.accept_uniforms(len(drafted)), np.float64))
    else:
        with np.errstate(invalid="ignore"):
            found = np.nan_to_num(own - others, nan=0.0)
    return np.clip(found, -EVIDENCE_MAX, EVIDENCE_MAX)


_FADE = 1 - 1 / 500
"""What an outcome still counts for after one more."""
_PRIOR_WEIGHT = 1.0
_PRIOR_OFFSET = 0.0
_PRIOR_SHARPNESS = 1.0
"""What evidence is taken to be worth before any outcome: with these the chances under coupled are
those of a draft that is wrong by as much as the noise of one draw ..."""
_PRIOR_INFORMATION = 5.0
"""... and how firmly: as after some twenty outcomes."""
_WEIGHT_MAX = 8.0
_OFFSET_MAX = 6.0
_STEP_MAX = 0.5
"""Of one outcome, which alone says little."""
RANKS_MAX = 16
"""Guesses of one correction."""


class LikelyOutcome(NamedTuple):
    """An outcome: so many draft tokens accepted, and which guess of the correction is right."""

    num_accepted: int
    rank: int
    """From 0."""
    chance: float


class _Coefficient:
    """One number of a law, and how much has been learned of it (its observed information)."""

    def __init__(self, value: float, low: float, high: float) -> None:
        self.value = value
        self._low = low
        self._high = high
        self._information = _PRIOR_INFORMATION

    def step(self, slope: float, information: float) -> None:
        """An outcome's log likelihood has this slope, and minus this curvature."""
        self._information = self._information * _FADE + information
        step = min(max(slope / self._information, -_STEP_MAX), _STEP_MAX)
        self.value = min(max(self.value + step, self._low), self._high)


class _Corrections(_Coefficient):
    """The chance of each guess of a correction, by its score."""

    def chances(self, scores: RealArray) -> RealArray:
        """Of the guesses of each row [N, R], which fall; rows without a guess are all 0."""
        known = np.isfinite(scores)
        best = np.where(known[:, :1], scores[:, :1], 0.0)
        behind = np.where(known, scores - best, 0.0)
        weights: RealArray = np.exp(self.value * behind)
        weights[~known] = 0.0
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        return weights

    def note(self, scores: RealArray, rank: int) -> None:
        """The guess of this rank was right; `scores` [R]."""
        known = scores[np.isfinite(scores)]
        known = known - known[0]
        chances = self.chances(known[None])[0]
        mean = float(chances @ known)
        self.step(float(known[rank]) - mean, float(chances @ known**2) - mean**2)


class OutcomeModel:
    """Learns from rounds of one rule, and plans the guesses of the next one."""

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
        """The chance of a draft token where those before it are accepted, by its depth and by what
        speaks for it."""
        total = self._weight.value * evidence + self._offsets[depth].value
        return 1 / (1 + math.exp(-total))

    def note(self, guesses: OutcomeGuesses, num_accepted: int, rank: int | None) -> None:
        """A round came out: so many of its draft tokens were accepted, and its correction was the
        guess of this rank (None = it was not among them)."""
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
        """The `num_guesses` likeliest outcomes of a round, the likeliest first; `LOOK_AHEAD_MAX` at
        most, and fewer where no more are guessed."""
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
    """What the sessions of a draft replica learn from each other, by rule and temperature.

    Under rules whose noise is keyed by the round, only the first session of each seed shares it: a
    later one has the numbers that the first one's outcomes depend on, so it learns alone."""

    def __init__(self, seeds_max: int = DRAFTED_SEEDS_MAX) -> None:
        """When `seeds_max` seeds are known they are forgotten, with all that their sessions have
        told."""
        self._seeds_max = seeds_max
        self._shared: dict[tuple[Rule, float], OutcomeModel] = {}
        self._first: dict[int, str] = {}
        """The session that had each seed first."""
        self._alone: dict[str, OutcomeModel] = {}
        """By session, of those whose seed another one had before."""

    def of(self, session_id: str, seed: int, rule: Rule, temperature: float) -> OutcomeModel:
        """What a session reads and adds to. How far a draft's scores can be trusted depends on the
        temperature, which is taken to the next tenth."""
        if not rule.absolute_noise:
            if seed not in self._first and len(self._first) >= self._seeds_max:
                self._first.clear()
                self._shared = {at: one for at, one in self._shared.items() if at[0].absolute_noise}
            if self._first.setdefault(seed, session_id) != session_id:
                return self._alone.setdefault(session_id, OutcomeModel())
        return self._shared.setdefault((rule, round(temperature, 1)), OutcomeModel())

    def forget(self, session_id: str) -> None:
        """The session has ended; its seed stays known."""
        self._alone.pop(session_id, None)
