"""How much of a proposal is accepted, given what the target wrote.

A verifier that loses nothing commits the target's own text x, whatever is drafted. Seen from the
other side: given x, rounds follow each other like a chain whose steps can be computed, and no
round need be played. With p and q after every transform, at each place of the text:

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

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.acceptance import Asked, Encode, ModelReader, write
from benchmarks.measurement import Progress
from benchmarks.prompts import BenchPrompt
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.lookup import LookupDrafter
from outrider.engine.interface import Engine
from outrider.errors import SettingError, check
from outrider.limits import LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX, SEED_MAX
from outrider.speculation.outcome_prediction import RANKS_MAX
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams, resolve_rule


@dataclass(frozen=True, slots=True)
class DraftedPlace:
    """What a drafter thinks of one token of a text, from the tokens before it alone."""

    ratio: float
    """q(x) / p(x) of the token x that the target wrote; at temperature 0 whether x is the
    likeliest, as 1 or 0."""
    match: float
    """P(the draft draws x, given that the target does) where both draw by the same noise."""


def survival(rule: Rule, places: Sequence[DraftedPlace]) -> tuple[float, ...]:
    """The chances, for n = 1..len(places), that n tokens or more of a proposal are accepted that
    was drawn for these places, given the text. Proposals that are one-hot have ratio and match 1
    where they propose x, else 0."""
    if rule is Rule.COUPLED:
        steps = np.array([place.match for place in places], dtype=np.float64)
        return tuple(np.cumprod(steps).tolist())
    ratios = np.array([place.ratio for place in places], dtype=np.float64)
    if rule is Rule.BLOCK:
        return tuple(np.minimum.accumulate(_capped_products(ratios)).tolist())
    return tuple(np.cumprod(np.minimum(1.0, ratios)).tolist())


def matched(
    p: npt.NDArray[np.float64], q_ids: Sequence[int], q_mass: Sequence[float], token_id: int
) -> float:
    """P(argmax(log q + g) = x | argmax(log p + g) = x) for Gumbel noise g: the chance of both is
    1 / sum_v max(p_v / p_x, q_v / q_x) (Daliri et al., arXiv 2408.07978), and that of the second is
    p_x. `p` [V] sums to 1, p_x > 0; q is 0 but at `q_ids`."""
    check(p[token_id] > 0, "the target wrote a token that it cannot write")
    mass = dict(zip(q_ids, q_mass, strict=True))
    own = mass.get(token_id, 0.0)
    if own <= 0:
        return 0.0
    scale = float(p[token_id]) / own
    inside = [v for v in q_ids if v < len(p)]
    shared = p[inside]
    larger = np.maximum(shared, scale * np.array([mass[v] for v in inside]))
    total = float(p.sum() - shared.sum() + larger.sum())
    total += scale * sum(mass[v] for v in q_ids if v >= len(p))
    return min(1.0, 1.0 / total)


def _capped_products(ratios: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """min(1, prod_{i<=m}), in logarithms: a product may be huge, and the next ratio 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(np.minimum(np.cumsum(np.log(ratios)), 0.0)))


Mass = npt.NDArray[np.float64]


def race_rank(
    p: Mass, q: Mass, winner: int, generator: np.random.Generator, refused: int | None = None
) -> int | None:
    """Which guess of the winner of a race over `p` is right, from 0: its place in the race over `q`
    with the same noise, `refused` left out. Both [N] are over the same tokens, of which those that
    are not drafted may be missing: with them p sums to 1. None where it is not drafted."""
    check(p[winner] > 0, "the winner of a race takes part in it")
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


class RankShares:
    """How often each guess of a correction was right, by weight."""

    def __init__(self) -> None:
        self._hits = [0.0] * RANKS_MAX
        self._weight = 0.0

    def note(self, rank: int | None, weight: float = 1.0) -> None:
        """A correction that was guess number `rank`, None = none of them."""
        self._weight += weight
        if rank is not None and rank < RANKS_MAX:
            self._hits[rank] += weight

    def shares(self) -> tuple[float, ...]:
        """[RANKS_MAX]; 0 where nothing was noted."""
        return tuple(hit / self._weight if self._weight > 0 else 0.0 for hit in self._hits)


@dataclass(frozen=True, slots=True)
class Guessing:
    """How well corrections are guessed under one rule."""

    recovery: RankShares = field(default_factory=RankShares)
    """After a refusal."""
    bonus: RankShares = field(default_factory=RankShares)
    """Where all draft tokens were accepted."""

    def hit_rates(self, accepted: Sequence[float]) -> tuple[float, ...]:
        """The chance that an outcome is among the 1, 2, ... `LOOK_AHEAD_MAX` likeliest ones, for
        rounds whose draft tokens have these chances [K], each given those before it. What a draft
        tells of a single round from its own q (`OutcomeModel`) is left out."""
        recovery, bonus = self.recovery.shares(), self.bonus.shares()
        reached, chances = 1.0, list[float]()
        for chance in accepted:
            chances += [reached * (1 - chance) * share for share in recovery]
            reached *= chance
        chances += [reached * share for share in bonus]
        return tuple(accumulate(sorted(chances, reverse=True)[:LOOK_AHEAD_MAX]))


_NOT_DRAFTED: Final = DraftedPlace(0.0, 0.0)
SAMPLED_RULES: Final = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)


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
    places: tuple[DraftedPlace, ...] = ()
    """[token_ids], as the draft's model sees them; empty where no model drafts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All answers at one temperature."""

    temperature: float
    texts: tuple[Answer, ...]
    guessing: Mapping[Rule, Guessing]
    """How well corrections are guessed; of use where a model alone drafts."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """That may be chosen from."""
        return rules_at(self.temperature)


def rules_at(temperature: float) -> tuple[Rule, ...]:
    """The rules of a temperature."""
    return (Rule.GREEDY,) if _params(temperature).greedy else SAMPLED_RULES


def _params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature)


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
            progress(
                f"temperature {temperature:g}, prompt {index + 1} of {len(prompts)}: "
                f"{prompt.category}"
            )
            ids = tuple(encode(prompt.text))
            room = self._max_model_len - len(ids)
            if not ids or room < 1:
                raise SettingError(
                    "prompts",
                    f"number {index + 1} has {len(ids)} tokens; 1 to {self._max_model_len - 1} "
                    "leave room for a completion",
                )
            seed = (first_seed + index) & SEED_MAX
            with torch.inference_mode():
                texts.append(self._text(temperature, guessing, prompt, ids, seed, room))
        return Sample(temperature, tuple(texts), guessing)

    def _text(
        self,
        temperature: float,
        guessing: Mapping[Rule, Guessing],
        prompt: BenchPrompt,
        ids: tuple[int, ...],
        seed: int,
        room: int,
    ) -> Answer:
        params = _params(temperature)
        rule = resolve_rule(params, Rule.COUPLED, seeded=True)
        max_tokens = min(self._max_tokens, room)
        [(written, rows)] = write(self._target, [Asked(ids, seed, max_tokens)], params, rule)
        places: list[DraftedPlace] = []
        if self._draft is not None and params.greedy:
            ranks = self._draft.ranks((*ids, *written), len(ids))
            places = [_greedy_place(rank, guessing[Rule.GREEDY]) for rank in ranks]
        elif self._draft is not None:
            supports = self._draft.drawn_from((*ids, *written), len(ids), params)
            places = [
                self._place(guessing, row, token_id, q)
                for row, token_id, q in zip(rows, written, supports, strict=True)
            ]
        return Answer(prompt.category, seed, ids, tuple(written), max_tokens, tuple(places))

    def _place(
        self,
        guessing: Mapping[Rule, Guessing],
        row: torch.Tensor,
        token_id: int,
        q: DraftDistribution | None,
    ) -> DraftedPlace:
        """One place at a temperature above 0; `row` is p [V]."""
        if q is None:
            return _NOT_DRAFTED
        p = row.double().cpu().numpy()
        mass = [number / COUNT_TOTAL for number in q.counts]
        drafted = dict(zip(q.token_ids, mass, strict=True)).get(token_id, 0.0)
        place = DraftedPlace(drafted / float(p[token_id]), matched(p, q.token_ids, mass, token_id))
        self._note_guesses(guessing, p, q, token_id, place)
        return place

    def _note_guesses(
        self,
        guessing: Mapping[Rule, Guessing],
        p: npt.NDArray[np.float64],
        q: DraftDistribution,
        token_id: int,
        place: DraftedPlace,
    ) -> None:
        """Which guess of this token would have been right, after a refusal and as a bonus."""
        ids = np.array([v for v in {*q.token_ids, token_id} if v < len(p)], dtype=np.int64)
        listed = dict(zip(q.token_ids, q.counts, strict=True))
        ours = p[ids]
        theirs = np.array([listed.get(int(v), 0) / COUNT_TOTAL for v in ids])
        own = int(np.flatnonzero(ids == token_id)[0])
        rank = race_rank(ours, theirs, own, self._generator)
        for rule in SAMPLED_RULES:
            guessing[rule].bonus.note(rank)
        if rank != 0:  # What the draft drew is refused under coupled.
            after = None if rank is None else rank - 1
            guessing[Rule.COUPLED].recovery.note(after)
        weight = 1.0 - min(1.0, place.ratio)
        if weight <= 0.0:
            return
        residual = np.maximum(ours - theirs, 0.0)
        lost = np.maximum(theirs - ours, 0.0)
        missed = lost.sum()
        if missed <= 0.0 or residual[own] <= 0.0:
            return
        refused = int(self._generator.choice(len(ids), p=lost / missed))
        # What is not accepted, 1 - sum min(p, q), is the residual's whole mass.
        all_mass = 1.0 - float(np.minimum(ours, theirs).sum())
        rank = race_rank(residual / all_mass, theirs, own, self._generator, refused)
        for rule in (Rule.TOKEN, Rule.BLOCK):
            guessing[rule].recovery.note(rank, weight)


def _greedy_place(rank: int | None, guessing: Guessing) -> DraftedPlace:
    guessing.bonus.note(rank)
    if rank != 0:
        guessing.recovery.note(None if rank is None else rank - 1)
    hit = float(rank == 0)
    return DraftedPlace(hit, hit)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a drafter would propose at one place of a text."""

    num_proposed: int
    num_steps: int
    """Of the draft's model; 0 where a look-up proposes, or nothing is proposed."""
    survival: tuple[float, ...]
    """Of the proposed tokens whose place the text still has."""

    def __post_init__(self) -> None:
        falling = pairwise((1.0, *self.survival, 0.0))
        check(all(a >= b - 1e-12 for a, b in falling), "a survival starts from 1 and never grows")
        check(len(self.survival) <= self.num_proposed, "only what is proposed survives")


@dataclass(frozen=True, slots=True)
class RoundKind:
    """What a round's time depends on, beside its context."""

    num_proposed: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """Expected rounds over any number of texts; sums."""

    num_texts: int
    num_tokens: int
    num_rounds: float
    """With each text's first one, which has no draft."""
    contexts: float
    """Tokens that the session had when a round began, over all rounds but the first ones."""
    kinds: Mapping[RoundKind, float]
    """Rounds by kind, but for the first of each text."""
    reached: tuple[float, ...]
    """Of each depth from 1: how often it was proposed, and all before it was accepted ..."""
    accepted: tuple[float, ...]
    """... and it was, too."""

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens a round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    def by_position(self) -> tuple[float | None, ...]:
        """The chance, for depth 1, 2, ..., that a token is accepted given that those before it
        were; None where none came so far."""
        return tuple(
            accepted / reached if reached > 0 else None
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        )

    @property
    def proposed_per_round(self) -> float:
        """Draft tokens, over all rounds but the first ones; 0 without any."""
        return self._mean(lambda kind: kind.num_proposed)

    @property
    def steps_per_round(self) -> float:
        """Steps of the draft's model, over the same rounds."""
        return self._mean(lambda kind: kind.num_steps)

    def _mean(self, of: Callable[[RoundKind], float]) -> float:
        later = sum(self.kinds.values())
        total = sum(of(kind) * number for kind, number in self.kinds.items())
        return total / later if later else 0.0


def total(parts: Sequence[Rounds]) -> Rounds:
    """All of them together."""
    kinds: Counter[RoundKind] = Counter()
    for part in parts:
        kinds.update(part.kinds)
    nothing = [0.0] * NUM_DRAFT_TOKENS_MAX
    return Rounds(
        num_texts=sum(part.num_texts for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_rounds=sum(part.num_rounds for part in parts),
        contexts=sum(part.contexts for part in parts),
        kinds=dict(kinds),
        reached=tuple(map(sum, zip(nothing, *(part.reached for part in parts), strict=True))),
        accepted=tuple(map(sum, zip(nothing, *(part.accepted for part in parts), strict=True))),
    )


def replay(num_tokens: int, attempt_at: Callable[[int], Attempt], prompt_tokens: int = 0) -> Rounds:
    """The rounds of one text of `num_tokens` >= 1. `attempt_at(t)` tells of a round that begins
    when t = 1..num_tokens - 1 tokens are committed; it is asked in ascending order, and only where
    a round may begin."""
    check(num_tokens > 0, "a text without a token takes no round")
    visits = [0.0] * (num_tokens + 1)
    visits[1] = 1.0
    contexts = 0.0
    kinds: dict[RoundKind, float] = {}
    reached, accepted = ([0.0] * NUM_DRAFT_TOKENS_MAX for _ in range(2))
    for start in range(1, num_tokens):
        visit = visits[start]
        if visit <= 0.0:
            continue
        attempt = attempt_at(start)
        known = attempt.survival
        check(len(known) <= num_tokens - start, "a proposal survives beyond the text's end")
        contexts += visit * (prompt_tokens + start)
        kind = RoundKind(attempt.num_proposed, attempt.num_steps)
        kinds[kind] = kinds.get(kind, 0.0) + visit
        for depth, (before, after) in enumerate(pairwise((1.0, *known))):
            reached[depth] += visit * before
            accepted[depth] += visit * after
        for num_accepted, (least, more) in enumerate(pairwise((1.0, *known, 0.0))):
            visits[min(num_tokens, start + num_accepted + 1)] += visit * (least - more)
    return Rounds(
        num_texts=1,
        num_tokens=num_tokens,
        num_rounds=1.0 + sum(kinds.values()),
        contexts=contexts,
        kinds=kinds,
        reached=tuple(reached),
        accepted=tuple(accepted),
    )


_SURE = DraftedPlace(1.0, 1.0)
_WRONG = DraftedPlace(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DraftKind:
    """Who proposes, as a deployment would make it."""

    make_lookup: Callable[[], LookupDrafter] | None
    """A look-up without a history; None where a model alone drafts."""
    has_model: bool
    hybrid_min_score: float
    """Where both: the tokens that the look-up must expect to be accepted ..."""
    hybrid_model_tokens: int
    """... and those that the model draws, at most."""

    @property
    def looks_ahead(self) -> bool:
        """Whether that is planned: for a model alone. A hybrid can too."""
        return self.make_lookup is None


@dataclass(frozen=True, slots=True)
class Proposed:
    """At one place: by the look-up, or as many tokens of the model."""

    token_ids: tuple[int, ...] | None
    """None = by the model."""
    num_steps: int

    @property
    def num_tokens(self) -> int:
        """Proposed."""
        return self.num_steps if self.token_ids is None else len(self.token_ids)


class Script:
    """One drafter that goes through texts as it would through sessions, one after the other: what
    it may copy from earlier answers it has seen."""

    def __init__(self, kind: DraftKind, temperature: float) -> None:
        self._kind = kind
        self._lookup = None if kind.make_lookup is None else kind.make_lookup()
        self._sampling = SamplingParams(temperature=temperature)

    def proposed(
        self, text: Answer, committed: Sequence[int], num_draft_tokens: int, rule: Rule
    ) -> Proposed:
        """What it proposes when so many tokens of `committed` follow the prompt of `text`."""
        if self._lookup is None:
            return Proposed(None, num_draft_tokens)
        token_ids = (*text.prompt_ids, *committed)
        guess = self._lookup.guess(
            DraftRequest(
                session_id=_session(text),
                tenant="",
                token_ids=token_ids,
                prompt_length=len(text.prompt_ids),
                num_draft_tokens=num_draft_tokens,
                sampling=self._sampling,
                rule=rule,
                noise=RoundNoise(text.seed, rule, len(token_ids)),
            )
        )
        if not self._kind.has_model or guess.score >= self._kind.hybrid_min_score:
            return Proposed(guess.token_ids, 0)
        return Proposed(None, min(num_draft_tokens, self._kind.hybrid_model_tokens))

    def end(self, text: Answer) -> None:
        """The session of the text is over."""
        if self._lookup is not None:
            self._lookup.release(_session(text))

    def rounds(self, text: Answer, rule: Rule, num_draft_tokens: int) -> Rounds:
        """The expected rounds of a text with this bound K, which ends with its session."""

        def attempt_at(start: int) -> Attempt:
            # As `coordinator.draft_length.policy`: one of the tokens to come is the target's.
            wanted = min(num_draft_tokens, text.max_tokens - start - 1)
            if wanted == 0:
                return Attempt(0, 0, ())
            found = self.proposed(text, text.token_ids[:start], wanted, rule)
            left = text.token_ids[start : start + found.num_tokens]
            if found.token_ids is None:
                places: Sequence[DraftedPlace] = text.places[start : start + len(left)]
            else:
                pairs = zip(found.token_ids, left, strict=False)
                places = [_SURE if ours == theirs else _WRONG for ours, theirs in pairs]
            return Attempt(found.num_tokens, found.num_steps, survival(rule, places))

        try:
            return replay(len(text.token_ids), attempt_at, len(text.prompt_ids))
        finally:
            self.end(text)


def scripted(
    kind: DraftKind, sample: Sample, rule: Rule, num_draft_tokens: int
) -> tuple[Rounds, ...]:
    """The expected rounds of each text, for a drafter that begins with the first of them."""
    script = Script(kind, sample.temperature)
    return tuple(script.rounds(text, rule, num_draft_tokens) for text in sample.texts)


def _session(text: Answer) -> str:
    return f"plan-{text.seed}"
