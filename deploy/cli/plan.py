"""`outrider plan`: the best rule, K, look-ahead and number of drafts, for two models and prompts.

read      the target answers the prompts; the draft model reads the answers
rehearse  short sessions through the services correct the engines' cost tables
choose    rounds are computed from the answers, and timed, for every rule and K
validate  (--validate) the same prompts through these services, predicted and measured
simulate  (--simulate) fleets of the chosen pair, on a virtual clock
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from benchmarks.options import Concurrency, MaxTokens, Options, PromptOptions, Temperature
from benchmarks.report import Report
from deploy.fleet.spec import are_apart, plan_fleet
from outrider.config import DeploymentConfig
from outrider.errors import ConfigError, SettingError
from outrider.limits import REPLICAS_MAX
from outrider.replica.process_setup import available_cores
from outrider.settings import between, checked

from .bench import found_models
from .command import Arguments, Option, command, exclusive, grouped, json_option, option
from .options import deployment_config, flags_again, setting_options
from .output import progress, tell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from benchmarks.prompts import BenchPrompt
    from deploy.planner.report import PlanReport
    from deploy.planner.simulation import Pair, SimulatedFleet
    from outrider.registry.registry import Role

OWN_FLAGS = ("seed", "num_draft_tokens", "deadline_ms", "length_control", "look_ahead")
"""Settings that the plan chooses, or that belong to a request."""
DECIDED = ("model", "draft_model", "num_targets", "num_drafts")
"""Settings that the recommended command takes from the plan, not from this command line."""
BUILT_IN_PROMPTS = 12
"""Number of built-in prompts without `--prompts` and `--num-prompts`."""
RUNS_MAX = 64
"""Most combinations of loads and fleets."""


@checked()
class PlanOptions(PromptOptions):
    """Options of a plan."""

    max_tokens: MaxTokens = 96
    temperature: tuple[Temperature, ...] = (0.0, 1.0)
    """Temperatures to plan for; `--validate` measures the first."""
    round_trip_ms: Annotated[float, between(0, 10_000)] = 0.0
    """Extra round-trip time between coordinator and draft, ms; 0 = on one machine."""
    concurrency: Concurrency = 1
    """Sessions at a time on one target replica."""
    plot: Path | None = None
    """Write a plot of the speed-up over K to this SVG file."""
    separate_draft: bool = False
    """Assume that drafts have a device of their own, even if they share one here."""
    validate: bool = False
    """Also measure every K, and print predicted and measured speeds."""
    devices: str | None = None
    """Instead compare what devices gain with and without drafts, computed from bytes and bandwidth
    without running a model: h200-8b or h200-70b-fp8, with changes as PRESET,KEY=VALUE,..
    [sessions=1,context=1024,target=16.06/32/131.1/1,draft=2.47/16/32.8/1,
    head=0.85/1/12.3/1,head_width=4096,link_gb=3,acceptance=0.65,head_acceptance=0.71,
    hit_rate=0.84,memory_gb=127,bandwidth_tb=3.6,compute_rows=206,layer_ms=0.07,session_ms=0.05,verdict_ms=0.07,round_ms=1.3,
    plain_ms=0.5]; a model is GB/LAYERS/KB/DEVICES, where KB is the size of a token's keys and
    values"""

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """By default fewer than all built-in prompts."""
        if self.prompts is None and self.num_prompts is None:
            return replace(self, num_prompts=BUILT_IN_PROMPTS).load_prompts()
        return super().load_prompts()


Count = Annotated[int, between(1, REPLICAS_MAX)] | Literal["auto"]


@checked()
class SimulationOptions(Options):
    """Options of a simulation."""

    from_report: Path | None = None
    """Simulate the pair of this file, which `outrider plan --json` printed, without running a
    model. (With `--engine emulated:acceptance_rates=A/A/..` the emulated pair is simulated.)"""
    from_numbers: str | None = None
    """Simulate a pair given as KEY=VALUE,.. without running a model
    [verify_ms=1:18.3/16:18.3/32:36.6,draft_ms=1:1.3/64:1.3/128:2.6,acceptance=0.8,
    num_draft_tokens=6,look_ahead=0,hit_rate=0,rest_ms=0]; a time is MS or a table
    ROWS:MS/ROWS:MS, acceptance one rate or A/A/.. by position."""
    sessions: tuple[Annotated[int, between(1, 10_000)], ...] = ()
    """Sessions at a time; when one ends the next begins."""
    rate: tuple[Annotated[float, between(0.001, 10_000)], ...] = ()
    """Requests a second, instead of `--sessions`."""
    prompt_tokens: Annotated[int, between(1, 2**17)] = 256
    """Tokens of a prompt."""
    answer_tokens: MaxTokens = 256
    """Mean number of tokens of an answer."""
    targets: tuple[Count, ...] = ("auto",)
    """Numbers of targets to try; auto = the fewest that meet `--tpot-ms`."""
    drafts: tuple[Count, ...] = ("auto",)
    """Numbers of drafts to try; auto = the fewest that meet `--tpot-ms`."""
    coordinators: tuple[Count, ...] = ("auto",)
    """Numbers of coordinators to try; auto = the fewest that meet `--tpot-ms`."""
    tpot_ms: Annotated[float | None, between(0.001, 60_000)] = None
    """Goal for the time per token, which 99 % of the tokens must meet, ms."""
    simulated_seconds: Annotated[float, between(1, 3_600)] = 10.0
    """Simulated time that is measured, s."""
    coordinator_ms: Annotated[float, between(0, 1_000)] = 0.29
    """CPU time of a coordinator for a round, ms; `bench overhead` measures it."""

    def check(self, has_drafts: bool) -> None:
        """Raises `ConfigError` for options that do not go together."""
        if bool(self.sessions) == bool(self.rate):
            raise ConfigError("--sessions or --rate is needed: give one of them, not both")
        counts = [self.targets, self.coordinators, *([self.drafts] if has_drafts else [])]
        if self.tpot_ms is None and any("auto" in count for count in counts):
            raise ConfigError(
                "--tpot-ms is needed to find numbers of replicas; or give --targets, "
                "--coordinators and, if a model drafts, --drafts"
            )
        runs = math.prod(len(count) for count in counts)
        runs *= len(self.sessions) + len(self.rate)
        if runs > RUNS_MAX:
            raise SettingError(
                "targets", f"and the other lists make {runs} runs; at most {RUNS_MAX} are allowed"
            )

    def simulate(self, config: DeploymentConfig, pair: Pair) -> list[SimulatedFleet]:
        """Every load on every fleet, with the batch sizes of `config`."""
        from deploy.planner.simulation import ROLES, Fleet, Scenario, Workload, simulated

        self.check(pair.has_drafts)
        tokens = {"prompt_tokens": self.prompt_tokens, "answer_tokens": self.answer_tokens}
        workloads = [Workload(sessions=number, **tokens) for number in self.sessions]
        workloads += [Workload(rate=rate, **tokens) for rate in self.rate]
        counts: dict[Role, Any] = {role: getattr(self, f"{role}s") for role in ROLES}
        if not pair.has_drafts:
            counts["draft"] = (0,)
        free = [role for role, numbers in counts.items() if "auto" in numbers]
        counts |= dict.fromkeys(free, (1,))
        fleets = [
            Fleet(**{f"{role}s": number for role, number in zip(counts, numbers, strict=True)})
            for numbers in product(*counts.values())
        ]
        scenarios = [
            Scenario(
                pair=pair, fleet=fleet, workload=load, config=config,
                coordinator_s=self.coordinator_ms / 1e3, seconds=self.simulated_seconds,
            )
            for load, fleet in product(workloads, fleets)
        ]  # fmt: skip
        return [simulated(one, free, self.tpot_ms, progress) for one in scenarios]


_SIMULATE = option(
    "--simulate", is_flag=True,
    help="also simulate a fleet: the real services on a virtual clock. 20 sessions for 10 s take "
    "about 20 s (three times that with look-ahead); finding numbers of replicas takes about ten "
    "such runs",
)  # fmt: skip


_PLAN = PlanOptions.params(Option)
_SIMULATION = SimulationOptions.params(Option)


@command(
    "plan",
    *_PLAN,
    json_option(),
    *grouped("A simulated fleet", (_SIMULATE, *_SIMULATION)),
    *setting_options(OWN_FLAGS, ("model", "draft_model")),
    epilog="With the demo pair and 12 built-in prompts (the default) a plan takes about two "
    "minutes on two free cores. --validate answers all prompts again.",
)  # fmt: skip
def plan(arguments: Arguments) -> int:
    """Prints tables, or one JSON object."""
    options = PlanOptions.from_arguments(arguments)
    simulation = SimulationOptions.from_arguments(arguments)
    exclusive(arguments, "from_report", "from_numbers")
    if not arguments.simulate:
        _refuse(arguments, _SIMULATION, "is for --simulate, which is missing")
    config = deployment_config(arguments)
    is_stated = bool(arguments.given & {"from_report", "from_numbers"})
    knows_pair = arguments.simulate and (is_stated or config.target.emulated is not None)
    if knows_pair or "devices" in arguments.given:
        others = [one for one in _PLAN if one.name not in ("round_trip_ms", "devices")]
        _refuse(arguments, others, "is for models, but none is run")
    if options.devices is not None:
        from deploy.planner.devices import compare

        exclusive(arguments, "devices", "simulate")
        for key in (*arguments.settings, *arguments.given & {"config"}):
            raise SettingError(key, "is for models, but none is run")
        return tell(compare(options.devices, options.round_trip_ms / 1e3), arguments.json)
    values: dict[str, Any]
    shown: list[RenderableType] = []
    if knows_pair:
        pair = _known_pair(simulation, options, config)
        values = {"pair": asdict(pair)}
    else:
        prompts = options.load_prompts()
        _check(options, config)
        if arguments.simulate:
            simulation.check(config.draft.drafter.model is not None)
        found = _plan(arguments, options, config, prompts)
        pair, values, shown = found.pair, found.values(), [*found.tables()]
    if arguments.simulate:
        from deploy.planner.simulation import tables

        simulated = simulation.simulate(config, pair)
        values["fleets"] = [asdict(one) for one in simulated]
        shown += tables(simulated, pair, arguments.tpot_ms)
    return tell(Report(values, shown), arguments.json)


def _refuse(arguments: Arguments, options: Sequence[Option], why: str) -> None:
    """Raises `SettingError` if one of these was given."""
    for one in options:
        if one.name in arguments.given:
            raise SettingError(str(one.name), why)


def _known_pair(
    simulation: SimulationOptions, options: PlanOptions, config: DeploymentConfig
) -> Pair:
    """The pair of `--from-report`, `--from-numbers` or an emulated engine."""
    from deploy.planner.simulation import of_emulated, of_numbers, read_report

    seats = config.target.max_num_seqs, config.draft.max_num_seqs
    if simulation.from_report is not None:
        pair = read_report(simulation.from_report)
    elif simulation.from_numbers is not None:
        pair = of_numbers(simulation.from_numbers, *seats)
    else:
        pair = of_emulated(config.target.emulated or "", *seats)
    if options.round_trip_ms:
        pair = replace(pair, times=replace(pair.times, round_trip_s=options.round_trip_ms / 1e3))
    return pair


def _check(options: PlanOptions, config: DeploymentConfig) -> None:
    """Raises `SettingError` for options and settings that this command cannot handle."""
    plot, draft = options.plot, config.draft
    if plot is not None and not plot.absolute().parent.is_dir():
        raise SettingError("plot", f"cannot write {plot}: its folder does not exist")
    if draft.drafter.reads_target:
        raise SettingError(
            "draft_model",
            f"{draft.model} is wrong; `plan` takes no drafter that reads the target's hidden "
            "states; --devices tells where such a head pays",
        )
    for key, size in (
        ("tensor_parallel_size", config.target.tensor_parallel_size),
        ("draft_tensor_parallel_size", draft.tensor_parallel_size),
    ):
        if size > 1:
            raise SettingError(key, f"{size} is wrong; `plan` runs each model on 1 rank")
    # `--validate` measures one session at a time on this machine.
    for name, allowed in (("concurrency", 1), ("round_trip_ms", 0), ("separate_draft", False)):
        value = getattr(options, name)
        if options.validate and value != allowed:
            raise SettingError(
                name, f"{value} cannot be validated; with --validate it must be {allowed}"
            )


def _plan(
    arguments: Arguments, options: PlanOptions, config: DeploymentConfig,
    prompts: Sequence[BenchPrompt],
) -> PlanReport:  # fmt: skip
    if options.validate:  # Prompts are answered repeatedly, so answers must not be copied.
        config = replace(config, draft=replace(config.draft, suffix_tokens_per_tenant=0))
    config = found_models(config)
    from benchmarks.acceptance import load_reading
    from deploy.planner.rehearsal import rehearsed_plans
    from deploy.planner.report import PlanReport

    reading = load_reading(config, prompts, options.max_tokens, options.raw, progress)
    temperatures = dict.fromkeys(options.temperature)
    samples = [reading.sample(temperature, progress) for temperature in temperatures]
    del reading
    gc.collect()  # The services need the engines' memory.
    plans, validation = asyncio.run(rehearsed_plans(
        config, samples, progress, options.concurrency, validates=options.validate,
        shares_device=not options.separate_draft and _shares_device(config),
        round_trip_s=options.round_trip_ms / 1e3,
    ))  # fmt: skip
    report = PlanReport(
        validation=validation,
        model=config.target.model,
        draft_model=config.draft.model,
        num_prompts=len(prompts),
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
        round_trip_ms=options.round_trip_ms,
        plans=plans,
        flags=flags_again(arguments, without=DECIDED + OWN_FLAGS),
    )
    if options.plot is not None:
        report.plot(options.plot)
    return report


def _shares_device(config: DeploymentConfig) -> bool:
    """Whether target and draft would share cores or a device on this machine."""
    import torch

    gpus = float(torch.cuda.device_count())
    placed = plan_fleet(config, config, {"GPU": gpus}, local=False).config
    return not are_apart(placed, same_node=True, num_cores=available_cores())
