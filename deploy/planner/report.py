"""What `outrider plan` says: as JSON, as tables, and as a plot of the speed-up over K."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outrider.engine.step_costs import StepCosts
from outrider.limits import NUM_DRAFT_TOKENS_MAX

from .choosing import Option, TemperaturePlan
from .rehearsal import Validation

SIGNIFICANT: Final = 6
"""Digits of a number in JSON: seconds and shares of very different sizes."""
_BAR: Final = 40
"""Characters of the longest bar."""
_WIDTH, _HEIGHT, _MARGIN = 640, 320, 48
_COLOURS: Final = ("#2471a3", "#c0392b", "#1e8449", "#b7950b", "#6c3483", "#117a65")


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
        parts += [_acceptance(report, plan), _options(report, plan), *_bars(plan)]
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


def _bars(plan: TemperaturePlan) -> Iterator[Text]:
    """The speed-up over K, a line each."""
    best = max((option.speedup for option in plan.choice.options), default=1.0)
    most = max(1.0, best)
    for rule, options in _by_rule(plan.choice.options).items():
        yield Text(f"speed-up over K, {rule}")
        for option in options:
            bar = "█" * max(1, round(option.speedup / most * _BAR))
            yield Text(f"{option.num_draft_tokens:>4} {bar} {option.speedup:.2f}")


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
    """The speed-up over K for every temperature and rule, as an SVG."""
    lines = [
        (f"temperature {plan.temperature:g}, {rule}", options)
        for plan in report.plans
        for rule, options in _by_rule(plan.choice.options).items()
    ]
    most_k = max(option.num_draft_tokens for _, options in lines for option in options)
    speedups = [option.speedup for _, options in lines for option in options]
    most = max(1.0, *speedups) * 1.05

    def x(k: float) -> float:
        return _MARGIN + k / most_k * (_WIDTH - 2 * _MARGIN)

    def y(speedup: float) -> float:
        return _HEIGHT - _MARGIN - speedup / most * (_HEIGHT - 2 * _MARGIN)

    def text(left: float, top: float, words: str, colour: str = "#333") -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" fill="{colour}">{escape(words)}</text>'

    right, bottom = _WIDTH - _MARGIN, _HEIGHT - _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<path d="M{_MARGIN},{_MARGIN} V{bottom} H{right}" fill="none" stroke="#999"/>',
        f'<path d="M{_MARGIN},{y(1.0):.1f} H{right}" stroke="#999" stroke-dasharray="4"/>',
        text(4, y(1.0) + 4, "1.0"),
        text(4, _MARGIN - 16, f"speed-up of {report.draft_model} for {report.model}, over K"),
        text(4, _MARGIN + 4, f"{most:.2f}"),
        *(text(x(k) - 4, bottom + 18, str(k)) for k in sorted({o.num_draft_tokens for o in
          (option for _, options in lines for option in options)})),
    ]  # fmt: skip
    for index, (name, options) in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        places = f"{x(0):.1f},{y(1.0):.1f} " + " ".join(
            f"{x(option.num_draft_tokens):.1f},{y(option.speedup):.1f}" for option in options
        )
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{places}"/>'
        )
        parts.append(text(right - 150, _MARGIN + 16 * index, name, colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value
