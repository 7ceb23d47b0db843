"""What `outrider plan` says: as JSON, as tables, and as a plot of the speed-up over K."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from benchmarks.report import table
from outrider.engine.step_costs import StepCosts
from outrider.errors import ConfigError
from outrider.limits import NUM_DRAFT_TOKENS_MAX

from .choosing import Option, TemperaturePlan
from .rehearsal import Validation

SIGNIFICANT: Final = 6
"""Digits of a number in JSON: seconds and shares of very different sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The result of one `outrider plan`."""

    model: str
    draft_model: str
    num_prompts: int
    max_tokens: int
    concurrency: int
    round_trip_ms: float
    shares_device: bool
    target_costs: StepCosts
    draft_costs: StepCosts | None
    plans: tuple[TemperaturePlan, ...]
    flags: tuple[str, ...] = ()
    """Further ones of the deployment that was measured."""

    def values(
        self, validation: Validation | None, fleets: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """For JSON; `fleets` are those that were simulated."""
        found = asdict(self)
        plans = zip(self.plans, found.pop("plans"), strict=True)
        found["temperatures"] = {
            f"{plan.temperature:g}": entry | {"at_edge": plan.at_edge} for plan, entry in plans
        }
        found["validation"] = None if validation is None else validation.values()
        return found | {"fleets": list(fleets)}

    def render(self, validation: Validation | None, fleets: Iterable[RenderableType] = ()) -> Group:
        """The report for people; `fleets` are tables of those that were simulated."""
        parts: list[RenderableType] = []
        for plan in self.plans:
            parts += [self._acceptance(plan), self._options(plan)]
            parts += [Text(self._sentence(plan.chosen), style="bold"), _certainty(plan)]
        return Group(*parts, *([] if validation is None else validation.render()), *fleets)

    def plot(self) -> str:
        """The speed-up over K for every temperature and rule, as an SVG. Raises `ConfigError`
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
        text = io.StringIO()
        with rc_context({"svg.fonttype": "none"}):
            figure.savefig(text, format="svg")
        return text.getvalue()

    def _acceptance(self, plan: TemperaturePlan) -> RenderableType:
        rows = [
            (name, rule, *("-" if chance is None else f"{chance:.2f}" for chance in chances))
            for name, found in plan.acceptance.items()
            for rule, chances in found.by_position.items()
        ]
        return table(
            f"{self.draft_model} for {self.model}, temperature {plan.temperature:g}: accepted, "
            "given those before it",
            ("prompts", "rule", *map(str, range(1, len(rows[0]) - 1))),
            rows,
        )

    def _options(self, plan: TemperaturePlan) -> RenderableType:
        link = f", link {self.round_trip_ms:g} ms" if self.round_trip_ms else ""
        found = table(
            f"Expected at temperature {plan.temperature:g}, {self.concurrency} at a time{link}",
            ("rule", "K", "fan-out", "drafts", "tokens a round", "hits", "tokens/s", "speed-up"),
            (),
        )
        for option in (plan.plain, *plan.options):
            found.add_row(
                option.rule.value, str(option.num_draft_tokens), str(option.look_ahead),
                str(option.draft_replicas), f"{option.tokens_per_round:.2f}",
                "-" if option.hit_rate is None else f"{option.hit_rate:.2f}",
                f"{option.tokens_per_second:.1f}", f"{option.speedup:.2f}x",
                style="bold" if option == plan.chosen else "",
            )  # fmt: skip
        return found

    def _sentence(self, chosen: Option) -> str:
        """The command that deploys what was chosen, and what is expected of it."""
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
            return f"Decode plainly by `{command}`: {expected}, and no draft is faster."
        drafts = ""
        if chosen.draft_replicas:
            replicas = "replica" if chosen.draft_replicas == 1 else "replicas"
            drafts = f" and {chosen.draft_replicas} draft {replicas} for each target replica"
        return (
            f"Deploy by `{command}`, with rule {chosen.rule.value}{drafts}: {expected}, "
            f"{chosen.speedup:.2f} times plain decoding."
        )


def as_json(value: Mapping[str, object]) -> str:
    """One object on one line, of few digits. Raises `ValueError` for NaN and infinity."""

    def rounded(text: str) -> float:
        return float(f"{float(text):.{SIGNIFICANT}g}")

    return json.dumps(json.loads(json.dumps(value, allow_nan=False), parse_float=rounded))


def _certainty(plan: TemperaturePlan) -> str:
    """How far the choice depends on the prompts, and on where the sweep ends."""
    found, said = plan.spread, ""
    if plan.at_edge:
        k = plan.chosen.num_draft_tokens
        bound = ", which is also the most that a round drafts" if k == NUM_DRAFT_TOKENS_MAX else ""
        said = f"K = {k} is the largest that was looked at{bound}: a larger one may be faster. "
    if found is None:
        return f"{said}One prompt says nothing of how sure this is: take more (--prompts FILE)."
    (low, high), (least, most) = found.speedup, found.num_draft_tokens
    found_k = f"K = {most}" if least == most else f"a K of {least} to {most}"
    return (
        f"{said}How sure this is: of {found.num_resamples} samples drawn from these "
        f"{found.num_texts} prompts, {found.level:.0%} have a speed-up of {low:.2f} to {high:.2f} "
        f"this way; {found.same_share:.0%} lead to the same rule and K, {found.level:.0%} to "
        f"{found_k}. What errors of the measured times add is not in that."
    )
