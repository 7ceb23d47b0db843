"""Which K, rule and fan-out to deploy, and with how many drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from benchmarks.acceptance import Sample, rules_at
from outrider.config import DraftConfig
from outrider.errors import check
from outrider.speculation.sampling_params import Rule
from outrider.speculation.text_acceptance import NUM_DEPTHS

from .round_times import Load, ServiceTimes
from .rounds import Rounds, scripted, total

GAIN_MIN: Final = 0.005
"""What is larger or does more is chosen where it is faster by this share."""
REPLICAS_LOSS_MAX: Final = 0.05
"""What fewer drafts may cost of the speed with one for each session."""
SWEEP: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Every K that is looked at, beside plain decoding."""
FAN_OUTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Outcomes worked out ahead that are looked at."""
RESAMPLES: Final = 200
LEVEL: Final = 0.9
"""Share of the resamples that lie in an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way to decode, and what it is expected to bring."""

    rule: Rule
    num_draft_tokens: int
    """K; 0 = plain decoding."""
    look_ahead: int = 0
    """Fan-out: outcomes of a round worked out ahead; 0 = the draft is waited for."""
    draft_replicas: int = 0
    """For each target replica; 0 for plain decoding and look-ups."""
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

    @property
    def way(self) -> tuple[Rule, int]:
        """By which options are told apart."""
        return self.rule, self.num_draft_tokens


class Chooser:
    """Compares ways to decode the same texts under one load."""

    def __init__(
        self, times: ServiceTimes, load: Load, prompt_tokens: Sequence[int], plain: Rounds,
        rule: Rule,
    ) -> None:  # fmt: skip
        """`prompt_tokens` [texts] are read at each text's beginning; `plain` are the rounds without
        a draft. `load` says nothing of drafts."""
        check(len(prompt_tokens) == round(plain.num_texts) > 0, "each text has a prompt")
        self._times, self._load = times, load
        self._first_s = times.first_seconds(prompt_tokens)
        self.plain = Option(rule=rule, num_draft_tokens=0)
        self.plain = replace(self.timed(self.plain, plain), speedup=1.0)

    def timed(self, way: Option, rounds: Rounds) -> Option:
        """A way to decode, over these rounds."""
        load = replace(self._load, draft_replicas=max(1, way.draft_replicas))
        if way.num_draft_tokens == 0:
            seconds = self._times.plain_seconds(rounds, load)
        elif way.hit_rate is None:
            seconds = self._times.drafted_seconds(rounds, load)
        else:
            seconds = self._times.look_ahead_seconds(
                rounds, load, way.num_draft_tokens, way.look_ahead, way.hit_rate
            )
        rate = load.sessions * rounds.num_tokens / (self._first_s + seconds)
        return replace(
            way,
            tokens_per_second=rate,
            speedup=rate / (self.plain.tokens_per_second or rate),
            tokens_per_round=rounds.tokens_per_round,
            proposed_per_round=rounds.proposed_per_round,
            steps_per_round=rounds.steps_per_round,
        )

    def best_way(
        self, rule: Rule, num_draft_tokens: int, rounds: Rounds, hit_rates: Sequence[float] = ()
    ) -> Option:
        """The faster of waiting and looking ahead, with the drafts it needs. `hit_rates` are those
        with 1, 2, ... outcomes worked out ahead; empty where the drafter cannot."""
        waits = Option(rule=rule, num_draft_tokens=num_draft_tokens)
        ways = [waits] + [
            replace(waits, look_ahead=number, hit_rate=hit_rates[number - 1])
            for number in FAN_OUTS
            if number <= len(hit_rates)
        ]
        return best(self._with_replicas(way, rounds) for way in ways)

    def _with_replicas(self, way: Option, rounds: Rounds) -> Option:
        """With as few drafts as cost little speed; none for a look-up."""
        if self._times.draft is None:
            return self.timed(way, rounds)
        most = 1 if self._times.shares_device else self._load.sessions
        found = self.timed(replace(way, draft_replicas=most), rounds)
        least = found.tokens_per_second * (1 - REPLICAS_LOSS_MAX)
        fewer = (
            self.timed(replace(way, draft_replicas=number), rounds) for number in range(1, most)
        )
        return next((option for option in fewer if option.tokens_per_second >= least), found)


def best(options: Iterable[Option]) -> Option:
    """The fastest of them; of about equals the first."""
    first, *others = options
    for option in others:
        if option.tokens_per_second > first.tokens_per_second * (1 + GAIN_MIN):
            first = option
    return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What other prompts of the same kind might have led to."""

    num_texts: int
    num_resamples: int = RESAMPLES
    level: float = LEVEL
    speedup: tuple[float, float]
    """Of what was chosen, over plain decoding: lowest and highest within the level."""
    num_draft_tokens: tuple[int, int]
    """The K that would be chosen, likewise."""
    same_share: float
    """Share of the resamples that lead to the same rule and K."""


def spread(
    options: Sequence[Option],
    rounds: Sequence[Sequence[Rounds]],
    times: ServiceTimes,
    load: Load,
    prompt_tokens: Sequence[int],
) -> Spread | None:
    """How sure the choice of the best of `options` is, of which the first decodes plainly: by
    bootstrap samples of the texts. `rounds` are by option and text, `prompt_tokens` by text. None
    of a single text."""
    num = len(prompt_tokens)
    check(len(rounds) == len(options), "each option has its texts")
    if num < 2:
        return None
    chosen, generator = best(options).way, np.random.default_rng(0)
    sums = [np.stack([one.sums for one in parts]) for parts in rounds]
    speedups, found = [], []
    for _ in range(RESAMPLES):
        drawn = generator.integers(num, size=num)
        counts = np.bincount(drawn, minlength=num)
        plain, *drafted = (Rounds(counts @ rows) for rows in sums)
        chooser = Chooser(times, load, [prompt_tokens[at] for at in drawn], plain, options[0].rule)
        again = [
            chooser.timed(option, part) for option, part in zip(options[1:], drafted, strict=True)
        ]
        again = [chooser.plain, *again]
        found.append(best(again).way)
        speedups.append(next(option.speedup for option in again if option.way == chosen))
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    ks = np.quantile([k for _, k in found], tails, method="nearest")
    low, high = np.quantile(speedups, tails)
    return Spread(
        num_texts=num,
        speedup=(float(low), float(high)),
        num_draft_tokens=(int(ks[0]), int(ks[1])),
        same_share=sum(way == chosen for way in found) / RESAMPLES,
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
    chosen: Option
    """Plain decoding where no draft pays."""
    plain: Option
    options: tuple[Option, ...]
    """The best way for each rule and K that was looked at."""
    times: Mapping[str, object]
    """What the rehearsal fitted to the engines' tables."""
    spread: Spread | None
    """What other prompts might have led to; None where there was one prompt."""

    @property
    def at_edge(self) -> bool:
        """Whether the K that was chosen is the largest that was looked at."""
        return self.chosen.num_draft_tokens == max(one.num_draft_tokens for one in self.options)


class Replays:
    """The rounds of one sample by rule and K, each replayed once."""

    def __init__(self, draft: DraftConfig, sample: Sample) -> None:
        self.sample = sample
        self._draft = draft
        self._found: dict[tuple[Rule, int], tuple[Rounds, ...]] = {}

    def of(self, rule: Rule, num_draft_tokens: int) -> tuple[Rounds, ...]:
        """By text; 0 = plain decoding."""
        way = (rule, num_draft_tokens)
        if way not in self._found:
            self._found[way] = scripted(self._draft, self.sample, *way)
        return self._found[way]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Those that differ: a look-up's tokens are accepted alike under all."""
        rules = rules_at(self.sample.temperature)
        return rules if self._draft.drafter.model is not None else rules[:1]

    def options(self, chooser: Chooser) -> Iterator[Option]:
        """The best way for every rule and K. Looking ahead is planned for a model alone."""
        for rule in self.rules:
            for num_draft_tokens in SWEEP:
                rounds, hits = total(self.of(rule, num_draft_tokens)), tuple[float, ...]()
                if self._draft.drafter.lookup is None:
                    known = [chance or 0.0 for chance in rounds.by_position[:num_draft_tokens]]
                    hits = self.sample.guessing[rule].hit_rates(known)
                yield chooser.best_way(rule, num_draft_tokens, rounds, hits)

    def accepted(self) -> dict[str, AcceptedBy]:
        """Acceptance by category, and of all, at each rule's longest proposals."""
        texts, found = self.sample.texts, {}
        for name in dict.fromkeys([*(text.category for text in texts), "all"]):
            places = [i for i, text in enumerate(texts) if name in (text.category, "all")]
            by_rule = {}
            for rule in self.rules:
                rounds = total([self.of(rule, NUM_DEPTHS)[i] for i in places])
                by_rule[rule.value] = rounds.by_position[:NUM_DEPTHS]
            found[name] = AcceptedBy(sum(len(texts[i].token_ids) for i in places), by_rule)
        return found


def choose(load: Load, replays: Replays, times: ServiceTimes) -> TemperaturePlan:
    """The plan for one temperature."""
    sample = replays.sample
    prompt_tokens = [len(text.prompt_ids) for text in sample.texts]
    rule = rules_at(sample.temperature)[0]
    plain = replays.of(rule, 0)
    chooser = Chooser(times, load, prompt_tokens, total(plain), rule)
    options = (chooser.plain, *replays.options(chooser))
    parts = [plain, *(replays.of(*option.way) for option in options[1:])]
    found = {k: v for k, v in asdict(times).items() if k not in ("target", "draft")}
    return TemperaturePlan(
        sample.temperature, replays.accepted(), best(options), options[0], options[1:], found,
        spread(options, parts, times, load, prompt_tokens),
    )  # fmt: skip
