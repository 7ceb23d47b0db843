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
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from benchmarks.prompts import PROMPTS_MAX, built_in_prompts, read_prompts, select_prompts
from deploy.fleet.local_state import running_deployment, state_directory
from deploy.fleet.preflight import resolve_models
from deploy.fleet.spec import are_apart, plan_fleet
from outrider.config import DeploymentConfig
from outrider.errors import ConfigError, SettingError
from outrider.limits import (
    MAX_TOKENS_DEFAULT,
    REPLICAS_MAX,
    SEED_MAX,
    SESSIONS_PER_COORDINATOR_MAX,
    TEMPERATURE_MAX,
)
from outrider.replica.process_setup import available_cores, use_threads

from .command import Arguments, Option, command, grouped, json_option, option
from .connection import connected, connection_options
from .options import deployment_config, flags_again, refuse_other_settings, with_settings
from .output import progress, show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from benchmarks.acceptance import Sample
    from benchmarks.prompts import BenchPrompt
    from deploy.planner.choosing import TemperaturePlan
    from deploy.planner.fleets import SimulatedFleet
    from deploy.planner.rehearsal import Validation
    from deploy.planner.report import PlanReport
    from deploy.planner.round_times import ServiceTimes
    from deploy.planner.simulation import Loss, Pair

OWN_FLAGS: Final = ("seed", "num_draft_tokens", "deadline_ms", "length_control", "look_ahead")
"""Settings that the plan is about, or that are a request's."""
DECIDED: Final = ("model", "draft_model", "num_targets", "num_drafts")
"""Those that the command that deploys has from the plan, which is of one target replica."""
BUILT_IN_PROMPTS: Final = 12
"""Of the built-in ones, where neither a file nor a number is named."""
TEMPERATURES_MAX: Final = 8
RUNS_MAX: Final = 64
"""Loads and fleets that one command looks at."""
LOSSES_MAX: Final = 16
ROLES: Final = ("target", "draft", "coordinator")
_LOSS: Final = re.compile(r"(target|draft|coordinator)@(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")


class Numbers(click.ParamType[Any]):
    """A number in bounds, or several with commas between; `auto` for none of these."""

    name = "number"

    def __init__(
        self, kind: type[int] | type[float], low: float, high: float, most: int = 1,
        auto: bool = False,
    ) -> None:  # fmt: skip
        self._kind, self._low, self._high, self._most, self._auto = kind, low, high, most, auto

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The number, or a tuple where there may be several."""
        if not isinstance(value, str):
            return value
        if value == "auto" and self._auto:
            return ()
        try:
            found = tuple(self._kind(part) for part in value.split(","))
        except ValueError:
            found = ()
        fits = all(self._low <= one <= self._high for one in found)
        if not fits or not 0 < len(found) <= self._most:
            many = "numbers with commas between" if self._most > 1 else "a number"
            whole = many.replace("number", "whole number") if self._kind is int else many
            self.fail(f"{value} is wrong; it must be {whole}, from {self._low:g} to {self._high:g}")
        return found if self._most > 1 else found[0]


def _taking(*rows: tuple[str, Any, Any, str, str]) -> list[Option]:
    """Options by name, type, default, what they take, and their help."""
    return [
        option(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
        for name, kind, default, metavar, text in rows
    ]


_COUNTS: Final = Numbers(int, 1, REPLICAS_MAX, 2**10, auto=True)
_TO_LOOK_AT: Final = "to look at; auto = the fewest that keep --tpot-ms [auto]"
_PLAN: Final = [
    *_taking(
        ("prompts", Path, None, "FILE", "JSONL of `prompt` and, if wanted, `category`, "
         f"`max_tokens` and `response_format` [{BUILT_IN_PROMPTS} built-in prompts]"),
        ("num-prompts", Numbers(int, 1, PROMPTS_MAX), None, "N", "take N prompts in all, the same "
         "number of first ones of each category; of fewer than there are categories, one of each "
         "of the first N"),
        ("max-tokens", Numbers(int, 1, MAX_TOKENS_DEFAULT), 96, "N", "tokens of a completion"),
        ("temperature", Numbers(float, 0, TEMPERATURE_MAX, TEMPERATURES_MAX), (0.0, 1.0),
         "T[,T..]", "temperatures to plan for; the first is validated"),
        ("round-trip-ms", Numbers(float, 0, 10_000), 0.0, "MS", "of the link between coordinator "
         "and draft, beside what messages take on one machine"),
        ("concurrency", Numbers(int, 1, SESSIONS_PER_COORDINATOR_MAX), 1, "N",
         "sessions that a target replica decodes at a time"),
        ("plot", Path, None, "FILE", "write the speed-up over K there, as an SVG"),
    ),
    option("--raw", is_flag=True, help="do not apply the model's chat template"),
    option("--separate-draft", is_flag=True, help="plan for drafts with a device of their own, "
           "also where here they share the target's"),
    option("--validate", is_flag=True,
           help="run the real thing, and print predicted beside measured"),
]  # fmt: skip
_SIMULATION: Final = _taking(
    ("from-report", Path, None, "FILE",
     "simulate what `outrider plan --json` printed before, and run no model"),
    ("from-numbers", str, None, "KEY=VALUE,..", "simulate a pair of such numbers, and run no model "
     "[verify_ms=18.3,verify_tokens=16,draft_ms=1.3,draft_branches=64,acceptance=0.8,"
     "num_draft_tokens=6,look_ahead=0,hit_rate=0,rest_ms=0]; a time may be a table, "
     "ROWS:MS/ROWS:MS, and the acceptance one by position, A/A/.."),
    ("sessions", Numbers(int, 1, 10_000, 2**10), (), "N[,N..]",
     "sessions at a time: where one ends the next begins"),
    ("rate", Numbers(float, 0.001, 10_000, 2**10), (), "R[,R..]", "requests a second instead"),
    ("prompt-tokens", Numbers(int, 1, 2**17), 256, "N", "tokens of a prompt"),
    ("answer-tokens", Numbers(int, 1, MAX_TOKENS_DEFAULT), 256, "N", "tokens of an answer, mean"),
    *((f"{role}s", _COUNTS, (), "N[,N..]|auto", f"{role}s {_TO_LOOK_AT}") for role in ROLES),
    ("tpot-ms", Numbers(float, 0.001, 60_000), None, "MS",
     "time per token that 99 % of the tokens are to keep"),
    ("lose", str, None, "ROLE@S[-S],..", "lose a target, draft or coordinator at that second, "
     "silently, and have another one at a later second"),
    ("simulated-seconds", Numbers(float, 1, 3_600), 10.0, "S", "that are measured"),
    ("coordinator-ms", Numbers(float, 0, 1_000), 0.29, "MS",
     "of a coordinator's one thread for a round; see `bench overhead`"),
    ("simulation-seed", Numbers(int, 0, SEED_MAX), 0, "N", "of what is left to chance"),
)  # fmt: skip
_SIMULATE: Final = option(
    "--simulate", is_flag=True,
    help="try a fleet, too: the real services on a virtual clock. A simulated round takes 1 to 2 "
    "ms of this machine's time, 6 where drafts look ahead: 20 sessions for 10 s take about 20 s, "
    "and numbers of replicas are found in about ten such runs",
)  # fmt: skip


@command(
    "plan",
    *_PLAN,
    json_option(),
    *grouped("A simulated fleet", (_SIMULATE, *_SIMULATION)),
    *connection_options(without=OWN_FLAGS),
    epilog="The services run for a rehearsal of a minute; with the demo pair and the built-in "
    "prompts all takes about two minutes on two free cores. With --validate a deployment as `bench "
    "speedup` uses it answers the prompts once more.",
)  # fmt: skip
def plan(arguments: Arguments) -> int:
    """Plans, and prints tables or one JSON object."""
    _check_simulation(arguments)
    if arguments.from_report is not None or arguments.from_numbers is not None:
        return _simulate_alone(arguments)
    prompts = _prompts(arguments)  # What is wrong with them shows before anything is started.
    config = deployment_config(arguments)
    if arguments.validate:  # What is measured copies from no earlier answer, either.
        config = replace(config, draft=replace(config.draft, suffix_tokens_per_tenant=0))
    _check(arguments, config)
    use_threads(config.target.num_threads or available_cores())  # Before torch is imported.
    progress("finding the models")
    config = resolve_models(config)

    from benchmarks.acceptance import load_reading

    reading = load_reading(config, prompts, arguments.max_tokens, arguments.raw, progress)
    samples = [reading.sample(temperature, progress) for temperature in arguments.temperature]
    del reading
    gc.collect()  # The engines' memory is the services' from here on.
    report, validation = asyncio.run(_plan(arguments, config, samples))
    if arguments.plot is not None:
        arguments.plot.write_text(report.plot(), encoding="utf-8")
    if not arguments.simulate:
        _show(arguments, report.values(validation), lambda: report.render(validation))
        return 0
    from deploy.planner.fleets import of_report, tables
    from deploy.planner.report import as_json

    pair = of_report(json.loads(as_json(report.values(None))), "this plan")
    fleets = _simulated(arguments, config, pair)
    _show(
        arguments,
        report.values(validation, [one.values() for one in fleets]),
        lambda: report.render(validation, tables(fleets, arguments.tpot_ms)),
    )
    return 0


def _check_simulation(arguments: Arguments) -> None:
    """Raises `ConfigError` for what cannot be simulated. Nothing of it goes without
    `--simulate`."""
    if not arguments.simulate:
        for one in _SIMULATION:
            if one.name in arguments.given:
                raise SettingError(str(one.name), "is for --simulate: without it nothing is "
                                   "simulated")  # fmt: skip
        return
    if None not in (arguments.from_report, arguments.from_numbers):
        raise SettingError("from_numbers", "and --from-report exclude each other")
    if bool(arguments.sessions) == bool(arguments.rate):
        raise ConfigError("--sessions or --rate is needed: say what load, and only one kind")
    counts = [_counts(arguments, role) for role in ROLES]
    runs = math.prod(max(1, len(count)) for count in counts)
    runs *= len(arguments.sessions) + len(arguments.rate)
    if runs > RUNS_MAX:
        raise SettingError("targets", f"and the like make {runs} runs; {RUNS_MAX} are allowed")
    _check_counts(arguments, "target", "coordinator")
    _losses(arguments)


def _check_counts(arguments: Arguments, *roles: str) -> None:
    """Raises `ConfigError` where numbers of these roles are to be found, and for no time."""
    if arguments.tpot_ms is None and not all(_counts(arguments, role) for role in roles):
        raise ConfigError(
            "--tpot-ms is needed to find numbers of replicas; or name --targets, --coordinators "
            "and, where a model drafts, --drafts"
        )


def _counts(arguments: Arguments, role: str) -> tuple[int, ...]:
    """Numbers of replicas to look at; empty = the smallest that keeps the time per token."""
    found: tuple[int, ...] = getattr(arguments, f"{role}s")
    return found


def _losses(arguments: Arguments) -> tuple[Loss, ...]:
    from deploy.planner.simulation import Loss

    texts = arguments.lose.split(",") if arguments.lose else []
    if len(texts) > LOSSES_MAX:
        raise SettingError("lose", f"{len(texts)} losses are more than {LOSSES_MAX}")
    found = []
    for text in texts:
        match = _LOSS.fullmatch(text.strip())
        if match is None:
            raise SettingError(
                "lose", f"{text!r} is wrong; it must be ROLE@SECONDS or ROLE@SECONDS-SECONDS with "
                f"one of {', '.join(ROLES)}",
            )  # fmt: skip
        loss: Any = match[1], float(match[2]), float(match[3] or "inf")
        found.append(Loss(*loss))
        if found[-1].at_s > arguments.simulated_seconds or found[-1].back_s <= found[-1].at_s:
            raise SettingError("lose", f"{text} is wrong; it must be within --simulated-seconds, "
                               "and be back later")  # fmt: skip
    return tuple(found)


def _simulate_alone(arguments: Arguments) -> int:
    """Of a pair that is known already; nothing is run."""
    for name in ("prompts", "num_prompts", "plot", "server", "validate"):
        if getattr(arguments, name) not in (None, False):
            raise SettingError(name, "is for models, and none is run")
    config = deployment_config(arguments)
    from rich.console import Group

    from deploy.planner.fleets import of_numbers, read_report, tables

    if arguments.from_report is not None:
        pair = read_report(arguments.from_report)
    else:
        seats = config.target.step_sessions, config.draft.step_sessions
        pair = of_numbers(arguments.from_numbers, *seats)
    fleets = _simulated(arguments, config, pair)
    values = {"pair": asdict(pair), "fleets": [one.values() for one in fleets]}
    _show(arguments, values, lambda: Group(*tables(fleets, arguments.tpot_ms)))
    return 0


def _simulated(arguments: Arguments, config: DeploymentConfig, pair: Pair) -> list[SimulatedFleet]:
    """Every load on every fleet. What replicas take at a time is the deployment's."""
    from deploy.planner.fleets import simulated
    from deploy.planner.simulation import Demand, FleetSize, Scenario

    losses = _losses(arguments)
    if not pair.has_drafts and any(loss.role == "draft" for loss in losses):
        raise SettingError("lose", "draft is wrong; this pair has no draft replicas")
    if pair.has_drafts:
        _check_counts(arguments, "draft")
    if arguments.round_trip_ms:
        pair = replace(pair, round_trip_ms=arguments.round_trip_ms)
    loads = {"prompt_tokens": arguments.prompt_tokens, "answer_tokens": arguments.answer_tokens}
    demands = [Demand(sessions=number, **loads) for number in arguments.sessions]
    demands += [Demand(rate=rate, **loads) for rate in arguments.rate]
    drafts = (arguments.drafts or (1,)) if pair.has_drafts else (0,)
    counts = product(arguments.targets or (1,), drafts, arguments.coordinators or (1,))
    sizes = [FleetSize(targets=t, drafts=d, coordinators=c) for t, d, c in counts]
    free: list[Any] = [role for role in ROLES if not _counts(arguments, role)]
    free = [role for role in free if role != "draft" or pair.has_drafts]
    return [
        simulated(
            Scenario(
                pair=pair, fleet=size, demand=demand, config=config, losses=losses,
                coordinator_s=arguments.coordinator_ms / 1e3,
                seconds=arguments.simulated_seconds, seed=arguments.simulation_seed,
            ),
            free, arguments.tpot_ms, progress,
        )
        for demand, size in product(demands, sizes)
    ]  # fmt: skip


def _show(
    arguments: Arguments, values: dict[str, Any], as_tables: Callable[[], RenderableType]
) -> None:
    """On standard output, as was asked for."""
    from deploy.planner.report import as_json

    if arguments.json:
        print(as_json(values))
    else:
        show(as_tables())


def _prompts(arguments: Arguments) -> tuple[BenchPrompt, ...]:
    path, num = arguments.prompts, arguments.num_prompts
    prompts = built_in_prompts() if path is None else read_prompts(path)
    num = num or (BUILT_IN_PROMPTS if path is None else len(prompts))
    return select_prompts(prompts, num) if num < len(prompts) else prompts


def _check(arguments: Arguments, config: DeploymentConfig) -> None:
    """Raises `SettingError` for what cannot be read, rehearsed and validated by this command."""
    temperatures, plot = arguments.temperature, arguments.plot
    if len(set(temperatures)) < len(temperatures):
        given = ",".join(f"{temperature:g}" for temperature in temperatures)
        raise SettingError("temperature", f"{given!r} is wrong; one is named twice")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise SettingError("plot", f"{plot} cannot be written: there is no such folder")
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
    if arguments.simulate and config.draft.drafter.model is not None:
        _check_counts(arguments, "draft")
    if not arguments.validate:
        if arguments.server:
            raise SettingError("server", "is for --validate: without it nothing is called")
        return
    # What is measured is one session at a time on this machine.
    for name, allowed in (("concurrency", 1), ("round_trip_ms", 0), ("separate_draft", False)):
        if (value := getattr(arguments, name)) != allowed:
            raise SettingError(
                name, f"{value} cannot be validated here; with --validate it must be {allowed}"
            )
    if not arguments.server:
        _check_running(_fixed(arguments))


def _fixed(arguments: Arguments) -> Arguments:
    """For rounds that are all of one length, wait for their drafts, and copy from no answer that
    another K has got."""
    return with_settings(arguments, length_control=False, look_ahead=0, suffix_tokens_per_tenant=0)


def _check_running(arguments: Arguments) -> None:
    """Raises `SettingError` where a deployment runs that a plan cannot be held against."""
    record = running_deployment(state_directory(os.environ))
    if record is not None:
        try:
            refuse_other_settings(arguments, record)
        except ConfigError:
            raise SettingError(
                "validate",
                f"cannot use the deployment that runs ({record.grpc_address}): its settings differ "
                "from those that are planned for; stop it (outrider stop), and the command starts "
                "one of its own",
            ) from None


async def _plan(
    arguments: Arguments, config: DeploymentConfig, samples: Sequence[Sample]
) -> tuple[PlanReport, Validation | None]:
    from deploy.planner.choosing import Replays, choose
    from deploy.planner.rehearsal import rehearse
    from deploy.planner.report import PlanReport
    from deploy.planner.round_times import Load

    shares_device = not arguments.separate_draft and _shares_device(config)
    replays = [Replays(config.draft, sample) for sample in samples]
    times = await rehearse(config, samples, shares_device, progress)
    load = Load(sessions=arguments.concurrency, round_trip_s=arguments.round_trip_ms / 1e3)
    plans = tuple(choose(load, replay, found) for replay, found in zip(replays, times, strict=True))
    report = PlanReport(
        model=config.target.model,
        draft_model=config.draft.model,
        num_prompts=len(samples[0].texts),
        max_tokens=arguments.max_tokens,
        concurrency=arguments.concurrency,
        round_trip_ms=arguments.round_trip_ms,
        shares_device=shares_device,
        target_costs=times[0].target,
        draft_costs=times[0].draft,
        plans=plans,
        flags=flags_again(arguments, without=DECIDED),
    )
    if not arguments.validate:
        return report, None
    return report, await _validate(_fixed(arguments), config, samples[0], plans[0], times[0])


async def _validate(
    arguments: Arguments,
    config: DeploymentConfig,
    sample: Sample,
    found: TemperaturePlan,
    times: ServiceTimes,
) -> Validation:
    """What is predicted are rounds of that very K, whose drafts are waited for."""
    from benchmarks.acceptance import rules_at
    from deploy.planner.choosing import SWEEP, Replays
    from deploy.planner.rehearsal import compared, play_validation

    chosen, counts = found.chosen, (0, *SWEEP)
    rule = chosen.rule if chosen.num_draft_tokens else rules_at(sample.temperature)[-1]
    async with connected(arguments) as connection, connection.client() as client:
        played = await play_validation(client, sample, rule, counts, progress)
    replays = Replays(replace(config.draft, suffix_tokens_per_tenant=0), sample)
    predicted = {k: replays.of(rule, k) for k in counts}
    sampling = sample.temperature, rule
    return compared(played, predicted, times, sampling, chosen.num_draft_tokens)


def _shares_device(config: DeploymentConfig) -> bool:
    """Whether draft and target would compute on the same cores or device on a machine like this."""
    import torch

    gpus = float(torch.cuda.device_count())
    placed = plan_fleet(config, config, {"GPU": gpus}, local=False).config
    return not are_apart(placed, same_node=True, num_cores=available_cores())
