"""`outrider plan` finds the best rule, K, look-ahead and number of draft replicas for a
target, a drafter and prompts. It has four stages:

read      the target answers the prompts, and the draft model reads the answers
rehearse  the services run short sessions, to correct the step times that the engines measured
choose    the plan computes the speed of every rule and K on the answers, and takes the fastest
simulate  with `--simulate`, a fleet of this target and draft runs on a virtual clock
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.bench.options import Concurrency, MaxTokens, Options, PromptOptions, Temperature
from outrider.bench.report import Report
from outrider.config.deployment import DeploymentConfig
from outrider.errors import ConfigError, SettingError
from outrider.foundation.settings import between, checked
from outrider.limits import REPLICAS_MAX
from outrider.replica.threads import available_cores

from .bench import found_models
from .command import Arguments, Option, command, exclusive, grouped, json_option
from .options import class_options, deployment_config, setting_options
from .output import progress, tell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outrider.bench.prompts import BenchPrompt
    from outrider.planner.choosing import PlanReport
    from outrider.planner.simulation import Pair

OWN_FLAGS = ("seed", "num_draft_tokens", "deadline_ms", "length_control", "look_ahead")
"""Settings that are not options of `plan`, because the plan or its requests set them."""
BUILT_IN_PROMPTS = 12


@checked()
class PlanOptions(PromptOptions):
    max_tokens: MaxTokens = 96
    temperature: tuple[Temperature, ...] = (0.0, 1.0)
    """Temperatures to plan for."""
    round_trip_ms: Annotated[float, between(0, 10_000)] = 0.0
    """Extra round-trip time between coordinator and draft, ms; 0 = both are on one machine."""
    concurrency: Concurrency = 1
    """Number of concurrent sessions on one target replica."""
    separate_draft: bool = False
    """Assume that drafts have their own device, even if drafts and targets share a device here."""
    devices: str | None = None
    """Run no model. Instead compute the speed of a device with and without drafts, from the models'
    sizes and the memory bandwidth. Give the preset h200-8b or h200-70b-fp8, or change a
    preset by PRESET,KEY=VALUE,..; h200-8b has sessions=1,context=1024,target=16.06/32/131.1/1,
    draft=2.47/16/32.8/1,head=0.85/1/12.3/1,head_width=4096,link_gb=3,acceptance=0.65,
    head_acceptance=0.71,hit_rate=0.84,memory_gb=127,bandwidth_tb=3.6,compute_rows=206,
    layer_ms=0.07,session_ms=0.05,verdict_ms=0.07,round_ms=1.3,plain_ms=0.5. Target,
    draft and head are GB/LAYERS/KB/DEVICES: GB of weights, KB of keys and values for each token."""

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        if self.prompts is None and self.num_prompts is None:
            return replace(self, num_prompts=BUILT_IN_PROMPTS).load_prompts()
        return super().load_prompts()


Count = Annotated[int | None, between(1, REPLICAS_MAX)]


@checked()
class SimulationOptions(Options):
    simulate: bool = False
    """Also simulate a fleet, with the real services on a virtual clock. Simulating 20 sessions
    for 10 s takes about 20 s, or a minute with look-ahead. Finding the numbers of replicas takes
    about ten times as long."""
    from_report: Path | None = None
    """Run no model. Simulate the target and draft in this file, an output of `outrider plan
    --json`. Instead of a file, you may give `--engine emulated:acceptance_rates=A/A/..`."""
    sessions: Annotated[int | None, between(1, 10_000)] = None
    """Number of concurrent sessions; when a session ends, the next begins."""
    rate: Annotated[float | None, between(0.001, 10_000)] = None
    """Requests a second, instead of `--sessions`."""
    prompt_tokens: Annotated[int, between(1, 2**17)] = 256
    """Number of tokens of each prompt."""
    answer_tokens: MaxTokens = 256
    """Mean number of tokens of an answer."""
    targets: Count = None
    """Number of targets; unset = the fewest that meet `--tpot-ms`."""
    drafts: Count = None
    """Number of drafts; unset = the fewest that meet `--tpot-ms`."""
    coordinators: Count = None
    """Number of coordinators; unset = the fewest that meet `--tpot-ms`."""
    tpot_ms: Annotated[float | None, between(0.001, 60_000)] = None
    """Limit on the time per token, ms. At least 99 % of the tokens must meet this limit."""
    simulated_seconds: Annotated[float, between(1, 3_600)] = 10.0
    """Measured part of the simulated time, s."""
    coordinator_ms: Annotated[float, between(0, 1_000)] = 0.29
    """CPU time that a coordinator takes for a round, ms; `bench overhead` measures this time."""

    def check(self, has_drafts: bool) -> None:
        if (self.sessions is None) == (self.rate is None):
            raise ConfigError("--sessions or --rate is needed: give one of them, not both")
        counts = [self.targets, self.coordinators, *([self.drafts] if has_drafts else [])]
        if self.tpot_ms is None and None in counts:
            raise ConfigError(
                "--tpot-ms is needed to find numbers of replicas; give it, or give --targets, "
                "--coordinators and, if a model drafts, --drafts"
            )

    def run(self, config: DeploymentConfig, pair: Pair) -> Report:
        from outrider.planner.simulation import LOAD, ROLES, Scenario, simulated

        self.check(pair.has_drafts)
        given = {role: getattr(self, f"{role}s") for role in ROLES}
        if not pair.has_drafts:
            given["draft"] = 0
        free = [role for role, number in given.items() if number is None]
        scenario = Scenario(
            pair=pair,
            fleet=given | dict.fromkeys(free, 1),
            config=config,
            coordinator_s=self.coordinator_ms / 1e3,
            seconds=self.simulated_seconds,
            **{name: getattr(self, name) for name in LOAD},
        )
        return simulated(scenario, self.tpot_ms, free, progress)


_PLAN = class_options(PlanOptions)
_SIMULATION = class_options(SimulationOptions)


@command(
    "plan",
    *_PLAN,
    json_option(),
    *grouped("A simulated fleet", _SIMULATION),
    *setting_options(OWN_FLAGS, ("model", "draft_model")),
    epilog="With the demo models and 12 built-in prompts (the default), a plan takes about two "
    "minutes on two free cores.",
)
def plan(arguments: Arguments) -> int:
    options = PlanOptions.from_arguments(arguments)
    simulation = SimulationOptions.from_arguments(arguments)
    if not arguments.simulate:
        _refuse(arguments, _SIMULATION, "needs --simulate")
    config = deployment_config(arguments)
    is_known = simulation.from_report is not None or config.target.emulated is not None
    knows_pair = arguments.simulate and is_known
    if knows_pair or "devices" in arguments.given:
        others = [option for option in _PLAN if option.name not in ("round_trip_ms", "devices")]
        _refuse(arguments, others, "cannot be used, because no model runs")
    if options.devices is not None:
        from outrider.planner.devices import compare

        exclusive(arguments, "devices", "simulate")
        for key in (*arguments.settings, *arguments.given & {"config"}):
            raise SettingError(key, "cannot be used, because no model runs")
        return tell(compare(options.devices, options.round_trip_ms / 1e3), arguments.json)
    values: dict[str, Any]
    shown: list[RenderableType] = []
    if knows_pair:
        pair = _known_pair(simulation, options, config)
        values = {"pair": asdict(pair)}
    else:
        options.load_prompts()  # Wrong prompts raise here, before a model is loaded.
        _check(config)
        if arguments.simulate:
            simulation.check(bool(config.draft.drafter.name))
        result = _plan(options, config)
        pair, values, shown = result.pair, result.values(), [*result.tables()]
    if arguments.simulate:
        simulated = simulation.run(config, pair)
        values["simulated"] = simulated.values
        shown += simulated.shown
    return tell(Report(values, shown), arguments.json)


def _refuse(arguments: Arguments, options: Sequence[Option], why: str) -> None:
    for option in options:
        if option.name in arguments.given:
            raise SettingError(str(option.name), why)


def _known_pair(
    simulation: SimulationOptions, options: PlanOptions, config: DeploymentConfig
) -> Pair:
    from outrider.planner.simulation import of_emulated, read_report

    if simulation.from_report is not None:
        pair = read_report(simulation.from_report)
    else:
        target, draft = config.target, config.draft
        pair = of_emulated(target.emulated or "", target.max_num_seqs, draft.max_num_seqs)
    if options.round_trip_ms:
        pair = replace(pair, times=replace(pair.times, round_trip_s=options.round_trip_ms / 1e3))
    return pair


def _check(config: DeploymentConfig) -> None:
    draft = config.draft
    if draft.drafter.kind:
        raise SettingError(
            "draft_model",
            f"{draft.model} is wrong; `plan` takes no drafter that reads the target's hidden "
            "states. --devices computes whether such a drafter pays",
        )
    for key, size in (
        ("tensor_parallel_size", config.target.tensor_parallel_size),
        ("draft_tensor_parallel_size", draft.tensor_parallel_size),
    ):
        if size > 1:
            raise SettingError(key, f"{size} is wrong; `plan` runs each model on 1 rank")


def _plan(options: PlanOptions, config: DeploymentConfig) -> PlanReport:
    config = found_models(config)
    from outrider.bench.acceptance import load_reading
    from outrider.planner.choosing import PlanReport
    from outrider.planner.rehearsal import rehearsed_plans

    reading = load_reading(config, options, progress)
    temperatures = dict.fromkeys(options.temperature)
    samples = [reading.sample(temperature, progress) for temperature in temperatures]
    del reading
    gc.collect()  # Frees the engines' memory, which the services need.
    plans = asyncio.run(
        rehearsed_plans(
            config,
            samples,
            progress,
            options.concurrency,
            shares_device=not options.separate_draft and _shares_device(config),
            round_trip_s=options.round_trip_ms / 1e3,
        )
    )
    return PlanReport(
        model=config.target.model,
        draft_model=config.draft.model,
        num_prompts=len(samples[0].texts),
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
        round_trip_ms=options.round_trip_ms,
        plans=plans,
    )


def _shares_device(config: DeploymentConfig) -> bool:
    import torch

    from outrider.fleet.spec import are_apart, plan_fleet

    gpus = float(torch.cuda.device_count())
    placed = plan_fleet(config, config, gpus, local=False).config
    return not are_apart(placed, same_node=True, num_cores=available_cores())
