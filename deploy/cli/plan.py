"""`outrider plan`: K, fan-out, rule and drafts for two models and prompts, before deployment.

read      the target answers the prompts; the draft's model reads the answers
rehearse  short sessions through the services put the engines' cost tables where rounds stand
choose    rounds are told from the answers for every rule and K, and timed
simulate  (asked for) fleets of what was chosen, on a virtual clock
validate  (asked for) the same prompts through a deployment, predicted beside measured
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deploy.fleet.local_state import running_deployment, state_directory
from deploy.fleet.preflight import resolve_models
from deploy.fleet.spec import are_apart, plan_fleet
from deploy.planner.options import PlanOptions, SimulationOptions
from outrider.config import DeploymentConfig
from outrider.drafters.names import LookupKind
from outrider.errors import ConfigError, SettingError
from outrider.replica.process_setup import available_cores, build_engine, build_lookup, use_threads

from .command import Arguments, command, declared, grouped, json_option, option
from .connection import connected, connection_options
from .options import deployment_config, flags_again, refuse_other_settings, with_settings
from .output import progress, show

if TYPE_CHECKING:
    from rich.console import Group

    from benchmarks.acceptance import Encode
    from deploy.planner.acceptance import DraftKind, Sample
    from deploy.planner.choosing import Replays, TemperaturePlan
    from deploy.planner.rehearsal import Validation
    from deploy.planner.report import PlanReport
    from deploy.planner.round_times import ServiceTimes
    from outrider.drafters.lookup import LookupDrafter

OWN_FLAGS: Final = ("seed", "num_draft_tokens", "deadline_ms", "length_control", "look_ahead")
"""Settings that the plan is about, or that are a request's."""
DECIDED: Final = ("model", "draft_model", "num_targets", "num_drafts")
"""Those that the command that deploys has from the plan, which is of one target replica."""
_SIMULATE: Final = option(
    "--simulate", is_flag=True,
    help="try a fleet, too: the real services on a virtual clock. A simulated round takes 1 to 2 "
    "ms of this machine's time, 6 where drafts look ahead: 20 sessions for 10 s take about 20 s, "
    "and numbers of replicas are found in about ten such runs",
)  # fmt: skip


@command(
    "plan",
    *declared(PlanOptions),
    json_option(),
    *grouped("A simulated fleet", (_SIMULATE, *declared(SimulationOptions))),
    *connection_options(without=OWN_FLAGS),
    epilog="The services run for a rehearsal of a minute; with the demo pair and the built-in "
    "prompts all takes about two minutes on two free cores. With --validate a deployment as `bench "
    "speedup` uses it answers the prompts once more.",
)  # fmt: skip
def plan(arguments: Arguments) -> int:
    """Plans, and prints tables or one JSON object."""
    simulation = _simulation(arguments)
    if simulation is not None and simulation.needs_no_models:
        return _simulate_alone(arguments, simulation)
    options = PlanOptions.from_arguments(arguments)
    prompts = options.load_prompts()  # What is wrong with them shows before anything is started.
    if arguments.server and not options.validate:
        raise SettingError("server", "is for --validate: without it nothing is called")
    config = deployment_config(arguments)
    _check(config)
    if simulation is not None and config.draft.drafter.model is not None:
        simulation.check_counts("draft")
    if options.validate and not arguments.server:
        _check_running(_fixed(arguments), config)
    use_threads(config.target.num_threads or available_cores())  # Before torch is imported.
    progress("finding the models")
    config = resolve_models(config)
    from deploy.planner.report import render, render_plot

    kind = _kind(config)
    samples = _read(config, options, kind)
    gc.collect()  # The engines' memory is the services' from here on.
    report, validation = asyncio.run(_plan(arguments, config, options, kind, samples))
    report = replace(
        report, num_prompts=len(prompts), flags=flags_again(arguments, without=DECIDED)
    )
    if options.plot is not None:
        options.plot.write_text(render_plot(report), encoding="utf-8")
    if simulation is None:
        _show(arguments, lambda: report.to_json(validation), lambda: render(report, validation))
        return 0
    from deploy.planner.fleets import of_report, simulated, tables

    pair = of_report(json.loads(report.to_json(None)), "this plan")
    fleets = simulated(simulation, pair, config, progress)
    _show(
        arguments,
        lambda: report.to_json(validation, [one.values() for one in fleets]),
        lambda: render(report, validation, tables(simulation, pair, fleets)),
    )
    return 0


def _simulation(arguments: Arguments) -> SimulationOptions | None:
    """What is to be simulated; None without `--simulate`, which nothing else goes without."""
    if arguments.simulate:
        return SimulationOptions.from_arguments(arguments, round_trip_ms=arguments.round_trip_ms)
    for name in SimulationOptions.flags():
        if name in arguments.given:
            raise SettingError(name, "is for --simulate: without it nothing is simulated")
    return None


def _simulate_alone(arguments: Arguments, options: SimulationOptions) -> int:
    """Of a pair that is known already; nothing is run."""
    for name in ("prompts", "num_prompts", "plot", "server", "validate"):
        if getattr(arguments, name) not in (None, False):
            raise SettingError(name, "is for models, and none is run")
    config = deployment_config(arguments)
    from rich.console import Group

    from deploy.planner.fleets import of_numbers, read_report, simulated, tables
    from deploy.planner.report import as_json

    if options.from_report is not None:
        pair = read_report(options.from_report)
    else:
        numbers = options.from_numbers or ""
        pair = of_numbers(numbers, config.target.step_sessions, config.draft.step_sessions)
    fleets = simulated(options, pair, config, progress)
    _show(
        arguments,
        lambda: as_json({"pair": pair.values(), "fleets": [one.values() for one in fleets]}),
        lambda: Group(*tables(options, pair, fleets)),
    )
    return 0


def _show(arguments: Arguments, as_json: Callable[[], str], as_tables: Callable[[], Group]) -> None:
    """On standard output, as was asked for."""
    if arguments.json:
        print(as_json())
    else:
        show(as_tables())


def _check(config: DeploymentConfig) -> None:
    """Raises `SettingError` for what cannot be read and rehearsed in processes of this command."""
    if config.target.emulated is not None:
        raise SettingError("engine", "an emulated one is no model; this measures models")
    if config.draft.drafter.reads_target:
        raise SettingError(
            "draft_model",
            f"{config.draft.model} is wrong; a plan is of a draft that reads nothing of the target",
        )
    for key, size in (
        ("tensor_parallel_size", config.target.tensor_parallel_size),
        ("draft_tensor_parallel_size", config.draft.tensor_parallel_size),
    ):
        if size > 1:
            raise SettingError(key, f"{size} is wrong; a plan runs each model on 1 rank")


def _fixed(arguments: Arguments) -> Arguments:
    """For rounds that are all of one length, and wait for their drafts."""
    return with_settings(arguments, length_control=False, look_ahead=0)


def _check_running(arguments: Arguments, config: DeploymentConfig) -> None:
    """Raises `SettingError` where a deployment runs that a plan cannot be held against."""
    record = running_deployment(state_directory(os.environ))
    if record is None:
        return
    try:
        refuse_other_settings(arguments, record)
        reason = "drafts copy from earlier answers" if _keeps_answers(config) else ""
    except ConfigError:
        reason = "its settings differ from those that are planned for"
    if reason:
        raise SettingError(
            "validate",
            f"cannot use the deployment that runs ({record.grpc_address}): {reason}; stop it "
            "(outrider stop), and the command starts one of its own",
        )


def _kind(config: DeploymentConfig) -> DraftKind:
    from deploy.planner.acceptance import DraftKind

    draft = config.draft

    def make_lookup() -> LookupDrafter:
        found = build_lookup(draft)
        if found is None:
            raise SettingError("draft_model", "has no look-up")
        return found

    return DraftKind(
        make_lookup=None if draft.drafter.lookup is None else make_lookup,
        has_model=draft.drafter.model is not None,
        hybrid_min_score=draft.hybrid_min_score,
        hybrid_model_tokens=draft.hybrid_model_tokens,
    )


def _read(config: DeploymentConfig, options: PlanOptions, kind: DraftKind) -> tuple[Sample, ...]:
    """The target's answers, read by the draft's model; both are gone afterwards."""
    from benchmarks.acceptance import ModelReader
    from deploy.planner.acceptance import Reading

    progress("loading the target")
    num_threads = config.target.num_threads or available_cores()
    target = build_engine(config.target, "target", num_threads)
    max_model_len, reader = target.info.max_model_len, None
    if kind.has_model:
        progress("loading the draft")
        draft = build_engine(config.draft, "draft", config.draft.num_threads or num_threads)
        reader = ModelReader(draft, config.draft.support_entries)
        max_model_len = min(max_model_len, draft.info.max_model_len)
    reading = Reading(target, reader, max_model_len, options.max_tokens)
    encode = _encoder(config, options.raw)
    prompts = options.load_prompts()
    return tuple(
        reading.sample(prompts, encode, temperature, options.seed, progress)
        for temperature in options.temperature
    )


def _encoder(config: DeploymentConfig, raw: bool) -> Encode:
    from outrider.tokenizer import TokenizerText

    text = TokenizerText.load(Path(config.target.directory), config.target.model)

    def encode(prompt: str) -> Sequence[int]:
        return (
            text.encode(prompt) if raw else text.encode_chat([{"role": "user", "content": prompt}])
        )

    return encode


async def _plan(
    arguments: Arguments,
    config: DeploymentConfig,
    options: PlanOptions,
    kind: DraftKind,
    samples: Sequence[Sample],
) -> tuple[PlanReport, Validation | None]:
    from deploy.planner.choosing import Replays, choose
    from deploy.planner.rehearsal import rehearse
    from deploy.planner.report import PlanReport
    from deploy.planner.round_times import Load

    shares_device = not options.separate_draft and _shares_device(config)
    replays = [Replays(kind, sample) for sample in samples]
    times = await rehearse(config, kind, samples, shares_device=shares_device, progress=progress)
    load = Load(sessions=options.concurrency, round_trip_s=options.round_trip_ms / 1e3)
    plans = [
        choose(load, replay, sample, found)
        for sample, replay, found in zip(samples, replays, times, strict=True)
    ]
    report = PlanReport(
        model=config.target.model,
        draft_model=config.draft.model,
        num_prompts=0,
        max_tokens=options.max_tokens,
        concurrency=options.concurrency,
        round_trip_ms=options.round_trip_ms,
        shares_device=times[0].shares_device,
        target_costs=times[0].target,
        draft_costs=times[0].draft,
        plans=tuple(plans),
    )
    validation = None
    if options.validate:
        keeps = kind.make_lookup is not None and _keeps_answers(config)
        validation = await _validate(arguments, keeps, samples[0], replays[0], plans[0], times[0])
    return report, validation


async def _validate(
    arguments: Arguments,
    keeps_answers: bool,
    sample: Sample,
    replays: Replays,
    found: TemperaturePlan,
    times: ServiceTimes,
) -> Validation:
    """Each K on a deployment of its own where drafts may copy from earlier answers. What is
    predicted are rounds of that very K, whose drafts are waited for."""
    arguments = _fixed(arguments)
    from deploy.planner.choosing import SWEEP
    from deploy.planner.rehearsal import Trial

    chosen = found.choice.chosen
    rule = chosen.rule if chosen.num_draft_tokens else sample.rules[-1]
    counts = (0, *SWEEP)
    trial = Trial(sample, rule, progress)
    for group in [(k,) for k in counts] if keeps_answers else [counts]:
        async with connected(arguments) as connection, connection.client() as client:
            if keeps_answers and not connection.is_own:
                raise SettingError(
                    "validate",
                    "drafts copy from earlier answers, so that each K needs a deployment of its "
                    "own; stop the one that runs (outrider stop)",
                )
            await trial.run(client, group)
    predicted = {k: replays.of(rule, k) for k in counts}
    return trial.compared(predicted, times, chosen.num_draft_tokens)


def _keeps_answers(config: DeploymentConfig) -> bool:
    draft = config.draft
    room = min(draft.suffix_tokens_per_tenant, draft.suffix_tokens_total)
    return draft.drafter.lookup is LookupKind.SUFFIX and room > 0


def _shares_device(config: DeploymentConfig) -> bool:
    """Whether draft and target would compute on the same cores or device on a machine like this."""
    import torch

    gpus = float(torch.cuda.device_count())
    gpus = float(torch.cuda.device_count())
    placed = plan_fleet(config, config, {"GPU": gpus}, local=False).config
    return not are_apart(placed, same_node=True, num_cores=available_cores())
