"""`outrider plan`: what drafting would bring, before anything is deployed.

read      the target answers the prompts; the draft's model reads the answers
rehearse  short sessions through the services put the engines' cost tables where rounds stand
choose    rounds are told from the answers for every rule and K, and timed
simulate  (asked for) fleets of what was chosen, on a virtual clock; `plan_simulation`
validate  (asked for) the same prompts through a deployment, predicted beside measured
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import SettingError
from outrider.limits import SESSIONS_PER_COORDINATOR_MAX, TEMPERATURE_MAX
from outrider.planning.choosing import Candidate, Choice, Chooser
from outrider.planning.replay import Rounds, total
from outrider.planning.resampling import spread
from outrider.planning.round_times import Load, ServiceTimes
from outrider.settings import check_range
from outrider.speculation.sampling_params import Rule
from outrider.speculation.text_acceptance import NUM_DEPTHS

from .number_options import numbers
from .plan_reading import Sample
from .plan_report import AcceptedBy, PlanReport, TemperaturePlan
from .plan_script import DraftKind, scripted
from .plan_simulation import ROUND_TRIP_MS_MAX
from .prompt_options import PromptOptions, add_prompt_arguments, prompt_values

SWEEP: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Every K that is looked at, beside plain decoding."""
BUILT_IN_PROMPTS: Final = 12
"""Of the built-in ones, where neither a file nor a number is named."""
TEMPERATURES_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(PromptOptions):
    """What `outrider plan` is asked for. Wrong values raise `SettingError`."""

    max_tokens: int = 96
    temperature: tuple[float, ...] = (0.0, 1.0)
    round_trip_ms: float = 0.0
    """Of the link between coordinator and draft, beside what messages take on this machine."""
    concurrency: int = 1
    """Sessions that a target replica decodes at a time."""
    separate_draft: bool = False
    """Whether to plan for drafts that compute elsewhere than the target, though here they share."""
    validate: bool = False
    plot: Path | None = None
    """Where to write the plot, an SVG."""

    def __post_init__(self) -> None:
        PromptOptions.__post_init__(self)
        check_range("round_trip_ms", self.round_trip_ms, 0, ROUND_TRIP_MS_MAX)
        check_range("concurrency", self.concurrency, 1, SESSIONS_PER_COORDINATOR_MAX)
        check_range("temperature", len(self.temperature), 1, TEMPERATURES_MAX)
        for temperature in self.temperature:
            check_range("temperature", temperature, 0, TEMPERATURE_MAX)
        if len(set(self.temperature)) < len(self.temperature):
            given = ",".join(f"{temperature:g}" for temperature in self.temperature)
            raise SettingError("temperature", f"{given!r} is wrong; one is named twice")
        if self.plot is not None and not self.plot.absolute().parent.is_dir():
            raise SettingError("plot", f"{self.plot} cannot be written: there is no such folder")
        if self.validate:
            self._check_validation()

    def _check_validation(self) -> None:
        """What is measured is one session at a time on this machine."""
        for name, value, allowed in (
            ("concurrency", self.concurrency, 1),
            ("round_trip_ms", self.round_trip_ms, 0),
            ("separate_draft", self.separate_draft, False),
        ):
            if value != allowed:
                raise SettingError(
                    name,
                    f"{value} cannot be validated here; with --validate it must be {allowed}",
                )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> PlanOptions:
        """From what a parser with `add_arguments` returned."""
        names = (
            "temperature",
            "round_trip_ms",
            "concurrency",
            "separate_draft",
            "validate",
            "plot",
        )
        values: dict[str, Any] = {name: getattr(arguments, name) for name in names}
        values |= prompt_values(arguments)
        if values["num_prompts"] is None and values["prompts"] is None:
            values["num_prompts"] = BUILT_IN_PROMPTS
        return cls(**values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `plan`, but for those that describe the deployment."""
    defaults = PlanOptions()
    add_prompt_arguments(parser, defaults, BUILT_IN_PROMPTS)
    temperatures = ",".join(f"{temperature:g}" for temperature in defaults.temperature)
    parser.add_argument(
        "--temperature", type=numbers, default=defaults.temperature, metavar="T[,T..]",
        help=f"temperatures to plan for; the first is validated [{temperatures}]",
    )  # fmt: skip
    parser.add_argument(
        "--round-trip-ms", type=float, default=defaults.round_trip_ms, metavar="MS",
        help="of the link between coordinator and draft, beside what messages take on one machine "
        "[%(default)g]",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, default=defaults.concurrency, metavar="N",
        help="sessions that a target replica decodes at a time [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--separate-draft", action="store_true",
        help="plan for drafts with a device of their own, also where here they share the target's",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the speed-up over K there, as an SVG"
    )
    parser.add_argument(
        "--validate", action="store_true",
        help="run the real thing, and print predicted beside measured",
    )  # fmt: skip


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


def choose(
    options: PlanOptions, replays: Replays, sample: Sample, times: ServiceTimes
) -> TemperaturePlan:
    """The plan for one temperature."""
    load = Load(sessions=options.concurrency, round_trip_s=options.round_trip_ms / 1e3)
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


def report(
    options: PlanOptions,
    plans: Sequence[TemperaturePlan],
    times: ServiceTimes,
    *,
    model: str,
    draft_model: str,
    num_prompts: int,
) -> PlanReport:
    """All temperatures together."""
    return PlanReport(
        model=model,
        draft_model=draft_model,
        num_prompts=num_prompts,
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
        round_trip_ms=options.round_trip_ms,
        shares_device=times.shares_device,
        target_costs=times.target,
        draft_costs=times.draft,
        plans=tuple(plans),
    )
