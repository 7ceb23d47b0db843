"""The rounds that a text of the target takes, and how much of each proposal is accepted.

A lossless verifier commits the target's own text x, whatever is drafted. So given x, rounds follow
each other like a chain whose steps can be computed, and no round need be played. With p and q after
every transform, at each place of the text:

| rule | chance that the first n of a proposal are accepted, given the text |
| --- | --- |
| token | prod_{i<=n} min(1, q(x_i) / p(x_i)) |
| block | min_{m<=n} min(1, prod_{i<=m} q(x_i) / p(x_i)) |
| coupled | prod_{i<=n} P(the draft draws x_i, given that the target does) |
| greedy | 1 while x_i is the draft's likeliest, then 0 |

Token: the chance to draw x and accept it is prod min(p, q), and the text begins with x with chance
prod p; what follows an accepted prefix is the target's own again. Block: P(tau >= n, x) is
q(x_1..x_n) pi_n (Sun et al., ICLR 2025, lemma 3), and pi_n q / p telescopes to the minimum above.
Coupled: a race over p and q with the same noise, see `benchmarks.acceptance.matched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.acceptance import Answer, Array, Sample
from outrider.config import DraftConfig
from outrider.drafters.drafter import DraftRequest
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.replica.process_setup import build_lookup
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams


def survival(rule: Rule, steps: Sequence[float]) -> Array:
    """The chances, for n = 1..len(steps), that n tokens or more of a proposal for these places are
    accepted, given the text. `steps` are as of `Answer.steps`."""
    values = np.asarray(steps, dtype=np.float64)
    if rule is not Rule.BLOCK:
        return np.minimum(values, 1.0).cumprod()
    with np.errstate(divide="ignore"):  # In logarithms, as a product may be huge and the next 0.
        products = np.exp(np.minimum(np.cumsum(np.log(values)), 0.0))
    return np.asarray(np.minimum.accumulate(products))


class Attempt(NamedTuple):
    """What a drafter would propose at one place of a text."""

    num_proposed: int
    num_steps: int
    """Of the draft's model; 0 where a look-up proposes, or nothing is proposed."""
    survival: Sequence[float]
    """Of the proposed tokens whose place the text still has."""


_DEPTHS = NUM_DRAFT_TOKENS_MAX
_KINDS = _DEPTHS + 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """Expected rounds over any number of texts, as one row of sums: rows can be added."""

    sums: Array
    """Texts; tokens; rounds; contexts; how often each depth was reached, and accepted; and how
    often so many tokens were proposed after so many steps of the draft's model."""

    @property
    def num_texts(self) -> float:
        """Each of which has a first round, without a draft."""
        return float(self.sums[0])

    @property
    def num_tokens(self) -> float:
        """Committed."""
        return float(self.sums[1])

    @property
    def num_rounds(self) -> float:
        """With each text's first one."""
        return float(self.sums[2])

    @property
    def num_later(self) -> float:
        """Without these."""
        return self.num_rounds - self.num_texts

    @property
    def context(self) -> float:
        """Tokens that the session had when a round began, mean over all but the first ones."""
        return self._mean(self.sums[3])

    @property
    def accepted(self) -> Array:
        """Of each depth from 1: how often it was accepted, and all before it."""
        return self.sums[4 + _DEPTHS : 4 + 2 * _DEPTHS]

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens a round."""
        return self.num_tokens / self.num_rounds

    @property
    def by_position(self) -> tuple[float | None, ...]:
        """The chance, for depth 1, 2, ..., that a token is accepted given that those before it
        were; None where none came so far."""
        pairs = zip(self.accepted.tolist(), self.sums[4 : 4 + _DEPTHS].tolist(), strict=True)
        return tuple(accepted / reached if reached > 0 else None for accepted, reached in pairs)

    @property
    def proposed_per_round(self) -> float:
        """Draft tokens, over all rounds but the first ones; 0 without any."""
        return self._mean(sum(proposed * number for proposed, _, number in self.kinds()))

    @property
    def steps_per_round(self) -> float:
        """Steps of the draft's model, over the same rounds."""
        return self._mean(sum(steps * number for _, steps, number in self.kinds()))

    def kinds(self) -> Iterator[tuple[int, int, float]]:
        """Of all rounds but the first ones: tokens proposed, steps, and how many such rounds."""
        kinds = self.sums[4 + 2 * _DEPTHS :].reshape(_KINDS, _KINDS)
        for proposed, steps in np.argwhere(kinds).tolist():
            yield proposed, steps, float(kinds[proposed, steps])

    def _mean(self, total: float) -> float:
        return float(total) / self.num_later if self.num_later > 0 else 0.0


def total(parts: Sequence[Rounds]) -> Rounds:
    """All of them together."""
    return Rounds(np.sum([part.sums for part in parts], axis=0))


def replay(num_tokens: int, attempt_at: Callable[[int], Attempt], prompt_tokens: int = 0) -> Rounds:
    """The rounds of one text of `num_tokens` >= 1. `attempt_at(t)` tells of a round that begins
    when t = 1..num_tokens - 1 tokens are committed; it is asked in ascending order, and only where
    a round may begin."""
    visits = np.zeros(num_tokens + 1)
    visits[1] = 1.0
    contexts, kinds = 0.0, np.zeros((_KINDS, _KINDS))
    reached, accepted = np.zeros((2, _DEPTHS))
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
    scalars = 1.0, num_tokens, 1.0 + kinds.sum(), contexts
    return Rounds(np.concatenate([scalars, reached, accepted, kinds.ravel()]))


class Script:
    """One drafter that goes through texts as it would through sessions, one after the other: what
    it may copy from earlier answers it has seen."""

    def __init__(self, draft: DraftConfig, temperature: float) -> None:
        self._draft = draft
        self._lookup = build_lookup(draft)
        self._sampling = SamplingParams(temperature=temperature)

    def attempt(self, text: Answer, start: int, bound: int, rule: Rule) -> Attempt:
        """What it proposes behind the first `start` tokens of an answer."""
        draft, num_steps, guessed = self._draft, bound, None
        if self._lookup is not None:
            token_ids = (*text.prompt_ids, *text.token_ids[:start])
            guess = self._lookup.guess(
                DraftRequest(
                    session_id=f"plan-{text.seed}",
                    tenant="",
                    token_ids=token_ids,
                    prompt_length=len(text.prompt_ids),
                    num_draft_tokens=bound,
                    sampling=self._sampling,
                    rule=rule,
                    noise=RoundNoise(text.seed, rule, len(token_ids)),
                )
            )
            num_steps = min(bound, draft.hybrid_model_tokens)
            if draft.drafter.model is None or guess.score >= draft.hybrid_min_score:
                guessed, num_steps = guess.token_ids, 0
        num_proposed = num_steps if guessed is None else len(guessed)
        left = text.token_ids[start : start + num_proposed]
        steps: Sequence[float] = text.steps(rule)[start : start + len(left)]
        if guessed is not None:
            steps = [float(a == b) for a, b in zip(guessed, left, strict=False)]
        return Attempt(num_proposed, num_steps, survival(rule, steps).tolist())

    def rounds(self, text: Answer, rule: Rule, num_draft_tokens: int) -> Rounds:
        """The expected rounds of a text with this bound K, which ends with its session."""

        def attempt_at(start: int) -> Attempt:
            # As `coordinator.draft_length.policy`: one of the tokens to come is the target's.
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
    """The expected rounds of each text, for a drafter that begins with the first of them."""
    script = Script(draft, sample.temperature)
    return tuple(script.rounds(text, rule, num_draft_tokens) for text in sample.texts)
