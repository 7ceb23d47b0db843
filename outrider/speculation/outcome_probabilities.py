"""Which outcomes of a round are worth working out, learned from how rounds came out.

    chance that draft token i is accepted     1 / (1 + e^-(a x_i + b_i)), x_i what speaks for it
    chance that the correction is guess j     e^(c s_j) / sum e^(c s), s the guesses' scores

What a draft's evidence is worth (a, c), and the acceptance at each depth beside it (b_i), are
learned by Newton steps on the likelihood of what came, with a memory that fades. The best use of B
guesses is then the B likeliest outcomes (where only averages are known and misses follow a power
law, this is Theorem 12 of arXiv 2603.03251).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.limits import DRAFTED_SEEDS_MAX, LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX
from outrider.speculation.outcome_prediction import RoundGuesses
from outrider.speculation.sampling_params import Rule

_FADE: Final = 1 - 1 / 500
"""What an outcome still counts for after one more."""
_PRIOR_WEIGHT: Final = 1.0
_PRIOR_OFFSET: Final = 0.0
_PRIOR_SHARPNESS: Final = 1.0
"""What evidence is taken to be worth before any outcome: with these the chances under coupled are
those of a draft that is wrong by as much as the noise of one draw ..."""
_PRIOR_INFORMATION: Final = 5.0
"""... and how firmly: as after some twenty outcomes."""
_WEIGHT_MAX: Final = 8.0
_OFFSET_MAX: Final = 6.0
_STEP_MAX: Final = 0.5
"""Of one outcome, which alone says little."""
RANKS_MAX: Final = 16
"""Guesses of one correction."""
_Chances = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Guess:
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


class _Acceptance:
    """The chance of a draft token, by what speaks for it and by its depth."""

    def __init__(self) -> None:
        self._weight = _Coefficient(_PRIOR_WEIGHT, 0.0, _WEIGHT_MAX)
        self._offsets = [
            _Coefficient(_PRIOR_OFFSET, -_OFFSET_MAX, _OFFSET_MAX)
            for _ in range(NUM_DRAFT_TOKENS_MAX)
        ]

    def chance(self, depth: int, evidence: float) -> float:
        """That it is accepted where those before it are."""
        total = self._weight.value * evidence + self._offsets[depth].value
        return 1 / (1 + math.exp(-total))

    def note(self, depth: int, evidence: float, accepted: bool) -> None:
        """It was, or it was refused."""
        chance = self.chance(depth, evidence)
        spread = chance * (1 - chance)
        self._weight.step((accepted - chance) * evidence, spread * evidence**2)
        self._offsets[depth].step(accepted - chance, spread)


class _Corrections:
    """The chance of each guess of a correction, by its score."""

    def __init__(self) -> None:
        self._sharpness = _Coefficient(_PRIOR_SHARPNESS, 0.0, _WEIGHT_MAX)

    def chances(self, scores: _Chances) -> _Chances:
        """Of the guesses of each row [N, R], which fall; rows without a guess are all 0."""
        known = np.isfinite(scores)
        best = np.where(known[:, :1], scores[:, :1], 0.0)
        behind = np.where(known, scores - best, 0.0)
        weights: _Chances = np.exp(self._sharpness.value * behind)
        weights[~known] = 0.0
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        return weights

    def note(self, scores: _Chances, rank: int) -> None:
        """The guess of this rank was right; `scores` [R]."""
        known = scores[np.isfinite(scores)]
        known = known - known[0]
        chances = self.chances(known[None])[0]
        mean = float(chances @ known)
        self._sharpness.step(float(known[rank]) - mean, float(chances @ known**2) - mean**2)


class FanOut:
    """Learns from rounds of one rule, and plans the guesses of the next one."""

    def __init__(self) -> None:
        self._acceptance = _Acceptance()
        self._recovery, self._bonus = _Corrections(), _Corrections()

    def note(self, guesses: RoundGuesses, num_accepted: int, rank: int | None) -> None:
        """A round came out: so many of its draft tokens were accepted, and its correction was the
        guess of this rank (None = it was not among them)."""
        for depth in range(min(num_accepted + 1, guesses.num_drafted)):
            evidence = float(guesses.evidence[depth])
            self._acceptance.note(depth, evidence, depth < num_accepted)
        if rank is not None:
            law = self._bonus if num_accepted == guesses.num_drafted else self._recovery
            law.note(guesses.scores[num_accepted], rank)

    def plan(self, guesses: RoundGuesses, num_guesses: int) -> list[Guess]:
        """The `num_guesses` likeliest outcomes of a round, the likeliest first; `LOOK_AHEAD_MAX` at
        most, and fewer where no more are guessed."""
        evidence = guesses.evidence.tolist()
        accepted = [self._acceptance.chance(*place) for place in enumerate(evidence)]
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
            Guess(place // width, place % width, chance)
            for place, chance in zip(chosen.tolist(), flat[chosen].tolist(), strict=True)
            if chance > 0.0
        ]


class FanOuts:
    """What the sessions of a draft replica learn from each other, by rule and temperature.

    Under rules whose noise is keyed by the round, only the first session of each seed shares it: a
    later one has the numbers that the first one's outcomes depend on, so it learns alone."""

    def __init__(self, seeds_max: int = DRAFTED_SEEDS_MAX) -> None:
        """When `seeds_max` seeds are known they are forgotten, with all that their sessions have
        told."""
        self._seeds_max = seeds_max
        self._shared: dict[tuple[Rule, float], FanOut] = {}
        self._first: dict[int, str] = {}
        """The session that had each seed first."""
        self._alone: dict[str, FanOut] = {}
        """By session, of those whose seed another one had before."""

    def of(self, session_id: str, seed: int, rule: Rule, temperature: float) -> FanOut:
        """What a session reads and adds to. How far a draft's scores can be trusted depends on the
        temperature, which is taken to the next tenth."""
        if not rule.absolute_noise:
            if seed not in self._first and len(self._first) >= self._seeds_max:
                self._first.clear()
                self._shared = {at: one for at, one in self._shared.items() if at[0].absolute_noise}
            if self._first.setdefault(seed, session_id) != session_id:
                return self._alone.setdefault(session_id, FanOut())
        return self._shared.setdefault((rule, round(temperature, 1)), FanOut())

    def forget(self, session_id: str) -> None:
        """The session has ended; its seed stays known."""
        self._alone.pop(session_id, None)
