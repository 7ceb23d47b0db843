"""Chooses K, rule, look-ahead and the number of draft replicas."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from benchmarks.acceptance import Sample, rules_at
from outrider.config import DraftConfig
from outrider.speculation.sampling_params import Rule
from outrider.speculation.text_acceptance import NUM_DEPTHS

from .rounds import Option, Rounds, ServiceTimes, scripted, total

GAIN_MIN = 0.005
"""An option replaces an earlier option only if it is faster by this share."""
REPLICAS_LOSS_MAX = 0.05
"""Fewer drafts than sessions are chosen if at most this share of the speed is lost."""
SWEEP = (1, 2, 3, 4, 6, 8, 12, 16)
"""Values of K to compare with plain decoding."""
FAN_OUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of outcomes for which a draft may draft ahead, to compare with no look-ahead."""
RESAMPLES = 200
LEVEL = 0.9


class Chooser:
    """Computes how fast each `Option` decodes the same texts in `sessions` concurrent sessions."""

    def __init__(
        self, times: ServiceTimes, sessions: int, prompt_tokens: Sequence[int], plain: Rounds,
        rule: Rule,
    ) -> None:  # fmt: skip
        """`prompt_tokens` [texts] are the lengths of the prompts. `plain` are rounds without
        drafts."""
        self._times, self._sessions = times, sessions
        self._first_s = times.first_seconds(prompt_tokens)
        self.plain = Option(rule=rule, num_draft_tokens=0)
        self.plain = self.timed(self.plain, plain)

    def timed(self, way: Option, rounds: Rounds) -> Option:
        seconds = self._first_s + self._times.seconds(rounds, way, self._sessions)
        rate = self._sessions * rounds.num_tokens / seconds
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
        """The fastest way to decode with this rule and K, without look-ahead or with one of the
        `FAN_OUTS`. `hit_rates` has the hit rates of look-ahead for 1, 2, ... outcomes; empty = the
        drafter cannot look ahead."""
        waits = Option(rule=rule, num_draft_tokens=num_draft_tokens)
        ahead = [
            replace(waits, look_ahead=number, hit_rate=hit_rates[number - 1])
            for number in FAN_OUTS
            if number <= len(hit_rates)
        ]
        return best(self._with_replicas(way, rounds) for way in (waits, *ahead))

    def _with_replicas(self, way: Option, rounds: Rounds) -> Option:
        """If a model drafts, chooses the smallest number of draft replicas that loses at most
        `REPLICAS_LOSS_MAX` of the speed."""
        if self._times.draft is None:
            return self.timed(way, rounds)

        def timed(number: int) -> Option:
            return self.timed(replace(way, draft_replicas=number), rounds)

        most = 1 if self._times.shares_device else self._sessions
        least = timed(most).tokens_per_second * (1 - REPLICAS_LOSS_MAX)
        rate = lambda number: timed(number).tokens_per_second  # noqa: E731
        return timed(1 + bisect_left(range(1, most), least, key=rate))


def best(options: Iterable[Option]) -> Option:
    """The fastest option. Of options that differ by less than `GAIN_MIN`, the earlier wins."""
    first, *others = options
    for option in others:
        if option.tokens_per_second > first.tokens_per_second * (1 + GAIN_MIN):
            first = option
    return first


def speedup_interval(
    times: ServiceTimes,
    sessions: int,
    prompt_tokens: Sequence[int],
    plain: Sequence[Rounds],
    chosen: tuple[Option, Sequence[Rounds]],
) -> tuple[float, float] | None:
    """The bootstrap interval of an option's speed-up over plain decoding, with the confidence
    `LEVEL`. Draws `RESAMPLES` samples of the texts. `prompt_tokens` [texts] are the lengths of the
    prompts, `plain` [texts] the rounds without drafts, and `chosen` has the option and its rounds
    [texts]. Returns None for a single text."""
    num, generator = len(prompt_tokens), np.random.default_rng(0)
    if num < 2:
        return None
    speedups = []
    for _ in range(RESAMPLES):
        drawn = generator.integers(num, size=num).tolist()
        plain_rounds, rounds = (total([one[i] for i in drawn]) for one in (plain, chosen[1]))
        tokens = [prompt_tokens[i] for i in drawn]
        chooser = Chooser(times, sessions, tokens, plain_rounds, chosen[0].rule)
        speedups.append(chooser.timed(chosen[0], rounds).speedup)
    low, high = np.quantile(speedups, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


@dataclass(frozen=True)
class TemperaturePlan:
    temperature: float
    acceptance: Mapping[str, Mapping[str, Any]]
    """For each category of texts, and for `all` texts: the number of tokens (`num_tokens`), and
    `Rounds.by_position` of each rule (`by_position`)."""
    chosen: Option
    plain: Option
    options: tuple[Option, ...]
    times: ServiceTimes
    survival: tuple[float, ...]
    """[K]: the chances that at least 1, 2, ... draft tokens are accepted, for the chosen option."""
    speedup_interval: tuple[float, float] | None


def choose(
    sessions: int, draft: DraftConfig, sample: Sample, times: ServiceTimes
) -> TemperaturePlan:
    """Compares plain decoding, and each rule and K, for the texts of a sample."""
    rules, drafter = rules_at(sample.temperature), draft.drafter
    if not drafter.name:  # A look-up drafts alone. All rules accept the same tokens of it.
        rules = rules[:1]
    parts = [scripted(draft, sample, rules[0], 0)]
    prompt_tokens = [len(text.prompt_ids) for text in sample.texts]
    chooser = Chooser(times, sessions, prompt_tokens, total(parts[0]), rules[0])
    options, measured = [chooser.plain], {}
    for rule in rules:
        for k in SWEEP:
            parts.append(scripted(draft, sample, rule, k))
            rounds, hit_rates = total(parts[-1]), tuple[float, ...]()
            # Look-ups have no look-ahead. `ServiceTimes` lacks times for the look-ahead of hybrids.
            if drafter.lookup is None:
                hit_rates = sample.guessing[rule].hit_rates(rounds.chances(k))
            options.append(chooser.best_way(rule, k, rounds, hit_rates))
            if k == NUM_DEPTHS:
                measured[rule] = parts[-1]
    chosen = best(options)
    chosen_parts = parts[options.index(chosen)]
    chances = total(chosen_parts).chances(chosen.num_draft_tokens)
    return TemperaturePlan(
        temperature=sample.temperature,
        acceptance=_accepted(sample, measured),
        chosen=chosen,
        plain=options[0],
        options=tuple(options[1:]),
        times=times,
        survival=tuple(accumulate(chances, mul)),
        speedup_interval=speedup_interval(
            times, sessions, prompt_tokens, parts[0], (chosen, chosen_parts)
        ),
    )


def _accepted(
    sample: Sample, measured: Mapping[Rule, Sequence[Rounds]]
) -> dict[str, dict[str, Any]]:
    """`TemperaturePlan.acceptance`, from the rounds of each text with K = `NUM_DEPTHS`."""
    texts, found = sample.texts, {}
    for name in dict.fromkeys([*(text.category for text in texts), "all"]):
        places = [i for i, text in enumerate(texts) if name in (text.category, "all")]
        by_position = {
            rule.value: total([parts[i] for i in places]).by_position[:NUM_DEPTHS]
            for rule, parts in measured.items()
        }
        num_tokens = sum(len(texts[i].token_ids) for i in places)
        found[name] = {"num_tokens": num_tokens, "by_position": by_position}
    return found
