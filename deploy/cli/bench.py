"""`outrider bench WHAT`: measurements of a deployment, or of one that the command starts."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import Report, to_json
from deploy.fleet.local_state import running_deployment, state_directory
from deploy.fleet.preflight import resolve_models
from outrider.api_keys import new_key
from outrider.config import CoordinatorConfig, DeploymentConfig, deployment_settings
from outrider.drafters.names import LookupKind, parse_drafter
from outrider.errors import SettingError
from outrider.replica.process_setup import available_cores, use_threads

from .command import Arguments, Command, Group, Option, json_option, option
from .connection import Connection, connected, connection_options
from .options import REQUEST_KEYS, deployment_config, setting_options, with_settings
from .output import progress, show

if TYPE_CHECKING:
    from benchmarks.libraries import Target
    from benchmarks.measurement import BenchClient
    from benchmarks.serve import ServeOptions
    from benchmarks.speedup import Subject
    from outrider.client import Client

KEY_VARIABLE: Final = "OPENAI_API_KEY"
TARGET_SETTINGS: Final = (
    "device", "dtype", "model", "deterministic", "cpu_kernels", "trust_remote_code",
    "target_num_threads",
)  # fmt: skip
DRAFT_SETTINGS: Final = (
    "draft_model", "draft_dtype", "draft_support_entries", "ngram_min", "ngram_max", "suffix_depth",
    "suffix_min_score", "suffix_tokens_per_tenant", "suffix_tokens_total",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measurement:
    """One of the commands."""

    purpose: str
    options: str
    """MODULE:CLASS of its options, in `benchmarks`."""
    run: Callable[[Any, Arguments], int] | None = None
    """None = its module's own `run`, which takes the options and the models' configuration."""
    model_settings: tuple[str, ...] | None = None
    """Settings of its models, where it needs no deployment; None = it calls one."""


def _load(name: str) -> Command:
    """The measurement of this name, with the options that it takes."""
    found = MEASUREMENTS[name]
    options = _options_class(found)
    params = [*options.params(Option), json_option()]
    if name == "serve":
        text = f"with --base-url: a bearer token [${KEY_VARIABLE}]"
        params.append(option("--api-key", help=text))
    if found.model_settings is None:
        params += connection_options(without=[*REQUEST_KEYS, *(str(one.name) for one in params)])
    elif found.model_settings:
        others = [key for key in deployment_settings() if key not in found.model_settings]
        params += setting_options(others, common=found.model_settings)

    def run(arguments: Arguments) -> int:
        asked = options.from_arguments(arguments)
        if found.run is not None:
            return found.run(asked, arguments)
        given = [asked, _model_config(arguments)] if found.model_settings else [asked]
        report = importlib.import_module(f"benchmarks.{name}").run(*given, progress)
        return _tell(asyncio.run(report) if inspect.iscoroutine(report) else report, arguments)

    return Command(name, params=params, callback=run)


def _options_class(found: Measurement) -> Any:
    module, _, name = found.options.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), name)


def _tell(report: Report, arguments: Arguments) -> int:
    if arguments.json:
        print(to_json(report.values))
    else:
        for part in report.shown:
            show(part)
    for warning in report.warnings:
        progress(warning)
    return 0


def _run_speedup(options: Any, arguments: Arguments) -> int:
    from benchmarks import speedup

    options.load_prompts()  # What is wrong with them shows before anything is started.

    async def measure() -> list[speedup.Level]:
        """A deployment that the command starts is for one concurrency: the next one's prompts are
        the same, and answered ones are not measured as new ones are."""
        found = []
        for level in options.levels():
            async with connected(arguments) as connection, connection.client() as client:
                subject = _subject(connection, client, options.raw)
                found.append(await speedup.run(level, subject, progress))
        return found

    return _tell(speedup.report(asyncio.run(measure())), arguments)


def _run_peers(options: Any, arguments: Arguments) -> int:
    from benchmarks import peers

    options.load_prompts()  # What is wrong with them shows before anything is started.
    if options.servers:
        arguments = with_settings(arguments, http="true", port="0")
    start = lambda: _two_tenants(arguments, options.raw)  # noqa: E731
    return _tell(asyncio.run(peers.run(options, start, progress)), arguments)


def _model_config(arguments: Arguments) -> DeploymentConfig:
    """The models of a measurement in this process, with their files. Raises `ConfigError`."""
    config = deployment_config(arguments)
    if config.target.emulated is not None:
        raise SettingError("engine", "an emulated one is no model; this measures models")
    use_threads(config.target.num_threads or available_cores())  # Before torch is imported.
    progress("finding the models")
    return resolve_models(config)


@asynccontextmanager
async def _two_tenants(arguments: Arguments, raw: bool) -> AsyncIterator[tuple[Subject, Subject]]:
    """One deployment twice: where this command starts it as two tenants, neither of which finds
    cached what the other one asked."""
    key = new_key()
    is_own = (
        not arguments.server
        and "api_key" not in arguments.settings
        and running_deployment(state_directory(os.environ)) is None
    )
    if is_own:
        arguments = with_settings(arguments, api_key=key)
    async with connected(arguments) as connection, connection.client() as client:
        subject = _subject(connection, client, raw)
        if not is_own:
            yield subject, subject
            return
        other = replace(connection, api_key=key)
        async with other.client() as other_client:
            yield _subject(other, other_client, raw), subject


def _subject(connection: Connection, client: Client, raw: bool) -> Subject:
    """Warns where drafts may repeat what was answered before."""
    from benchmarks.clients import GrpcClient
    from benchmarks.speedup import Subject

    settings = connection.settings
    if _keeps_answers(connection) and not connection.is_own:
        progress(
            "warning: drafts may copy from earlier answers: a prompt that this deployment was "
            "asked before is not measured as a new one is. A deployment that the command starts, "
            "where none runs, has nothing to copy"
        )
    num_draft_tokens = settings.get("num_draft_tokens") or CoordinatorConfig().num_draft_tokens
    return Subject(
        client=GrpcClient(client, raw=raw),
        model=str(settings.get("model", connection.address)),
        draft_model=str(settings.get("draft_model", "its own")),
        dtype=_dtype(connection),
        num_draft_tokens=int(num_draft_tokens),
        target=_target(connection),
        http_url=connection.http_address and f"http://{connection.http_address}",
        api_key=connection.api_key,
    )


def _keeps_answers(connection: Connection) -> bool:
    """Whether drafts copy from earlier answers; true where nothing is known of them."""
    settings = connection.settings
    if not settings:
        return True
    rooms = (settings["suffix_tokens_per_tenant"], settings["suffix_tokens_total"])
    return parse_drafter(str(settings["draft_model"])).lookup is LookupKind.SUFFIX and all(rooms)


def _dtype(connection: Connection) -> str:
    """What the target runs in: `auto` is what its files say."""
    asked = str(connection.settings.get("dtype", "unknown"))
    path = Path(connection.target_directory) / "config.json"
    if asked != "auto" or not connection.target_directory:
        return asked
    values = json.loads(path.read_text(encoding="utf-8"))
    return str(values.get("dtype") or values.get("torch_dtype") or asked)


def _target(connection: Connection) -> Target | None:
    """The target once more, on as many threads as the services have in all, which take turns; None
    where its files are not here."""
    if not connection.target_directory:
        return None
    from benchmarks.libraries import Target

    settings = connection.settings
    num_threads = int(settings["target_num_threads"] or available_cores())
    return Target(
        directory=connection.target_directory,
        dtype=str(settings["dtype"]),
        device=str(settings["device"]),
        num_threads=max(num_threads, int(settings["draft_num_threads"] or 0)),
        trust_remote_code=bool(settings["trust_remote_code"]),
    )


def _run_serve(options: ServeOptions, arguments: Arguments) -> int:
    """Measures and reports; 1 where requests failed."""
    options.load_prompts()  # What is wrong with them shows before anything is started.
    if options.base_url is None and arguments.api_key is not None:
        raise SettingError("api_key", "needs --base-url")
    if options.base_url is not None:
        given = [*(arguments.settings.keys() - {"model"}), *(
            name for name in ("server", "config") if getattr(arguments, name)
        )]  # fmt: skip
        given += ["num_draft_tokens"] if options.num_draft_tokens is not None else []
        if given:
            raise SettingError(min(given), "is for a deployment of ours, not for --base-url")
    report, page = asyncio.run(_serve(arguments, options))
    _tell(report, arguments)
    if options.report is not None:
        options.report.write_text(page, encoding="utf-8")
    return 1 if report.values["failed"] else 0


async def _serve(arguments: Arguments, options: ServeOptions) -> tuple[Report, str]:
    """The report and, where it is wanted, the page."""
    from benchmarks import serve
    from benchmarks.clients import GrpcClient, HttpClient

    async with AsyncExitStack() as stack:
        client: BenchClient
        if options.base_url is not None:
            key = arguments.api_key or os.environ.get(KEY_VARIABLE, "")
            model = str(arguments.settings.get("model", ""))
            http = HttpClient(options.base_url, raw=options.raw, model=model, api_key=key.strip())
            client = await stack.enter_async_context(http)
            settings = options.settings(
                "openai" if options.raw else "openai-chat", http.address, http.model
            )
        else:
            connection = await stack.enter_async_context(connected(arguments))
            # What fails is told as it is, and not tried again.
            ours = await stack.enter_async_context(connection.client(tries_again=False))
            client = GrpcClient(ours, raw=options.raw)
            model = (await ours.describe()).model
            settings = options.settings("outrider-grpc", connection.address, model)
        gc.collect()
        gc.freeze()  # What is always there is not looked through while times are taken.
        progress("sending requests")
        load = await serve.measure(options, client, progress.update)
        progress.rest()
    report = serve.report(options, settings, load)
    return report, serve.page(report, load) if options.report else ""


MEASUREMENTS: Final = {
    "speedup": Measurement(
        "speculative against plain decoding, prompt by prompt", "speedup:SpeedupOptions",
        _run_speedup,
    ),
    "peers": Measurement(
        "Outrider beside vLLM, OpenVINO, llama.cpp, amd-pace and transformers, with the same "
        "weights, prompts and threads", "peers:PeersOptions", _run_peers,
    ),
    "serve": Measurement(
        "latency and throughput under load, as `vllm bench serve` has them", "serve:ServeOptions",
        _run_serve,
    ),
    "emulate": Measurement(
        "ways to decode, by real services on emulated models of stated speed and acceptance",
        "emulate:EmulateOptions", None, (),
    ),
    "overhead": Measurement(
        "what rounds and requests cost beside the models, and how many one coordinator plays",
        "overhead:OverheadOptions", None, (),
    ),
    "engine": Measurement(
        "many sessions at once, steps against the library's, and verdicts",
        "options:EngineOptions", None, TARGET_SETTINGS,
    ),
    "acceptance": Measurement(
        "how much of the target's text a draft would have proposed, and guessed",
        "options:AcceptanceOptions", None, (*TARGET_SETTINGS, *DRAFT_SETTINGS),
    ),
    "device": Measurement(
        "steps at batch 1 against the memory's speed", "options:DeviceOptions", None, (),
    ),
}  # fmt: skip


bench: Final = Group(
    "bench",
    {name: found.purpose for name, found in MEASUREMENTS.items()},
    _load,
    subcommand_metavar="WHAT",
)
