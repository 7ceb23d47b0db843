"""What `outrider plan` says: as JSON, as tables, and as a plot of the speed-up over K."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

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

    def to_json(
        self, validation: Validation | None, fleets: Sequence[Mapping[str, object]] = ()
    ) -> str:
        """One JSON object on one line; `fleets` are those that were simulated."""
        value = asdict(self)
        value["temperatures"] = {
            f"{plan.temperature:g}": {
                "acceptance": {name: asdict(found) for name, found in plan.acceptance.items()},
                "chosen": asdict(plan.choice.chosen),
                "plain": asdict(plan.choice.plain),
                "options": [asdict(option) for option in plan.choice.options],
                "times": plan.times,
                "spread": None if plan.spread is None else asdict(plan.spread),
                "at_edge": plan.is_at_edge,
            }
            for plan in self.plans
        }
        del value["plans"]
        value["validation"] = None if validation is None else validation.values()
        value["fleets"] = list(fleets)
        return as_json(value)


def as_json(value: Mapping[str, object]) -> str:
    """One object on one line, of few digits. Raises `ValueError` for NaN and infinity."""
    return json.dumps(_rounded(value), allow_nan=False)


def render(
    report: PlanReport, validation: Validation | None, fleets: Iterable[Table | Text] = ()
) -> Group:
    """The report for people; `fleets` are tables of those that were simulated."""
    parts: list[Table | Text] = []
    for plan in report.plans:
        parts += [_acceptance(report, plan), _options(report, plan)]
        parts.append(Text(_sentence(report, plan.choice.chosen), style="bold"))
        parts.append(Text(_certainty(plan)))
    if validation is not None:
        parts += validation.tables()
    return Group(*parts, *fleets)


def _acceptance(report: PlanReport, plan: TemperaturePlan) -> Table:
    table = Table(
        title=f"{report.draft_model} for {report.model}, temperature {plan.temperature:g}: "
        "accepted, given those before it"
    )
    table.add_column("prompts")
    table.add_column("rule")
    depths = max(len(chances) for chances in plan.acceptance["all"].by_position.values())
    for depth in range(1, depths + 1):
        table.add_column(str(depth), justify="right")
    for name, found in plan.acceptance.items():
        for rule, chances in found.by_position.items():
            cells = ["-" if chance is None else f"{chance:.2f}" for chance in chances]
            table.add_row(name, rule, *cells)
    return table


def _options(report: PlanReport, plan: TemperaturePlan) -> Table:
    link = f", link {report.round_trip_ms:g} ms" if report.round_trip_ms else ""
    table = Table(
        title=f"Expected at temperature {plan.temperature:g}, {report.concurrency} at a time{link}"
    )
    table.add_column("rule")
    for heading in ("K", "fan-out", "drafts", "tokens a round", "hits", "tokens/s", "speed-up"):
        table.add_column(heading, justify="right")
    for option in (plan.choice.plain, *plan.choice.options):
        hit = "-" if option.hit_rate is None else f"{option.hit_rate:.2f}"
        table.add_row(
            option.rule.value, str(option.num_draft_tokens), str(option.look_ahead),
            str(option.draft_replicas), f"{option.tokens_per_round:.2f}", hit,
            f"{option.tokens_per_second:.1f}", f"{option.speedup:.2f}x",
            style="bold" if option == plan.choice.chosen else "",
        )  # fmt: skip
    return table


def _by_rule(options: Sequence[Option]) -> dict[str, list[Option]]:
    found: dict[str, list[Option]] = {}
    for option in options:
        found.setdefault(option.rule.value, []).append(option)
    return found


def _sentence(report: PlanReport, chosen: Option) -> str:
    """The command that deploys what was chosen, and what is expected of it."""
    if chosen.num_draft_tokens == 0:
        command = _serve(report, "--num-draft-tokens", 0)
        return (
            f"Decode plainly by `{command}`: {chosen.tokens_per_second:.1f} tokens/s are expected, "
            "and no draft is faster."
        )
    flags: list[str | int] = ["--draft-model", report.draft_model]
    flags += ["--num-draft-tokens", chosen.num_draft_tokens]
    if chosen.look_ahead:
        flags += ["--look-ahead", chosen.look_ahead]
    if chosen.draft_replicas > 1:
        flags += ["--num-drafts", chosen.draft_replicas]
    drafts = ""
    if chosen.draft_replicas:
        replicas = "replica" if chosen.draft_replicas == 1 else "replicas"
        drafts = f" and {chosen.draft_replicas} draft {replicas} for each target replica"
    return (
        f"Deploy by `{_serve(report, *flags)}`, with rule {chosen.rule.value}{drafts}: "
        f"{chosen.tokens_per_second:.1f} tokens/s are expected, "
        f"{chosen.speedup:.2f} times plain decoding."
    )


def _serve(report: PlanReport, *flags: str | int) -> str:
    return shlex.join(["outrider", "serve", report.model, *map(str, flags), *report.flags])


def _certainty(plan: TemperaturePlan) -> str:
    """How far the choice depends on the prompts, and on where the sweep ends."""
    found, lines = plan.spread, []
    if plan.is_at_edge:
        k = plan.choice.chosen.num_draft_tokens
        bound = ", which is also the most that a round drafts" if k == NUM_DRAFT_TOKENS_MAX else ""
        lines.append(
            f"K = {k} is the largest that was looked at{bound}: a larger one may be faster."
        )
    if found is None:
        lines.append("One prompt says nothing of how sure this is: take more (--prompts FILE).")
    else:
        (low, high), (least, most) = found.speedup, found.num_draft_tokens
        found_k = f"K = {most}" if least == most else f"a K of {least} to {most}"
        lines.append(
            f"How sure this is: of {found.num_resamples} samples drawn from these "
            f"{found.num_texts} prompts, {found.level:.0%} have a speed-up of {low:.2f} to "
            f"{high:.2f} this way; {found.same_share:.0%} lead to the same rule and K, "
            f"{found.level:.0%} to {found_k}. What errors of the measured times add is not in "
            "that."
        )
    return " ".join(lines)


def render_plot(report: PlanReport) -> str:
    """The speed-up over K for every temperature and rule, as an SVG. Raises `ConfigError` without
    matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'outrider[bench]'") from error
    axes = (figure := Figure(figsize=(8, 4), layout="constrained")).subplots()
    for plan in report.plans:
        for rule, options in _by_rule(plan.choice.options).items():
            points = [(0, 1.0), *((one.num_draft_tokens, one.speedup) for one in options)]
            axes.plot(*zip(*points, strict=True), label=f"temperature {plan.temperature:g}, {rule}")
    axes.axhline(1.0, color="0.6", linestyle="dashed")
    axes.set(
        title=f"{report.draft_model} for {report.model}",
        xlabel="K",
        ylabel="speed-up",
        ylim=(0, None),
    )
    axes.legend()
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg")
    return text.getvalue()


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value
