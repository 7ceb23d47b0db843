"""`outrider bench WHAT` runs a benchmark. `speedup`, `peers` and `serve` measure the running
deployment, or if none runs, a temporary one. The other benchmarks need no deployment."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import outrider.bench.options
from outrider.config.deployment import (
    CoordinatorConfig,
    DeploymentConfig,
    DraftConfig,
    TargetConfig,
)
from outrider.drafters.names import LookupKind
from outrider.errors import SettingError
from outrider.fleet.local_state import running_deployment, state_directory
from outrider.fleet.preflight import resolve_models
from outrider.foundation.api_keys import new_key
from outrider.foundation.settings import build
from outrider.replica.threads import available_cores, use_threads

from . import options as cli
from .command import Arguments, Command, Group, json_option
from .options import Connection, connected
from .output import note, progress, tell
from .serve import ask_replica

if TYPE_CHECKING:
    from outrider.bench.measurement import BenchClient
    from outrider.bench.peers import PeersOptions
    from outrider.bench.serve import ServeOptions
    from outrider.bench.speedup import SpeedupOptions, Subject
    from outrider.client import Client

KEY_VARIABLE = "OPENAI_API_KEY"
TARGET_SETTINGS = (
    "device",
    "dtype",
    "quantization",
    "model",
    "deterministic",
    "cpu_kernels",
    "trust_remote_code",
    "target_num_threads",
)
DRAFT_SETTINGS = (
    "draft_model",
    "draft_dtype",
    "draft_quantization",
    "ngram_min",
    "ngram_max",
    "suffix_depth",
    "suffix_min_score",
    "suffix_tokens_per_tenant",
)
PURPOSES = {
    "speedup": "compare decoding with and without drafts",
    "peers": "compare with vLLM, OpenVINO, llama.cpp and transformers, with the same weights, "
    "prompts and threads",
    "servers": "compare the HTTP server with that of vLLM, on a tiny model",
    "serve": "measure latency and throughput under load, like `vllm bench serve`",
    "emulate": "compare decoding modes on emulated models whose speed and acceptance you set",
    "overhead": "measure what rounds and requests cost without the models",
    "engine": "measure many sessions at once, and compare a step's time with that of transformers",
    "acceptance": "measure how much of the target's text a draft would have proposed",
    "device": "compare the speed of a step at batch size 1 with the memory bandwidth",
}
MODEL_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "emulate": (),
    "overhead": (),
    "servers": (),
    "device": (),
    "engine": TARGET_SETTINGS,
    "acceptance": TARGET_SETTINGS + DRAFT_SETTINGS,
}
"""For each benchmark that needs no deployment, the settings that the benchmark reads."""


def _load(name: str) -> Command:
    kind = f"{name.capitalize()}Options"
    module = outrider.bench.options
    if not hasattr(module, kind):
        module = importlib.import_module(f"outrider.bench.{name}")
    options, keys = getattr(module, kind), MODEL_SETTINGS.get(name)
    params = [*cli.class_options(options), json_option()]
    if keys is None:
        own = [str(option.name) for option in params]
        params += cli.connection_options(without=[*cli.REQUEST_KEYS, *own])
    elif keys:
        params += cli.setting_options(common=keys, only=keys)

    def run(arguments: Arguments) -> int:
        # Benchmarks take minutes, so even with --json they report their progress.
        progress.quiet = arguments.quiet
        asked = options.from_arguments(arguments)
        if hasattr(asked, "load_prompts"):
            asked.load_prompts()  # Wrong prompts raise here, before a deployment is started.
        module = importlib.import_module(f"outrider.bench.{name}")
        if name in _CALLERS:
            report = _CALLERS[name](module, asked, arguments)
        else:
            given = [asked, found_models(cli.deployment_config(arguments))] if keys else [asked]
            report = module.run(*given, progress)
        return tell(asyncio.run(report) if inspect.iscoroutine(report) else report, arguments.json)

    return Command(name, params=params, callback=run)


async def _speedup(module: Any, options: SpeedupOptions, arguments: Arguments) -> Any:
    async with connected(arguments) as connection, connection.client() as client:
        subject = await _described(connection, _subject(connection, client, options.raw))
        return await module.run(options, subject, progress)


async def _peers(module: Any, options: PeersOptions, arguments: Arguments) -> Any:
    return await module.run(options, partial(_two_tenants, arguments, options.raw), progress)


def found_models(config: DeploymentConfig) -> DeploymentConfig:
    if config.target.emulated is not None:
        raise SettingError("engine", "is emulated; this command needs a model")
    # This call must precede the import of torch, because the import reads the number of threads.
    use_threads(config.target.num_threads or available_cores())
    progress("finding, downloading or converting models")
    return resolve_models(config)


@asynccontextmanager
async def _two_tenants(arguments: Arguments, raw: bool) -> AsyncIterator[tuple[Subject, Subject]]:
    """Yields the same deployment twice, once for each side of a comparison. In a temporary
    deployment the two sides are different tenants, so neither uses cached prompts of the other."""
    key, is_own = new_key(), not arguments.server and "api_key" not in arguments.settings
    if is_own and running_deployment(state_directory(os.environ)) is None:
        # A copy, because the caller passes the same `arguments` again for its next comparison.
        settings = arguments.settings | {"api_key": key}
        arguments = Arguments(**vars(arguments) | {"settings": settings})
    async with connected(arguments) as connection, connection.client() as client:
        subject = _subject(connection, client, raw)
        if arguments.settings.get("api_key") != key:
            yield subject, subject
            return
        other = replace(connection, api_key=key)
        async with other.client() as other_client:
            yield _subject(other, other_client, raw), subject


def _subject(connection: Connection, client: Client, raw: bool) -> Subject:
    from outrider.bench.clients import GrpcClient
    from outrider.bench.speedup import Subject

    settings = connection.settings
    target, draft = build(TargetConfig, settings), build(DraftConfig, settings)
    _note_copies(connection, draft)
    num_draft_tokens = settings.get("num_draft_tokens") or CoordinatorConfig().num_draft_tokens
    # Target and draft take turns, so only the larger of their numbers of threads counts.
    num_threads = max(target.num_threads or available_cores(), draft.num_threads)
    directory = connection.target_directory
    return Subject(
        client=GrpcClient(client, raw=raw),
        model=target.model if settings else connection.address,
        draft_model=draft.model if settings else "its own",
        dtype=target.dtype if settings else "unknown",
        num_draft_tokens=int(num_draft_tokens),
        target=replace(target, directory=directory, num_threads=num_threads) if directory else None,
    )


async def _described(connection: Connection, subject: Subject) -> Subject:
    """Adds what the targets say of themselves, if this command can call them."""
    internal = str(connection.settings.get("internal_tls_dir") or "")
    asked = [
        ask_replica("target", address, "", None, internal)
        for address in connection.target_addresses
    ]
    facts = await asyncio.gather(*asked)
    if not facts or any(target["error"] for target in facts):
        return subject
    numerics = {target["numerics"] for target in facts}
    is_equal = len(numerics) == 1 and "" not in numerics
    return replace(subject, dtype=facts[0]["dtype"], bit_equal_rows=is_equal)


def _note_copies(connection: Connection, draft: DraftConfig) -> None:
    copies = draft.drafter.lookup is LookupKind.SUFFIX and draft.suffix_tokens_per_tenant
    if (copies or not connection.settings) and not (connection.is_own or progress.quiet):
        own = ". Stop it to measure a new deployment" if connection.settings else ""
        note(
            "note: drafts may copy from earlier answers, so this deployment answers repeated "
            f"prompts faster{own}"
        )


async def _serve(module: Any, options: ServeOptions, arguments: Arguments) -> Any:
    from outrider.bench.clients import GrpcClient, HttpClient

    if options.base_url is not None:
        own = {"server": arguments.server, "num_draft_tokens": options.num_draft_tokens}
        given = [name for name, value in own.items() if value is not None]
        given += arguments.settings.keys() - {"model", "api_key"}
        if given:
            raise SettingError(min(given), "is for an Outrider deployment, not for --base-url")
    async with AsyncExitStack() as stack:
        client: BenchClient
        if options.base_url is not None:
            key = str(arguments.settings.get("api_key") or os.environ.get(KEY_VARIABLE, ""))
            model = str(arguments.settings.get("model", ""))
            http = HttpClient(options.base_url, raw=options.raw, model=model, api_key=key.strip())
            client = await stack.enter_async_context(http)
            settings = options.settings(
                "openai" if options.raw else "openai-chat", http.address, http.model
            )
        else:
            connection = await stack.enter_async_context(connected(arguments))
            _note_copies(connection, build(DraftConfig, connection.settings))
            # The client repeats no call, because the benchmark counts failures.
            ours = await stack.enter_async_context(connection.client(tries_again=False))
            client = GrpcClient(ours, raw=options.raw)
            model = (await ours.describe()).model
            settings = options.settings("outrider-grpc", connection.address, model)
        gc.collect()
        gc.freeze()  # Later garbage collections skip the objects that exist now.
        progress("sending requests")
        load = await module.measure(options, client, progress.update)
        progress.rest()
    return module.report(options, settings, load)


_CALLERS: Mapping[str, Callable[[Any, Any, Arguments], Any]] = {
    "speedup": _speedup,
    "peers": _peers,
    "serve": _serve,
}
bench = Group("bench", PURPOSES, _load, subcommand_metavar="WHAT")
