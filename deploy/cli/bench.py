"""`outrider bench WHAT`: measurements of a deployment, or of one that the command starts."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from benchmarks import (
    acceptance,
    capacity,
    device,
    emulate,
    engine,
    hits,
    overhead,
    peers,
    scaling,
    speedup,
)
from deploy.models import resolve_models
from outrider.config import (
    CoordinatorConfig,
    DeploymentConfig,
    DraftConfig,
    TargetConfig,
    deployment_settings,
)
from outrider.drafting.registry import LookupKind, parse_drafter
from outrider.errors import SettingError
from outrider.hosting import (
    available_cores,
    build_eagle,
    build_engine,
    build_lookup,
    use_threads,
)

from .connection import Connection, add_connection_flags, connected
from .settings import add_setting_flags, deployment_config

if TYPE_CHECKING:
    from rich.console import RenderableType

    from benchmarks.peers_report import PeersReport
    from benchmarks.references import ReferenceModel
    from benchmarks.report import SpeedupReport
    from outrider.engine.interface import Engine
    from outrider.text import TokenizerText

OWN_FLAGS: Final = ("seed", "num_draft_tokens", "deadline_ms")
"""Settings that are flags of the requests here."""


TARGET_FLAGS: Final = (
    "device", "dtype", "model", "deterministic", "trust_remote_code", "target_num_threads",
)  # fmt: skip
"""Settings of a measurement without a deployment."""
DRAFT_FLAGS: Final = (
    "draft_model", "draft_dtype", "draft_support_entries", "ngram_min", "ngram_max", "suffix_depth",
    "suffix_min_score", "suffix_tokens_per_tenant", "suffix_tokens_total",
)  # fmt: skip
Measure = Callable[[argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per measurement."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")

    def measurement(name: str, purpose: str, run_it: Measure) -> argparse.ArgumentParser:
        found = measurements.add_parser(
            name, help=purpose, description=purpose[0].upper() + purpose[1:] + "."
        )
        found.set_defaults(measure=run_it, parser=found)
        return found

    parser = measurement(
        "speedup", "speculative against plain decoding, prompt by prompt", _run_speedup
    )
    speedup.add_arguments(parser)
    _add_deployment_flags(parser)
    parser = measurement(
        "peers",
        "speculative decoding beside transformers' assisted generation and prompt lookup, and "
        "beside llama.cpp, with the same models, prompts and threads",
        _run_peers,
    )
    peers.add_arguments(parser)
    _add_deployment_flags(parser)
    parser = measurement("core", "what verdicts and draft draws cost, on one thread", _run_core)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
    _add_model_flags(parser, TARGET_FLAGS)
    parser = measurement("overhead", "what a round costs beside the models", _run_overhead)
    overhead.add_arguments(parser)
    _add_model_flags(parser, (*TARGET_FLAGS, "engine"))
    parser = measurement(
        "capacity", "how many rounds one coordinator plays for many sessions", _run_capacity
    )
    capacity.add_arguments(parser)
    parser = measurement(
        "scaling", "what more targets and drafts bring, on emulated models", _run_scaling
    )
    scaling.add_arguments(parser)
    parser = measurement(
        "emulate",
        "ways to decode, by real services on emulated models of stated speed and acceptance",
        _run_emulate,
    )
    emulate.add_arguments(parser)
    parser = measurement(
        "engine",
        "many sessions at once, and a step against the library's, also of a random GPT-NeoX",
        _run_engine,
    )
    engine.add_arguments(parser)
    _add_model_flags(parser, TARGET_FLAGS)
    parser = measurement("device", "steps at batch 1 against the memory's speed", _run_device)
    device.add_arguments(parser)
    parser = measurement(
        "acceptance", "how much of the target's text a draft would have proposed", _run_acceptance
    )
    acceptance.add_arguments(parser)
    _add_model_flags(parser, (*TARGET_FLAGS, *DRAFT_FLAGS))
    parser = measurement("hits", "how often a draft guesses what a round comes to", _run_hits)
    hits.add_arguments(parser)
    _add_model_flags(parser, (*TARGET_FLAGS, *DRAFT_FLAGS))


def _add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="K",
        help="draft tokens a round [the deployment's own]",
    )  # fmt: skip
    add_connection_flags(parser, without=OWN_FLAGS)


def _add_model_flags(parser: argparse.ArgumentParser, wanted: Collection[str]) -> None:
    others = [key for key in deployment_settings() if key not in wanted]
    add_setting_flags(parser, "models", without=others)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints a table or one JSON object."""
    measure: Measure = arguments.measure
    return measure(arguments)


def _run_speedup(arguments: argparse.Namespace) -> int:
    options = speedup.SpeedupOptions.from_arguments(
        arguments, num_draft_tokens=arguments.num_draft_tokens
    )
    options.load_prompts()  # What is wrong with them shows before anything is started.
    reports = asyncio.run(_speedup(options, arguments))
    from benchmarks.report import render, to_json, warnings

    for report in reports:
        for warning in warnings(report):
            _progress(warning)
    if arguments.json:
        print(to_json(reports))
        return 0
    for report in reports:
        _show(render(report))
        found = report.overall
        print(
            f"speculative decoding runs at {found.speedup:.2f}x the speed of plain decoding, the "
            f"median over the prompts; over all {found.speculative_tokens_per_second:.1f} against "
            f"{found.plain_tokens_per_second:.1f} tokens/s"
        )
    return 0


def _run_peers(arguments: argparse.Namespace) -> int:
    options = peers.PeersOptions.from_arguments(
        arguments, num_draft_tokens=arguments.num_draft_tokens
    )
    options.load_prompts()  # What is wrong with them shows before anything is started.
    options.check_llama_cpp()
    report = asyncio.run(_peers(options, arguments))
    from benchmarks.peers_report import render

    if arguments.json:
        print(report.to_json())
    else:
        _show(render(report))
    return 0


def _run_core(arguments: argparse.Namespace) -> int:
    config = _model_config(arguments)
    engine = _engine(config.target, "target")
    from benchmarks import core
    from benchmarks.prompts import built_in_prompts
    from outrider.text import TokenizerText

    text = TokenizerText.load(Path(config.target.directory), config.target.model)
    texts = [text.encode(prompt.text) for prompt in built_in_prompts()]
    report = core.measure(engine, texts, _progress)
    if arguments.json:
        print(report.to_json())
    else:
        _show(core.render(report))
    return 0


def _run_overhead(arguments: argparse.Namespace) -> int:
    options = overhead.OverheadOptions.from_arguments(arguments)
    config = deployment_config(arguments)
    if options.probes:
        config = resolve_models(config)
    report = asyncio.run(overhead.run(options, config.target, _progress))
    if arguments.json:
        print(report.to_json())
    else:
        _show(overhead.render(report))
    return 0


def _run_capacity(arguments: argparse.Namespace) -> int:
    report = asyncio.run(
        capacity.run(capacity.CapacityOptions.from_arguments(arguments), _progress)
    )
    if arguments.json:
        print(report.to_json())
    else:
        _show(capacity.render(report))
    return 0


def _run_scaling(arguments: argparse.Namespace) -> int:
    from .scaled import scaled_deployment

    options = scaling.options_of(arguments)
    report = asyncio.run(scaling.run(options, scaled_deployment, _progress))
    if arguments.json:
        print(report.to_json())
    else:
        _show(scaling.render(report))
    return 0


def _run_emulate(arguments: argparse.Namespace) -> int:
    options = emulate.EmulateOptions.from_arguments(arguments)
    report = asyncio.run(emulate.run(options, _progress))
    from benchmarks.emulate_report import render

    if arguments.json:
        print(report.to_json())
    else:
        _show(render(report))
    return 0


def _run_engine(arguments: argparse.Namespace) -> int:
    options = engine.EngineOptions.from_arguments(arguments)
    config = _model_config(arguments)
    from benchmarks.prompts import built_in_prompts
    from outrider.text import TokenizerText

    text = TokenizerText.load(Path(config.target.directory), config.target.model)
    token_ids = [token_id for prompt in built_in_prompts() for token_id in text.encode(prompt.text)]
    report = asyncio.run(engine.run(options, config.target, token_ids, _progress))
    if arguments.json:
        print(report.to_json())
    else:
        _show(engine.render(report))
    return 0


def _run_device(arguments: argparse.Namespace) -> int:
    options = device.DeviceOptions.from_arguments(arguments)
    from benchmarks import device_steps

    report = device_steps.run(options, _progress)
    if arguments.json:
        print(report.to_json())
    else:
        _show(device.render(report))
    return 0


def _run_acceptance(arguments: argparse.Namespace) -> int:
    options = acceptance.AcceptanceOptions.from_arguments(arguments)
    options.load_prompts()
    config = _model_config(arguments)
    target = _engine(config.target, "target")
    from benchmarks.acceptance_reading import (
        EagleReader,
        ExitReader,
        HeadsReader,
        LookupReader,
        ModelReader,
        Reader,
        measure,
    )
    from outrider.engine.paged_engine import PagedEngine
    from outrider.text import TokenizerText

    text = TokenizerText.load(Path(config.target.directory), config.target.model)
    max_model_len = target.info.max_model_len
    lookup, name = build_lookup(config.draft), config.draft.model
    own = target if isinstance(target, PagedEngine) else None
    support_entries = config.draft.support_entries
    if own is not None and own.draft_heads is not None:
        reader: Reader = HeadsReader(own, own.draft_heads, support_entries)
        name = f"{config.target.heads_kind}:{config.target.heads}"
    elif own is not None and own.exit_head is not None:
        reader = ExitReader(own, own.exit_head, support_entries)
        name = f"{config.target.heads_kind}:{config.target.heads}"
    elif own is not None and own.shows_features:
        reader = EagleReader(own, build_eagle(config.draft)[0], support_entries)
        name = name if lookup is None else f"the head of {name}"
    elif config.draft.drafter.model is None and lookup is not None:
        reader = LookupReader(lookup)
    else:
        name = name if lookup is None else f"the model of {name}"
        draft = _engine(config.draft, "draft")
        reader = ModelReader(draft, support_entries)
        max_model_len = min(max_model_len, draft.info.max_model_len)

    report = measure(
        options, target, reader, _encoder(text, options.raw),
        draft_model=name, max_model_len=max_model_len, progress=_progress,
    )  # fmt: skip
    if arguments.json:
        print(report.to_json())
    else:
        _show(acceptance.render(report))
    return 0


def _run_hits(arguments: argparse.Namespace) -> int:
    options = hits.HitOptions.from_arguments(arguments)
    options.load_prompts()
    config = _model_config(arguments)
    model = config.draft.drafter.model
    if model is None or model.reads_features:
        raise SettingError(
            "draft_model", f"{config.draft.model} does not guess outcomes; name a model"
        )
    target, draft = _engine(config.target, "target"), _engine(config.draft, "draft")
    from benchmarks.hits_rounds import measure
    from outrider.text import TokenizerText

    text = TokenizerText.load(Path(config.target.directory), config.target.model)
    report = measure(
        options, target, draft, _encoder(text, options.raw),
        draft_model=config.draft.model, progress=_progress,
    )  # fmt: skip
    if arguments.json:
        print(report.to_json())
    else:
        _show(hits.render(report))
    return 0


def _encoder(text: TokenizerText, raw: bool) -> Callable[[str], list[int]]:
    """A prompt's token ids, under the chat template unless it is to go in as it is."""

    def encode(prompt: str) -> list[int]:
        return (
            text.encode(prompt) if raw else text.encode_chat([{"role": "user", "content": prompt}])
        )

    return encode


def _show(table: RenderableType) -> None:
    from rich.console import Console

    Console().print(table)


def _model_config(arguments: argparse.Namespace) -> DeploymentConfig:
    """The models of a measurement in this process, with their files. Raises `ConfigError`."""
    config = deployment_config(arguments)
    if config.target.emulated is not None:
        raise SettingError("engine", "an emulated one is no model; this measures models")
    use_threads(config.target.num_threads or available_cores())  # Before torch is imported.
    _progress("finding the models")
    return resolve_models(config)


def _engine(config: TargetConfig | DraftConfig, role: Literal["target", "draft"]) -> Engine:
    """Loads a model. Raises `ConfigError`."""
    _progress(f"loading the {role}")
    return build_engine(config, role, config.num_threads or available_cores())


async def _speedup(
    options: speedup.SpeedupOptions, arguments: argparse.Namespace
) -> list[SpeedupReport]:
    """A report for each concurrency. A deployment that the command starts is for one of them: the
    next one's prompts are the same, and answered ones are not measured as new ones are."""
    reports = []
    for level in options.levels():
        async with _subject(arguments, options.raw, _reference) as subject:
            reports.append(await speedup.run(level, subject, _progress))
    return reports


async def _peers(options: peers.PeersOptions, arguments: argparse.Namespace) -> PeersReport:
    async with _subject(arguments, options.raw, _drafting_reference) as subject:
        return await peers.run(options, subject, _progress)


@asynccontextmanager
async def _subject(
    arguments: argparse.Namespace,
    raw: bool,
    reference: Callable[[Connection], ReferenceModel | None],
) -> AsyncIterator[speedup.Subject]:
    """The deployment that is measured: the one that is named, the one that runs, or an own one."""
    from outrider.client import Client

    async with connected(arguments) as connection, Client(connection.address) as client:
        settings = connection.settings
        yield speedup.Subject(
            client=speedup.ServiceClient(client, raw=raw),
            model=str(settings.get("model", connection.address)),
            draft_model=str(settings.get("draft_model", "its own")),
            dtype=_dtype(connection),
            num_draft_tokens=int(
                settings.get("num_draft_tokens") or CoordinatorConfig().num_draft_tokens
            ),
            reference=reference(connection),
            keeps_answers=_keeps_answers(connection),
            is_fresh=connection.is_own,
        )


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


def _reference(connection: Connection) -> ReferenceModel | None:
    """The target once more, without services; None where its files are not here."""
    if not connection.target_directory:
        return None
    from benchmarks.references import ReferenceModel

    settings = connection.settings
    return ReferenceModel(
        directory=connection.target_directory,
        dtype=str(settings["dtype"]),
        device=str(settings["device"]),
        num_threads=int(settings["target_num_threads"] or available_cores()),
        trust_remote_code=bool(settings["trust_remote_code"]),
    )


def _drafting_reference(connection: Connection) -> ReferenceModel | None:
    """The target and, where a model drafts, that model once more, on as many threads as the
    services have in all: theirs take turns."""
    target = _reference(connection)
    if target is None:
        return None
    from benchmarks.references import ReferenceDrafter
    from outrider.engine.sources import resolve_model

    settings = connection.settings
    num_threads = max(target.num_threads, int(settings["draft_num_threads"] or 0))
    model = parse_drafter(str(settings["draft_model"])).model
    if model is None or model.name is None:
        return replace(target, num_threads=num_threads)
    directory = resolve_model(model.name, trust_remote_code=target.trust_remote_code)
    drafter = ReferenceDrafter(
        directory=str(directory), name=model.name, dtype=str(settings["draft_dtype"])
    )
    return replace(target, num_threads=num_threads, drafter=drafter)
