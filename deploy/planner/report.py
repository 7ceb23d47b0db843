"""The output of `outrider plan`: JSON and tables."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from benchmarks.report import table

from .choosing import LEVEL, RESAMPLES, TemperaturePlan
from .simulation import Pair


@dataclass(frozen=True)
class PlanReport:
    """The result of `outrider plan`."""

    model: str
    draft_model: str
    num_prompts: int
    max_tokens: int
    concurrency: int
    round_trip_ms: float
    plans: tuple[TemperaturePlan, ...]

    @property
    def pair(self) -> Pair:
        """The pair to simulate, with the option chosen for the first temperature."""
        plan, name = self.plans[0], f"{self.draft_model} for {self.model}"
        return Pair(name=name, times=plan.times, way=plan.chosen, survival=plan.survival)

    def values(self) -> dict[str, Any]:
        """The JSON object."""
        found = asdict(self)
        plans = found.pop("plans")
        by_temperature = {f"{plan['temperature']:g}": plan for plan in plans}
        return found | {"temperatures": by_temperature, "pair": asdict(self.pair)}

    def tables(self) -> Iterator[RenderableType]:
        """The tables and sentences that are printed."""
        link = f", link {self.round_trip_ms:g} ms" if self.round_trip_ms else ""
        for plan in self.plans:
            yield self._acceptance(plan)
            title = f"Expected at temperature {plan.temperature:g}, {self.concurrency} at a time"
            options = (plan.plain, *plan.options)
            found = table(f"{title}{link}", [asdict(option) for option in options])
            found.rows[options.index(plan.chosen)].style = "bold"
            yield found
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
                for name, found in plan.acceptance.items()
                for rule, chances in found["by_position"].items()
            ],
        )

    def _certainty(self, plan: TemperaturePlan) -> str:
        if plan.speedup_interval is None:
            return "One prompt does not show how certain this plan is. Use several (--prompts)."
        low, high = plan.speedup_interval
        return (
            f"In {LEVEL:.0%} of {RESAMPLES} resamples of these {self.num_prompts} prompts, this "
            f"option has a speed-up of {low:.2f} to {high:.2f}. Errors of the measured times are "
            "not included."
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
        command = shlex.join(["outrider", "serve", self.model, *map(str, flags)])
        expected = f"{chosen.tokens_per_second:.1f} tokens/s are expected"
        if chosen.num_draft_tokens == 0:
            return (
                f"Decode plainly with `{command}` and your other flags: {expected}, and no draft "
                "is faster."
            )
        return (
            f"Deploy with `{command}` and your other flags, rule {chosen.rule.value} and "
            f"{chosen.draft_replicas:g} drafts for each target replica: {expected}, "
            f"{chosen.speedup:.2f} times plain decoding."
        )


def _advice(plan: TemperaturePlan) -> Iterator[str]:
    plain = plan.plain.tokens_per_second
    drafted = (one for one in plan.options if one.draft_replicas)
    rates = (one.tokens_per_second / (1 + one.draft_replicas) for one in drafted)
    rate = max(rates, default=plain)
    if rate < plain and not plan.times.shares_device:
        yield (
            "Do not use a separate draft here if its device could run another target. With a "
            f"separate draft a device yields {rate:.1f} tokens/s, with plain decoding {plain:.1f}. "
            "`outrider plan --devices` also compares heads, and drafts that several targets share."
        )
