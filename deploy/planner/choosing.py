"""Which K, rule and fan-out to deploy, and with how many drafts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.errors import check
from outrider.speculation.sampling_params import Rule
from outrider.speculation.text_acceptance import NUM_DEPTHS

from .acceptance import DraftKind, Rounds, Sample, scripted, total
from .round_times import Load, LookAheadPlan, ServiceTimes

GAIN_MIN: Final = 0.005
"""What is larger or does more is chosen where it is faster by this share."""
REPLICAS_LOSS_MAX: Final = 0.05
"""What fewer drafts may cost of the speed with one for each session."""
SWEEP: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Every K that is looked at, beside plain decoding."""
FAN_OUTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Outcomes worked out ahead that are looked at."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to draft, replayed over the texts."""

    rule: Rule
    num_draft_tokens: int
    rounds: Rounds
    hit_rates: tuple[float, ...] = ()
    """With 1, 2, ... outcomes worked out ahead; empty where the drafter cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way to decode, and what it is expected to bring."""

    rule: Rule
    num_draft_tokens: int
    """K; 0 = plain decoding."""
    look_ahead: int
    """Fan-out: outcomes of a round worked out ahead; 0 = the draft is waited for."""
    draft_replicas: int
    """For each target replica; 0 for plain decoding."""
    tokens_per_second: float
    """Of all sessions of a target replica together, prompts included."""
    speedup: float
    """Over plain decoding of as many sessions."""
    tokens_per_round: float
    hit_rate: float | None
    """Share of the rounds whose proposal is there before they begin; None without look-ahead."""
    proposed_per_round: float = 0.0
    """Draft tokens, mean over the rounds with a draft ..."""
    steps_per_round: float = 0.0
    """... and steps of its model: fewer than K where a look-up proposes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to deploy."""

    chosen: Option
    """Plain decoding where no draft pays."""
    plain: Option
    options: tuple[Option, ...]
    """The faster of waiting and looking ahead for each rule and K that was looked at, with the
    drafts it needs."""


class Chooser:
    """Compares ways to decode the same texts under one load."""

    def __init__(
        self,
        times: ServiceTimes,
        load: Load,
        prompt_tokens: Sequence[int],
        plain: Rounds,
        plain_rule: Rule,
    ) -> None:
        """`prompt_tokens` [texts] are read at each text's beginning; `plain` are the rounds without
        a draft. `load` says nothing of drafts."""
        check(len(prompt_tokens) == plain.num_texts > 0, "each text has a prompt")
        self._times = times
        self._load = load
        self._first_s = times.first_seconds(prompt_tokens)
        plain_s = times.plain_seconds(plain, load)
        self._plain_rate = self._rate(plain, plain_s)
        self._plain = Option(
            rule=plain_rule,
            num_draft_tokens=0,
            look_ahead=0,
            draft_replicas=0,
            tokens_per_second=self._plain_rate,
            speedup=1.0,
            tokens_per_round=plain.tokens_per_round,
            hit_rate=None,
        )

    def choose(self, candidates: Iterable[Candidate]) -> Choice:
        """The fastest of them and of plain decoding; of about equals the first."""
        options = tuple(self._best(self._ways(candidate)) for candidate in candidates)
        return Choice(self.best(options), self._plain, options)

    def best(self, options: Iterable[Option]) -> Option:
        """The fastest of them and of plain decoding; of about equals the first."""
        return self._best([self._plain, *options])

    def once_more(self, option: Option, rounds: Rounds) -> Option:
        """The same way to decode, over other rounds."""
        rates = (option.hit_rate or 0.0,) * option.look_ahead
        candidate = Candidate(option.rule, option.num_draft_tokens, rounds, rates)
        return self._option(candidate, option.look_ahead, option.draft_replicas)

    def _ways(self, candidate: Candidate) -> Iterator[Option]:
        yield self._with_replicas(candidate, 0)
        for fan_out in FAN_OUTS:
            if fan_out <= len(candidate.hit_rates):
                yield self._with_replicas(candidate, fan_out)

    def _with_replicas(self, candidate: Candidate, fan_out: int) -> Option:
        """With as few drafts as cost little speed; none for a look-up."""
        if self._times.draft is None:
            return self._option(candidate, fan_out, 0)
        most = 1 if self._times.shares_device else self._load.sessions
        best = self._option(candidate, fan_out, most)
        least = best.tokens_per_second * (1 - REPLICAS_LOSS_MAX)
        fewer = (self._option(candidate, fan_out, number) for number in range(1, most))
        return next((option for option in fewer if option.tokens_per_second >= least), best)

    def _option(self, candidate: Candidate, fan_out: int, draft_replicas: int) -> Option:
        load = replace(self._load, draft_replicas=max(1, draft_replicas))
        rounds, hit_rate = candidate.rounds, None
        if fan_out == 0:
            seconds = self._times.drafted_seconds(rounds, load)
        else:
            hit_rate = candidate.hit_rates[fan_out - 1]
            plan = LookAheadPlan(candidate.num_draft_tokens, fan_out, hit_rate)
            seconds = self._times.look_ahead_seconds(rounds, load, plan)
        rate = self._rate(rounds, seconds)
        return Option(
            rule=candidate.rule,
            num_draft_tokens=candidate.num_draft_tokens,
            look_ahead=fan_out,
            draft_replicas=draft_replicas,
            tokens_per_second=rate,
            speedup=rate / self._plain_rate,
            tokens_per_round=rounds.tokens_per_round,
            hit_rate=hit_rate,
            proposed_per_round=rounds.proposed_per_round,
            steps_per_round=rounds.steps_per_round,
        )

    def _rate(self, rounds: Rounds, seconds: float) -> float:
        all_s = self._first_s + seconds
        check(0 < all_s < math.inf, "rounds take time")
        return self._load.sessions * rounds.num_tokens / all_s

    def _best(self, options: Iterable[Option]) -> Option:
        best: Option | None = None
        for option in options:
            if best is None or option.tokens_per_second > best.tokens_per_second * (1 + GAIN_MIN):
                best = option
        check(best is not None, "there is nothing to choose from")
        return best  # type: ignore[return-value]


RESAMPLES: Final = 200
LEVEL: Final = 0.9
"""Share of the resamples that lie in an interval."""
TEXTS_MIN: Final = 2
"""Of fewer there is nothing to draw from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What other prompts of the same kind might have led to."""

    num_texts: int
    num_resamples: int
    level: float
    speedup: tuple[float, float]
    """Of what was chosen, over plain decoding: lowest and highest within the level."""
    num_draft_tokens: tuple[int, int]
    """The K that would be chosen, likewise."""
    same_share: float
    """Share of the resamples that lead to the same rule and K."""


class _Sums:
    """The rounds of texts as rows of numbers, whose sums are rounds again."""

    def __init__(self, parts: Sequence[Rounds]) -> None:
        self._kinds = list(dict.fromkeys(kind for part in parts for kind in part.kinds))
        self._depths = len(parts[0].reached)
        self._rows = np.array(
            [
                [
                    part.num_tokens, part.num_rounds, part.contexts, *part.reached, *part.accepted,
                    *(part.kinds.get(kind, 0.0) for kind in self._kinds),
                ]
                for part in parts
            ]
        )  # fmt: skip

    def of(self, counts: npt.NDArray[np.int64]) -> Rounds:
        """Of each text as many times as `counts` [texts] says."""
        tokens, num_rounds, contexts, *rest = (float(value) for value in counts @ self._rows)
        depths = self._depths
        return Rounds(
            num_texts=int(counts.sum()),
            num_tokens=round(tokens),
            num_rounds=num_rounds,
            contexts=contexts,
            kinds={
                kind: number
                for kind, number in zip(self._kinds, rest[2 * depths :], strict=True)
                if number
            },
            reached=tuple(rest[:depths]),
            accepted=tuple(rest[depths : 2 * depths]),
        )


def spread(
    choice: Choice,
    times: ServiceTimes,
    load: Load,
    prompt_tokens: Sequence[int],
    plain: Sequence[Rounds],
    options: Sequence[Sequence[Rounds]],
    seed: int = 0,
) -> Spread | None:
    """Of a `choice` by `Chooser` for these times and load. `prompt_tokens` and `plain` are by text,
    `options` by option of the choice and text. None of fewer than `TEXTS_MIN` texts."""
    num = len(prompt_tokens)
    check(len(plain) == num and len(options) == len(choice.options), "each option has its texts")
    if num < TEXTS_MIN:
        return None
    generator = np.random.default_rng(seed)
    plain_sums, sums = _Sums(plain), [_Sums(parts) for parts in options]
    speedups, chosen = [], []
    for _ in range(RESAMPLES):
        drawn = generator.integers(num, size=num)
        counts = np.bincount(drawn, minlength=num)
        chooser = Chooser(
            times, load, [prompt_tokens[at] for at in drawn], plain_sums.of(counts),
            choice.plain.rule,
        )  # fmt: skip
        again = [
            chooser.once_more(option, rounds.of(counts))
            for option, rounds in zip(choice.options, sums, strict=True)
        ]
        best = chooser.best(again)
        chosen.append((best.rule, best.num_draft_tokens))
        speedups.append(_like(choice.chosen, [choice.plain, *again]).speedup)
    same = (choice.chosen.rule, choice.chosen.num_draft_tokens)
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    ks = np.quantile([k for _, k in chosen], tails, method="nearest")
    low, high = np.quantile(speedups, tails)
    return Spread(
        num_texts=num,
        num_resamples=RESAMPLES,
        level=LEVEL,
        speedup=(float(low), float(high)),
        num_draft_tokens=(int(ks[0]), int(ks[1])),
        same_share=sum(found == same for found in chosen) / RESAMPLES,
    )


def _like(chosen: Option, options: Sequence[Option]) -> Option:
    return next(
        option
        for option in options
        if (option.rule, option.num_draft_tokens) == (chosen.rule, chosen.num_draft_tokens)
    )


@dataclass(frozen=True, slots=True)
class AcceptedBy:
    """Acceptance of some of the texts."""

    num_tokens: int
    by_position: Mapping[str, tuple[float | None, ...]]
    """By rule: the chance that a draft token of depth 1, 2, ... is accepted given that those before
    it were, in rounds as they would be played; None where none came so far."""


@dataclass(frozen=True, slots=True)
class TemperaturePlan:
    """What one temperature allows."""

    temperature: float
    acceptance: Mapping[str, AcceptedBy]
    """By category, and `all`."""
    choice: Choice
    times: Mapping[str, object]
    """What the rehearsal fitted to the engines' tables."""
    spread: Spread | None
    """What other prompts might have led to; None where there was one prompt."""

    @property
    def is_at_edge(self) -> bool:
        """Whether the K that was chosen is the largest that was looked at."""
        chosen, options = self.choice.chosen, self.choice.options
        return chosen.num_draft_tokens == max(one.num_draft_tokens for one in options)


class Replays:
    """The rounds of one sample by rule and K, each replayed once."""

    def __init__(self, kind: DraftKind, sample: Sample) -> None:
        self._kind = kind
        self._sample = sample
        self._found: dict[tuple[Rule, int], tuple[Rounds, ...]] = {}

    def of(self, rule: Rule, num_draft_tokens: int) -> tuple[Rounds, ...]:
        """By text; 0 = plain decoding."""
        key = (rule, num_draft_tokens)
        if key not in self._found:
            self._found[key] = scripted(self._kind, self._sample, rule, num_draft_tokens)
        return self._found[key]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Those that differ: a look-up's tokens are accepted alike under all."""
        return self._sample.rules if self._kind.has_model else self._sample.rules[:1]

    def candidates(self) -> Iterator[Candidate]:
        """Every rule and K."""
        for rule in self.rules:
            for num_draft_tokens in SWEEP:
                rounds = total(self.of(rule, num_draft_tokens))
                hits: tuple[float, ...] = ()
                if self._kind.looks_ahead:
                    known = [a or 0.0 for a in rounds.by_position()[:num_draft_tokens]]
                    hits = self._sample.guessing[rule].hit_rates(known)
                yield Candidate(rule, num_draft_tokens, rounds, hits)

    def accepted(self) -> dict[str, AcceptedBy]:
        """Acceptance by category, and of all, at each rule's longest proposals."""
        texts = self._sample.texts
        places: dict[str, list[int]] = {}
        for index, text in enumerate(texts):
            places.setdefault(text.category, []).append(index)
        places["all"] = list(range(len(texts)))
        return {name: self._accepted(chosen) for name, chosen in places.items()}

    def _accepted(self, chosen: Sequence[int]) -> AcceptedBy:
        by_rule = {}
        for rule in self.rules:
            rounds = self.of(rule, NUM_DEPTHS)
            by_rule[rule.value] = total([rounds[i] for i in chosen]).by_position()[:NUM_DEPTHS]
        return AcceptedBy(sum(len(self._sample.texts[i].token_ids) for i in chosen), by_rule)


def choose(load: Load, replays: Replays, sample: Sample, times: ServiceTimes) -> TemperaturePlan:
    """The plan for one temperature."""
    prompt_tokens = [len(text.prompt_ids) for text in sample.texts]
    plain = total(replays.of(sample.rules[0], 0))
    chooser = Chooser(times, load, prompt_tokens, plain, sample.rules[0])
    choice: Choice = chooser.choose(replays.candidates())
    parts = [replays.of(option.rule, option.num_draft_tokens) for option in choice.options]
    sure = spread(choice, times, load, prompt_tokens, replays.of(sample.rules[0], 0), parts)
    return TemperaturePlan(sample.temperature, replays.accepted(), choice, _times(times), sure)


def _times(times: ServiceTimes) -> Mapping[str, object]:
    found = asdict(times)
    return {name: value for name, value in found.items() if name not in ("target", "draft")}
