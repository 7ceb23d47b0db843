"""Chooses K, rule, look-ahead and the number of draft replicas, and reports the choice."""

import shlex
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from outrider.bench.acceptance import Sample, rules_at
from outrider.bench.report import table
from outrider.config.deployment import DraftConfig
from outrider.speculation.sampling_params import Rule
from outrider.speculation.text_acceptance import NUM_DEPTHS

from .rounds import NOISE, Option, Rounds, ServiceTimes, scripted, total
from .simulation import Pair

GAIN_MIN = 0.005
"""An option replaces an earlier option only if it is faster by this share."""
REPLICAS_LOSS_MAX = 0.05
SWEEP = (1, 2, 3, 4, 6, 8, 12, 16)
"""Values of K to compare with plain decoding."""
FAN_OUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of outcomes for which a draft may draft ahead, to compare with no look-ahead."""
RESAMPLES = 200
LEVEL = 0.9


class Chooser:
    """Computes how fast each `Option` decodes the same texts in `sessions` concurrent sessions."""

    def __init__(
        self,
        times: ServiceTimes,
        sessions: int,
        prompt_tokens: Sequence[int],
        plain: Rounds,
        rule: Rule,
    ) -> None:
        """`prompt_tokens` [texts] are the prompts' lengths, `plain` the rounds without drafts."""
        self._times, self._sessions = times, sessions
        prefills = (times.target.step_seconds(max(1, num)) for num in prompt_tokens)
        self._first_s = sum(map(times.first.at, prefills))
        self.plain = self.timed(Option(rule=rule, num_draft_tokens=0), plain)

    def timed(self, way: Option, rounds: Rounds) -> Option:
        seconds = self._first_s + self._times.seconds(rounds, way, self._sessions)
        rate = self._sessions * rounds.num_tokens / seconds
        return replace(
            way,
            tokens_per_second=rate,
            speedup=rate / self.plain.tokens_per_second if way.num_draft_tokens else 1.0,
            tokens_per_round=rounds.tokens_per_round,
            proposed_per_round=rounds.proposed_per_round,
            steps_per_round=rounds.steps_per_round,
        )

    def best_way(
        self, rule: Rule, num_draft_tokens: int, rounds: Rounds, hit_rates: Sequence[float] = ()
    ) -> Option:
        """The fastest way to decode with this rule and K, without look-ahead or with one of the
        `FAN_OUTS`. `hit_rates` has the hit rates for 1, 2, ... outcomes; empty = no look-ahead."""
        waits = Option(rule=rule, num_draft_tokens=num_draft_tokens)
        ahead = [
            replace(waits, look_ahead=number, hit_rate=hit_rates[number - 1])
            for number in FAN_OUTS
            if number <= len(hit_rates)
        ]
        return best(self._with_replicas(way, rounds) for way in (waits, *ahead))

    def _with_replicas(self, way: Option, rounds: Rounds) -> Option:
        """Sets the number of draft replicas if a model drafts. On a shared device, this is 1. On
        other devices, it is the smallest number with a rate of at least (1 - `REPLICAS_LOSS_MAX`)
        times the rate with one draft per session."""
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
    """The bootstrap interval of an option's speed-up, with the confidence `LEVEL`; None if there is
    a single text. `prompt_tokens` [texts] are the lengths of the prompts, `plain` [texts] the
    rounds without drafts, and `chosen` has the option and its rounds [texts]."""
    num, generator = len(prompt_tokens), np.random.default_rng(0)
    if num < 2:
        return None
    speedups = []
    for _ in range(RESAMPLES):
        drawn = generator.integers(num, size=num).tolist()
        plain_rounds, rounds = (
            total([measured[i] for i in drawn]) for measured in (plain, chosen[1])
        )
        tokens = [prompt_tokens[i] for i in drawn]
        chooser = Chooser(times, sessions, tokens, plain_rounds, chosen[0].rule)
        speedups.append(chooser.timed(chosen[0], rounds).speedup)
    low, high = np.quantile(speedups, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


@dataclass(frozen=True)
class TemperaturePlan:
    temperature: float
    acceptance: Mapping[str, Mapping[str, Any]]
    """For each category of texts, and for `all` texts, an object with the keys `num_tokens` and
    `by_position`. `by_position` maps each rule to `Rounds.by_position`."""
    chosen: Option
    plain: Option
    options: tuple[Option, ...]
    times: ServiceTimes
    survival: tuple[float, ...]
    """[K]: the chances that at least 1, 2, ... draft tokens are accepted, for the chosen option."""
    speedup_interval: tuple[float, float] | None

    @property
    def doubt(self) -> str:
        """Why the measured times must be wrong; empty if they may be right. A round with drafts
        takes at least as long as a plain round, so the speed-up is at most the tokens per round."""
        speedup, tokens = self.chosen.speedup, self.chosen.tokens_per_round
        if speedup <= (1 + NOISE) * tokens:
            return ""
        return f"a speed-up of {speedup:.2f} is impossible with {tokens:.2f} tokens a round"


def choose(
    sessions: int, draft: DraftConfig, sample: Sample, times: ServiceTimes
) -> TemperaturePlan:
    rules, drafter = rules_at(sample.temperature), draft.drafter
    if not drafter.name:  # Every rule accepts a look-up's tokens with the same probability.
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
    # Only requests use the rule coupled, with a seed. No setting makes it the default.
    chosen = best(option for option in options if option.rule is not Rule.COUPLED)
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
    texts, acceptance = sample.texts, {}
    for name in dict.fromkeys([*(text.category for text in texts), "all"]):
        places = [i for i, text in enumerate(texts) if name in (text.category, "all")]
        by_position = {
            rule.value: total([parts[i] for i in places]).by_position[:NUM_DEPTHS]
            for rule, parts in measured.items()
        }
        num_tokens = sum(len(texts[i].token_ids) for i in places)
        acceptance[name] = {"num_tokens": num_tokens, "by_position": by_position}
    return acceptance


COLUMNS = {
    "rule": "rule",
    "num_draft_tokens": "K",
    "look_ahead": "look ahead",
    "draft_replicas": "drafts",
    "hit_rate": "hit rate",
    "tokens_per_second": "tokens per second",
    "speedup": "speed up",
    "tokens_per_round": "tokens per round",
    "proposed_per_round": "drafted per round",
    "steps_per_round": "steps per round",
}
"""Field of `Option` -> its column, short enough for a terminal of 80 columns."""


@dataclass(frozen=True)
class PlanReport:
    """The output of `outrider plan`: JSON and tables."""

    model: str
    draft_model: str
    num_prompts: int
    max_tokens: int
    concurrency: int
    round_trip_ms: float
    plans: tuple[TemperaturePlan, ...]

    @property
    def pair(self) -> Pair:
        """The target and draft to simulate, with the option chosen for the first temperature."""
        plan, name = self.plans[0], f"{self.draft_model} for {self.model}"
        return Pair(name=name, times=plan.times, way=plan.chosen, survival=plan.survival)

    def values(self) -> dict[str, Any]:
        """The JSON object."""
        values = asdict(self)
        plans = values.pop("plans")
        by_temperature = {f"{plan['temperature']:g}": plan for plan in plans}
        return values | {"temperatures": by_temperature, "pair": asdict(self.pair)}

    def tables(self) -> Iterator[RenderableType]:
        """The tables and sentences that are printed."""
        link = f", link {self.round_trip_ms:g} ms" if self.round_trip_ms else ""
        for plan in self.plans:
            yield self._acceptance(plan)
            title = f"Expected at temperature {plan.temperature:g}, concurrency {self.concurrency}"
            options = (plan.plain, *plan.options)
            yield table(
                f"{title}{link}",
                [
                    {COLUMNS[key]: value for key, value in asdict(option).items()}
                    for option in options
                ],
                num_keys=2,
                joined="rule",
                bold=options.index(plan.chosen),
            )
            yield Text(self._sentence(plan), style="bold")
            yield from _advice(plan)
            yield self._certainty(plan)

    def _acceptance(self, plan: TemperaturePlan) -> RenderableType:
        return table(
            f"{self.draft_model} for {self.model}, temperature {plan.temperature:g}: chance that a "
            "draft token is accepted if all earlier draft tokens were",
            [
                {"prompts": name, "rule": rule}
                | {str(depth): chance for depth, chance in enumerate(chances, start=1)}
                for name, figures in plan.acceptance.items()
                for rule, chances in figures["by_position"].items()
            ],
            num_keys=2,
            joined="rule",
        )

    def _certainty(self, plan: TemperaturePlan) -> str:
        if plan.speedup_interval is None:
            return "One prompt does not show how certain this plan is. Use several (--prompts)."
        low, high = plan.speedup_interval
        return (
            f"In {LEVEL:.0%} of {RESAMPLES} resamples of these {self.num_prompts} prompts, the "
            f"chosen option has a speed-up of {low:.2f} to {high:.2f}. Errors of the measured "
            "times are not included."
        )

    def _sentence(self, plan: TemperaturePlan) -> str:
        chosen = plan.chosen
        is_apart = chosen.draft_replicas > 0 and not plan.times.shares_device
        flags: list[object] = ["--draft-model", self.draft_model]
        flags = flags * (chosen.num_draft_tokens > 0)
        flags += ["--num-draft-tokens", chosen.num_draft_tokens]
        if chosen.look_ahead or is_apart:  # A draft on its own device looks ahead by default.
            flags += ["--look-ahead", chosen.look_ahead]
        if chosen.draft_replicas > 1:
            flags += ["--num-drafts", chosen.draft_replicas]
        drafts = ""
        if chosen.draft_replicas:
            if chosen.rule is not Rule.GREEDY:
                flags += ["--unseeded-rule", chosen.rule.value]
            drafts = f"{chosen.draft_replicas:g} draft{'s' * (chosen.draft_replicas > 1)}"
            drafts = f"With {drafts} for each target replica, "
        command = shlex.join(["outrider", "serve", self.model, *map(str, flags)])
        expected = f"{chosen.tokens_per_second:.1f} tokens/s are expected"
        if chosen.num_draft_tokens == 0:
            return (
                f"Decode plainly with `{command}` and your other flags: {expected}, and no draft "
                "is faster."
            )
        return (
            f"Deploy with `{command}` and your other flags. {drafts}{expected}, "
            f"{chosen.speedup:.2f} times plain decoding."
        )


def _advice(plan: TemperaturePlan) -> Iterator[str]:
    if plan.doubt:
        yield (
            f"Warning: the measured times are wrong, because {plan.doubt}. Repeat the plan while "
            "nothing else uses this machine."
        )
    plain = plan.plain.tokens_per_second
    drafted = (option for option in plan.options if option.draft_replicas)
    rates = (option.tokens_per_second / (1 + option.draft_replicas) for option in drafted)
    rate = max(rates, default=plain)
    if rate < plain and not plan.times.shares_device:
        yield (
            "Do not use a separate draft if its device could run another target. On average, a "
            f"device yields {rate:.1f} tokens/s with a separate draft, and {plain:.1f} without. "
            "`outrider plan --devices` also compares heads, and drafts that several targets share."
        )
