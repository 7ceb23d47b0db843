"""The output of `outrider plan`: JSON, tables, and a plot of the speed-up over K."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from benchmarks.report import table
from outrider.errors import ConfigError

from .choosing import LEVEL, RESAMPLES, TemperaturePlan
from .rounds import Option
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
    validation: Mapping[str, Any] | None = None
    """Predicted and measured, with `--validate`."""
    flags: tuple[str, ...] = ()
    """Further options for `outrider serve`."""

    @property
    def pair(self) -> Pair:
        """The option chosen for the first temperature."""
        plan, name = self.plans[0], f"{self.draft_model} for {self.model}"
        return Pair(name=name, times=plan.times, way=plan.chosen, survival=plan.survival)

    def values(self) -> dict[str, Any]:
        """The JSON object."""
        found = asdict(self)
        plans = found.pop("plans")
        by_temperature = {f"{plan['temperature']:g}": plan for plan in plans}
        return found | {"temperatures": by_temperature, "pair": asdict(self.pair)}

    def tables(self) -> Iterator[RenderableType]:
        """Tables and sentences."""
        link = f", link {self.round_trip_ms:g} ms" if self.round_trip_ms else ""
        for plan in self.plans:
            yield self._acceptance(plan)
            title = f"Expected at temperature {plan.temperature:g}, {self.concurrency} at a time"
            options = (plan.plain, *plan.options)
            found = table(f"{title}{link}", [asdict(option) for option in options])
            found.rows[options.index(plan.chosen)].style = "bold"
            yield found
            yield Text(self._sentence(plan.chosen), style="bold")
            yield from _advice(plan)
            yield _certainty(plan)
        if (measured := self.validation) is not None:
            rows = [{k: v for k, v in one.items() if k != "positions"} for one in measured["by_k"]]
            yield table("Predicted and measured, with cached prompts", rows)
            yield table("All K", [{k: v for k, v in measured.items() if k != "by_k"}])

    def plot(self, path: Path) -> None:
        """Writes an SVG of the speed-up over K for every temperature and rule. Raises `ConfigError`
        without matplotlib."""
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("--plot needs matplotlib: pip install 'outrider[bench]'") from error
        axes = (figure := Figure(figsize=(8, 4), layout="constrained")).subplots()
        for plan in self.plans:
            for rule in dict.fromkeys(option.rule.value for option in plan.options):
                points = [(0, 1.0)] + [
                    (one.num_draft_tokens, one.speedup) for one in plan.options if one.rule == rule
                ]
                label = f"temperature {plan.temperature:g}, {rule}"
                axes.plot(*zip(*points, strict=True), label=label)
        axes.axhline(1.0, color="0.6", linestyle="dashed")
        title = f"{self.draft_model} for {self.model}"
        axes.set(title=title, xlabel="K", ylabel="speed-up", ylim=(0, None))
        axes.legend()
        with rc_context({"svg.fonttype": "none"}):
            figure.savefig(path, format="svg")

    def _acceptance(self, plan: TemperaturePlan) -> RenderableType:
        return table(
            f"{self.draft_model} for {self.model}, temperature {plan.temperature:g}: chance that a "
            "draft token is accepted if those before it were",
            [
                {"prompts": name, "rule": rule}
                | {str(depth): chance for depth, chance in enumerate(chances, start=1)}
                for name, found in plan.acceptance.items()
                for rule, chances in found["by_position"].items()
            ],
        )

    def _sentence(self, chosen: Option) -> str:
        """The command that deploys the chosen option, and its expected speed."""
        flags: list[object] = ["--draft-model", self.draft_model]
        flags = flags * (chosen.num_draft_tokens > 0)
        flags += ["--num-draft-tokens", chosen.num_draft_tokens]
        if chosen.look_ahead:
            flags += ["--look-ahead", chosen.look_ahead]
        if chosen.draft_replicas > 1:
            flags += ["--num-drafts", chosen.draft_replicas]
        command = shlex.join(["outrider", "serve", self.model, *map(str, flags), *self.flags])
        expected = f"{chosen.tokens_per_second:.1f} tokens/s are expected"
        if chosen.num_draft_tokens == 0:
            return f"Decode plainly with `{command}`: {expected}, and no draft is faster."
        return (
            f"Deploy with `{command}`, rule {chosen.rule.value} and {chosen.draft_replicas:g} "
            f"drafts for each target replica: {expected}, {chosen.speedup:.2f} times plain "
            "decoding."
        )


def _advice(plan: TemperaturePlan) -> Iterator[str]:
    """Advice if devices are better used for targets than for drafts."""
    plain = plan.plain.tokens_per_second
    drafted = (one for one in plan.options if one.draft_replicas)
    rates = (one.tokens_per_second / (1 + one.draft_replicas) for one in drafted)
    rate = max(rates, default=plain)
    if rate < plain and not plan.times.shares_device:
        yield (
            "Do not use a separate draft here if its device could run another target: with it you "
            f"get {rate:.1f} tokens/s a device, plain decoding {plain:.1f}. `outrider plan "
            "--devices` also compares drafts that several targets share, and heads."
        )


def _certainty(plan: TemperaturePlan) -> str:
    """How much the choice depends on the prompts."""
    found = plan.spread
    if found is None:
        return "One prompt does not tell how certain this is: use more (--prompts FILE)."
    low, high = found.speedup
    return (
        f"How certain this is: of {RESAMPLES} resamples of these {found.num_texts} prompts, "
        f"{LEVEL:.0%} have a speed-up of {low:.2f} to {high:.2f} this way; "
        f"{found.same_share:.0%} lead to the same rule and K. This does not include errors of the "
        "measured times."
    )
