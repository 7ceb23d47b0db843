"""`outrider bench`: measurements of models and engines, without a deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks import acceptance, device, engine, hits, overhead
from deploy.fleet.preflight import resolve_models
from outrider.config import DeploymentConfig, DraftConfig, TargetConfig, deployment_settings
from outrider.errors import SettingError
from outrider.replica.process_setup import (
    available_cores,
    build_eagle,
    build_engine,
    build_lookup,
    use_threads,
)

from .command import Arguments, Option, declared, json_option
from .options import deployment_config, setting_options
from .output import progress, show

if TYPE_CHECKING:
    from outrider.engine.interface import Engine
    from outrider.tokenizer import TokenizerText

TARGET_FLAGS: Final = (
    "device", "dtype", "model", "deterministic", "cpu_kernels", "trust_remote_code",
    "target_num_threads",
)  # fmt: skip
"""Settings of a measurement without a deployment."""
DRAFT_FLAGS: Final = (
    "draft_model", "draft_dtype", "draft_support_entries", "ngram_min", "ngram_max", "suffix_depth",
    "suffix_min_score", "suffix_tokens_per_tenant", "suffix_tokens_total",
)  # fmt: skip


def add_measurements(measurement: Any) -> None:
    """One subcommand for each."""
    both = (*TARGET_FLAGS, *DRAFT_FLAGS)
    measurement(
        "core", "what verdicts and draft draws cost, on one thread", _run_core,
        json_option(), *_model_options(TARGET_FLAGS),
    )  # fmt: skip
    measurement(
        "overhead", "what a round costs beside the models", _run_overhead,
        *declared(overhead.add_arguments), *_model_options((*TARGET_FLAGS, "engine")),
    )  # fmt: skip
    measurement(
        "engine",
        "many sessions at once, and a step against the library's, also of a random GPT-NeoX",
        _run_engine, *declared(engine.add_arguments), *_model_options(TARGET_FLAGS),
    )  # fmt: skip
    measurement(
        "device", "steps at batch 1 against the memory's speed", _run_device,
        *declared(device.add_arguments),
    )  # fmt: skip
    measurement(
        "acceptance", "how much of the target's text a draft would have proposed", _run_acceptance,
        *declared(acceptance.add_arguments), *_model_options(both),
    )  # fmt: skip
    measurement(
        "hits", "how often a draft guesses what a round comes to", _run_hits,
        *declared(hits.add_arguments), *_model_options(both),
    )  # fmt: skip


def _model_options(wanted: Collection[str]) -> list[Option]:
    others = [key for key in deployment_settings() if key not in wanted]
    return list(setting_options(others, common=wanted))


def _run_core(arguments: Arguments) -> int:
    config = _model_config(arguments)
    engine = _engine(config.target, "target")
    from benchmarks import core
    from benchmarks.prompts import built_in_prompts
    from outrider.tokenizer import TokenizerText

    text = TokenizerText.load(Path(config.target.directory), config.target.model)
    texts = [text.encode(prompt.text) for prompt in built_in_prompts()]
    report = core.measure(engine, texts, progress)
    if arguments.json:
        print(report.to_json())
    else:
        show(core.render(report))
    return 0


def _run_overhead(arguments: Arguments) -> int:
    options = overhead.OverheadOptions.from_arguments(arguments)
    config = deployment_config(arguments)
    if options.probes:
        config = resolve_models(config)
    report = asyncio.run(overhead.run(options, config.target, progress))
    if arguments.json:
        print(report.to_json())
    else:
        show(overhead.render(report))
    return 0


def _run_engine(arguments: Arguments) -> int:
    options = engine.EngineOptions.from_arguments(arguments)
    config = _model_config(arguments)
    from benchmarks.prompts import built_in_prompts
    from outrider.tokenizer import TokenizerText

    text = TokenizerText.load(Path(config.target.directory), config.target.model)
    token_ids = [token_id for prompt in built_in_prompts() for token_id in text.encode(prompt.text)]
    report = asyncio.run(engine.run(options, config.target, token_ids, progress))
    if arguments.json:
        print(report.to_json())
    else:
        show(engine.render(report))
    return 0


def _run_device(arguments: Arguments) -> int:
    options = device.DeviceOptions.from_arguments(arguments)
    from benchmarks import device_steps

    report = device_steps.run(options, progress)
    if arguments.json:
        print(report.to_json())
    else:
        show(device.render(report))
    return 0


def _run_acceptance(arguments: Arguments) -> int:
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
    from outrider.tokenizer import TokenizerText

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
        draft_model=name, max_model_len=max_model_len, progress=progress,
    )  # fmt: skip
    if arguments.json:
        print(report.to_json())
    else:
        show(acceptance.render(report))
    return 0


def _run_hits(arguments: Arguments) -> int:
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
    from outrider.tokenizer import TokenizerText

    text = TokenizerText.load(Path(config.target.directory), config.target.model)
    report = measure(
        options, target, draft, _encoder(text, options.raw),
        draft_model=config.draft.model, progress=progress,
    )  # fmt: skip
    if arguments.json:
        print(report.to_json())
    else:
        show(hits.render(report))
    return 0


def _encoder(text: TokenizerText, raw: bool) -> Callable[[str], list[int]]:
    """A prompt's token ids, under the chat template unless it is to go in as it is."""

    def encode(prompt: str) -> list[int]:
        return (
            text.encode(prompt) if raw else text.encode_chat([{"role": "user", "content": prompt}])
        )

    return encode


def _model_config(arguments: Arguments) -> DeploymentConfig:
    """The models of a measurement in this process, with their files. Raises `ConfigError`."""
    config = deployment_config(arguments)
    if config.target.emulated is not None:
        raise SettingError("engine", "an emulated one is no model; this measures models")
    use_threads(config.target.num_threads or available_cores())  # Before torch is imported.
    progress("finding the models")
    return resolve_models(config)


def _engine(config: TargetConfig | DraftConfig, role: Literal["target", "draft"]) -> Engine:
    """Loads a model. Raises `ConfigError`."""
    progress(f"loading the {role}")
    return build_engine(config, role, config.num_threads or available_cores())
