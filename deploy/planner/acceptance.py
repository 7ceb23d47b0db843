"""How much of a proposal is accepted, given the target's text.

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
Coupled: a race over p and q with the same noise, see `matched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.acceptance import Asked, Encode, ModelReader, write
from benchmarks.measurement import Progress
from benchmarks.prompts import BenchPrompt
from outrider.config import DraftConfig
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import Engine
from outrider.errors import SettingError, check
from outrider.limits import LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX, SEED_MAX
from outrider.replica.process_setup import build_lookup
from outrider.speculation.outcome_prediction import RANKS_MAX
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams, resolve_rule

SAMPLED_RULES: Final = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)
Array = npt.NDArray[np.float64]


def survival(rule: Rule, steps: Sequence[float]) -> Array:
    """The chances, for n = 1..len(steps), that n tokens or more of a proposal for these places are
    accepted, given the text. `steps` are as of `Answer.steps`."""
    values = np.asarray(steps, dtype=np.float64)
    if rule is not Rule.BLOCK:
        return np.minimum(values, 1.0).cumprod()
    with np.errstate(divide="ignore"):  # In logarithms, as a product may be huge and the next 0.
        products = np.exp(np.minimum(np.cumsum(np.log(values)), 0.0))
    return np.asarray(np.minimum.accumulate(products))


def matched(p: Array, q: Array, token_id: int) -> float:
    """P(argmax(log q + g) = x | argmax(log p + g) = x) for Gumbel noise g: the chance of both is
    1 / sum_v max(p_v / p_x, q_v / q_x) (Daliri et al., arXiv 2408.07978), and that of the second is
    p_x. Both [V]; p sums to 1."""
    if q[token_id] <= 0:
        return 0.0
    return min(1.0, 1.0 / float(np.maximum(p, q * (p[token_id] / q[token_id])).sum()))


def race_rank(
    p: Array, q: Array, winner: int, generator: np.random.Generator, refused: int | None = None
) -> int | None:
    """Which guess of the winner of a race over `p` is right, from 0: its place in the race over `q`
    with the same noise, `refused` left out. Both [N] are over the same tokens, of which those that
    are not drafted may be missing: with them p sums to 1. None where it is not drafted."""
    if q[winner] <= 0:
        return None
    first = generator.exponential()
    noise = p * first + generator.exponential(size=len(p))
    noise[winner] = p[winner] * first
    with np.errstate(divide="ignore"):
        arrival = np.where(q > 0, noise / q, np.inf)
    earlier = arrival < arrival[winner]
    if refused is not None:
        earlier[refused] = False
    return int(earlier.sum())


class Guessing:
    """How well corrections are guessed under one rule: weights by which guess was right, after a
    refusal and where all draft tokens were accepted. The last one is of none."""

    def __init__(self) -> None:
        self.recovery, self.bonus = np.zeros(RANKS_MAX + 1), np.zeros(RANKS_MAX + 1)

    def hit_rates(self, accepted: Sequence[float]) -> tuple[float, ...]:
        """The chance that an outcome is among the 1, 2, ... `LOOK_AHEAD_MAX` likeliest ones, for
        rounds whose draft tokens have these chances [K], each given those before it. What a draft
        tells of a single round from its own q (`OutcomeModel`) is left out."""
        recovery, bonus = (
            counts[:-1] / max(counts.sum(), 1e-300) for counts in (self.recovery, self.bonus)
        )
        reached = np.cumprod([1.0, *accepted])
        refused = reached[:-1] * (1 - np.asarray(accepted))
        chances = np.concatenate([np.outer(refused, recovery).ravel(), reached[-1] * bonus])
        return tuple(np.cumsum(np.sort(chances)[::-1][:LOOK_AHEAD_MAX]).tolist())


def note_guess(counts: Array, rank: int | None, weight: float = 1.0) -> None:
    """A correction that was guess number `rank`, None = none of them."""
    counts[RANKS_MAX if rank is None else min(rank, RANKS_MAX)] += weight


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target."""

    category: str
    seed: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """With the EOS, if there is one."""
    max_tokens: int
    """That were allowed."""
    ratios: tuple[float, ...] = ()
    """[token_ids]: q(x) / p(x) of each token by the draft's model, from the tokens before it; at
    temperature 0 whether x is the likeliest, as 1 or 0. Empty where no model drafts."""
    matches: tuple[float, ...] = ()
    """P(the draft draws x, given that the target does) where both draw by the same noise."""

    def steps(self, rule: Rule) -> tuple[float, ...]:
        """What decides about each token under a rule."""
        return self.matches if rule is Rule.COUPLED else self.ratios


@dataclass(frozen=True, slots=True)
class Sample:
    """All answers at one temperature."""

    temperature: float
    texts: tuple[Answer, ...]
    guessing: Mapping[Rule, Guessing]
    """How well corrections are guessed, where a model alone drafts."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """That may be chosen from."""
        return rules_at(self.temperature)


def rules_at(temperature: float) -> tuple[Rule, ...]:
    """The rules of a temperature."""
    greedy = SamplingParams(temperature=temperature).greedy
    return (Rule.GREEDY,) if greedy else SAMPLED_RULES


class Reading:
    """Lets a target write, and a model read."""

    def __init__(
        self, target: Engine, draft: ModelReader | None, max_model_len: int, max_tokens: int
    ) -> None:
        """`max_model_len` is what both take; `max_tokens` bounds an answer."""
        self._target = target
        self._draft = draft
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._generator = np.random.default_rng(0)

    def sample(
        self,
        prompts: Sequence[BenchPrompt],
        encode: Encode,
        temperature: float,
        first_seed: int,
        progress: Progress,
    ) -> Sample:
        """All prompts' answers. Raises `SettingError` for prompts that are too long."""
        guessing = {rule: Guessing() for rule in Rule}
        texts = []
        for index, prompt in enumerate(prompts):
            number = f"prompt {index + 1} of {len(prompts)}"
            progress(f"temperature {temperature:g}, {number}: {prompt.category}")
            ids = tuple(encode(prompt.text))
            room = self._max_model_len - len(ids)
            if not ids or room < 1:
                raise SettingError(
                    "prompts",
                    f"number {index + 1} has {len(ids)} tokens; 1 to {self._max_model_len - 1} "
                    "leave room for a completion",
                )
            asked = Asked(ids, (first_seed + index) & SEED_MAX, min(self._max_tokens, room))
            with torch.inference_mode():
                texts.append(self._answer(temperature, guessing, prompt.category, asked))
        return Sample(temperature, tuple(texts), guessing)

    def _answer(
        self, temperature: float, guessing: Mapping[Rule, Guessing], category: str, asked: Asked
    ) -> Answer:
        params = SamplingParams(temperature=temperature)
        rule = resolve_rule(params, Rule.COUPLED, seeded=True)
        [(written, rows)] = write(self._target, [asked], params, rule)
        ids, places = (*asked.prompt_ids, *written), list[tuple[float, float]]()
        if self._draft is not None and params.greedy:
            for rank in self._draft.ranks(ids, len(asked.prompt_ids)):
                places.append((float(rank == 0),) * 2)
                note_guess(guessing[Rule.GREEDY].bonus, rank)
                if rank != 0:
                    note_guess(guessing[Rule.GREEDY].recovery, rank and rank - 1)
        elif self._draft is not None:
            [supports] = self._draft.distributions(ids, len(asked.prompt_ids), params)
            for row, token_id, q in zip(rows, written, supports, strict=True):
                places.append(self._place(guessing, row, token_id, q))
        ratios, matches = zip(*places, strict=True) if places else ((), ())
        return Answer(
            category, asked.seed, asked.prompt_ids, tuple(written), asked.max_tokens, ratios,
            matches,
        )  # fmt: skip

    def _place(
        self,
        guessing: Mapping[Rule, Guessing],
        row: torch.Tensor,
        token_id: int,
        q: DraftDistribution,
    ) -> tuple[float, float]:
        """Ratio and match of one place at a temperature above 0, `row` is p [V]; and which guess of
        its token would have been right, after a refusal and as a bonus."""
        drafted = np.array(q.token_ids)
        p = np.zeros(max(len(row), int(drafted.max()) + 1))
        p[: len(row)] = row.double().cpu().numpy()
        dense = np.zeros(len(p))
        dense[drafted] = np.array(q.counts) / COUNT_TOTAL
        ratio = float(dense[token_id] / p[token_id])
        ids = np.union1d(drafted, [token_id])
        own = int(np.searchsorted(ids, token_id))
        ours, theirs = p[ids], dense[ids]
        rank = race_rank(ours, theirs, own, self._generator)
        for rule in SAMPLED_RULES:
            note_guess(guessing[rule].bonus, rank)
        if rank != 0:  # What the draft drew is refused under coupled.
            note_guess(guessing[Rule.COUPLED].recovery, rank and rank - 1)
        residual, lost = np.maximum(ours - theirs, 0.0), np.maximum(theirs - ours, 0.0)
        if ratio < 1.0 and lost.sum() > 0.0 and residual[own] > 0.0:
            refused = int(self._generator.choice(len(ids), p=lost / lost.sum()))
            # What is not accepted, 1 - sum min(p, q), is the residual's whole mass.
            residual /= 1.0 - float(np.minimum(ours, theirs).sum())
            rank = race_rank(residual, theirs, own, self._generator, refused)
            for rule in (Rule.TOKEN, Rule.BLOCK):
                note_guess(guessing[rule].recovery, rank, 1.0 - ratio)
        return ratio, matched(p, dense, token_id)


class Attempt(NamedTuple):
    """What a drafter would propose at one place of a text."""

    num_proposed: int
    num_steps: int
    """Of the draft's model; 0 where a look-up proposes, or nothing is proposed."""
    survival: Sequence[float]
    """Of the proposed tokens whose place the text still has."""


_DEPTHS: Final = NUM_DRAFT_TOKENS_MAX
_KINDS: Final = _DEPTHS + 1


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
        return self._mean(self._kinds.sum(axis=1) @ np.arange(_KINDS))

    @property
    def steps_per_round(self) -> float:
        """Steps of the draft's model, over the same rounds."""
        return self._mean(self._kinds.sum(axis=0) @ np.arange(_KINDS))

    def kinds(self) -> Iterator[tuple[int, int, float]]:
        """Of all rounds but the first ones: tokens proposed, steps, and how many such rounds."""
        for proposed, steps in np.argwhere(self._kinds).tolist():
            yield proposed, steps, float(self._kinds[proposed, steps])

    @property
    def _kinds(self) -> Array:
        return self.sums[4 + 2 * _DEPTHS :].reshape(_KINDS, _KINDS)

    def _mean(self, total: float) -> float:
        return float(total) / self.num_later if self.num_later > 0 else 0.0


def total(parts: Sequence[Rounds]) -> Rounds:
    """All of them together."""
    return Rounds(np.sum([part.sums for part in parts], axis=0))


def replay(num_tokens: int, attempt_at: Callable[[int], Attempt], prompt_tokens: int = 0) -> Rounds:
    """The rounds of one text of `num_tokens` >= 1. `attempt_at(t)` tells of a round that begins
    when t = 1..num_tokens - 1 tokens are committed; it is asked in ascending order, and only where
    a round may begin."""
    check(num_tokens > 0, "a text without a token takes no round")
    visits = np.zeros(num_tokens + 1)
    visits[1] = 1.0
    contexts, kinds = 0.0, np.zeros((_KINDS, _KINDS))
    reached, accepted = np.zeros((2, _DEPTHS))
    for start in range(1, num_tokens):
        visit = visits[start]
        if visit <= 0.0:
            continue
        num_proposed, num_steps, known = attempt_at(start)
        check(len(known) <= num_tokens - start, "a proposal survives beyond the text's end")
        contexts += visit * (prompt_tokens + start)
        kinds[num_proposed, num_steps] += visit
        chances = visit * np.array([1.0, *known, 0.0])
        reached[: len(known)] += chances[: len(known)]
        accepted[: len(known)] += chances[1:-1]
        for num_accepted, chance in enumerate(chances[:-1] - chances[1:]):
            visits[min(num_tokens, start + num_accepted + 1)] += chance
    scalars = 1.0, num_tokens, 1.0 + kinds.sum(), contexts
    return Rounds(np.concatenate([scalars, reached, accepted, kinds.ravel()]))


class Proposed(NamedTuple):
    """At one place."""

    num_tokens: int
    num_steps: int
    """Of the draft's model."""
    token_ids: tuple[int, ...] | None = None
    """By the look-up; None = by the model."""


class Script:
    """One drafter that goes through texts as it would through sessions, one after the other: what
    it may copy from earlier answers it has seen."""

    def __init__(self, draft: DraftConfig, temperature: float) -> None:
        self._draft = draft
        self._lookup = build_lookup(draft)
        self._sampling = SamplingParams(temperature=temperature)

    def proposed(self, text: Answer, committed: Sequence[int], bound: int, rule: Rule) -> Proposed:
        """What it proposes when these tokens follow the prompt of `text`."""
        if self._lookup is None:
            return Proposed(bound, bound)
        token_ids = (*text.prompt_ids, *committed)
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
        if self._draft.drafter.model is None or guess.score >= self._draft.hybrid_min_score:
            return Proposed(len(guess.token_ids), 0, guess.token_ids)
        return Proposed(*(min(bound, self._draft.hybrid_model_tokens),) * 2)

    def rounds(self, text: Answer, rule: Rule, num_draft_tokens: int) -> Rounds:
        """The expected rounds of a text with this bound K, which ends with its session."""

        def attempt_at(start: int) -> Attempt:
            # As `coordinator.draft_length.policy`: one of the tokens to come is the target's.
            wanted = min(num_draft_tokens, text.max_tokens - start - 1)
            if wanted == 0:
                return Attempt(0, 0, ())
            num_tokens, num_steps, token_ids = self.proposed(
                text, text.token_ids[:start], wanted, rule
            )
            left = text.token_ids[start : start + num_tokens]
            steps: Sequence[float] = text.steps(rule)[start : start + len(left)]
            if token_ids is not None:
                pairs = zip(token_ids, left, strict=False)
                steps = [float(ours == theirs) for ours, theirs in pairs]
            return Attempt(num_tokens, num_steps, survival(rule, steps).tolist())

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
