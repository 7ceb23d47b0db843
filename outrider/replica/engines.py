"""Makes the engine and the head of a replica from its configuration."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from outrider.config.deployment import AUTO_ENGINE, VLLM, DraftConfig, ReplicaConfig, TargetConfig
from outrider.drafters.names import MTP
from outrider.errors import ConfigError, SettingError
from outrider.foundation.settings import blaming, with_setting_keys
from outrider.limits import BATCHED_TOKENS_DEFAULT, BATCHED_TOKENS_VLLM

if TYPE_CHECKING:
    import torch

    from outrider.engine.cpu.decoders import CpuKernels
    from outrider.engine.paged_engine import PagedEngine
    from outrider.engine.paged_sequences import PagedSequences
    from outrider.interfaces.engine import Engine, ModelInfo
    from outrider.interfaces.step_costs import StepCosts
    from outrider.models.draft_head import LoadedDraftHead
    from outrider.models.drafter_check import DraftCheck
    from outrider.models.eagle3 import LoadedEagle3
    from outrider.models.loading import LoadOptions
    from outrider.models.sharding import Ranks
from outrider.replica.vllm_release import check_vllm


def build_engine(config: ReplicaConfig, num_threads: int, ranks: Ranks | None = None) -> Engine:
    """Builds the engine, and loads the model or one rank's share. Blocks. Raises `ConfigError`."""
    # Imports of numeric libraries must follow `use_threads`.
    if config.emulated is not None:
        from outrider.config.emulated_spec import EmulatedSpec
        from outrider.engine.emulated import EmulatedEngine

        return EmulatedEngine(EmulatedSpec.parse(config.emulated), config.role, config.max_num_seqs)
    if runs_on_vllm(config):
        try:
            return _build_vllm(config, num_threads, ranks)
        except ConfigError as error:
            # If only some ranks used another engine, the ranks could not work together.
            if config.model_engine == VLLM or ranks is not None:
                raise
            logging.getLogger(__name__).warning("using transformers instead of vLLM: %s", error)
    return _build_paged(config, num_threads, ranks)


def _build_paged(config: ReplicaConfig, num_threads: int, ranks: Ranks | None) -> Engine:
    import torch

    from outrider.engine.cuda.table_steps import find_backend
    from outrider.engine.paged_engine import PagedEngine
    from outrider.kernels.cpu import PaceKernels
    from outrider.kernels.openvino import OpenVino
    from outrider.models.loading import quantization_of, refusing
    from outrider.models.module_replacement import speed_up
    from outrider.models.sharding import least

    module, info = _load(config, num_threads, ranks)
    weight = next(module.parameters())
    device = weight.device
    kernels, why = _kernels(config, device, weight.dtype, ranks)
    if config.quantization != "none":
        info = _rounded(config, module, info, kernels, why)
    backend = None if config.deterministic else find_backend(device, weight.dtype)
    layer = _layer_of_target(config, module, info, ranks)
    shows_features = isinstance(config, TargetConfig) and config.shows_features
    if isinstance(config, TargetConfig) and shows_features:
        info = replace(info, features=_features_of(info, Path(config.head_directory)))
    fused = kernels if isinstance(kernels, PaceKernels) else None
    on_openvino = isinstance(kernels, OpenVino)
    speed_up(module, kernels=fused, packs_linears=not on_openvino)
    if layer is not None:
        speed_up(layer.module, kernels=fused)
    if ranks is not None:
        ranks.wait_for_all()
    has_cores = config.role == "target" and device.type == "cpu" and ranks is None
    # A target uses fewer threads for short steps, and for small ones while others use the cores.
    is_set = config.num_threads > 0 or config.deterministic
    spares = has_cores and not is_set
    quantization = quantization_of(module.config)
    trying = refusing(f"model {config.model}:", quantization) if quantization else nullcontext()
    with with_setting_keys(type(config)), trying:
        engine = PagedEngine(
            module,
            info,
            max_num_seqs=config.max_num_seqs,
            kv_cache_memory_bytes=_kv_cache_bytes(config, device),
            contended_threads=num_threads - 1 if spares and num_threads > 1 else None,
            own_cores=has_cores,
            deterministic=config.deterministic,
            backend=backend,
            least=int if ranks is None else partial(least, ranks, device=device),
            drafts_apart=shows_features,
            kernels=kernels,
            draft_layer=layer,
        )
        if on_openvino and engine.kernels_name and layer is None:
            # Torch's threads would take cores from OpenVINO's, which run the steps.
            torch.set_num_threads(1)
        if device.type == "cpu":
            engine.info = replace(engine.info, kernels=_kernels_note(engine, why))
        return _tried(engine, config)


def _rounded(
    config: ReplicaConfig,
    module: torch.nn.Module,
    info: ModelInfo,
    kernels: CpuKernels | None,
    why: str,
) -> ModelInfo:
    """Rounds the model's weights. Returns the description of the rounded model."""
    from outrider.kernels.openvino import OpenVino
    from outrider.models.few_bits import round_weights
    from outrider.models.loading import quantization_of

    with with_setting_keys(type(config)):
        if not isinstance(kernels, OpenVino):
            raise SettingError("quantization", f"{config.quantization} needs OpenVINO; {why}")
        if found := quantization_of(module.config):
            raise SettingError(
                "quantization",
                f"{config.quantization} is wrong; the files of {config.model} are quantised "
                f"already ({found})",
            )
    round_weights(module, int(config.quantization.removeprefix("int")))
    return replace(info, dtype=config.quantization)


def may_run_on_openvino(config: ReplicaConfig) -> bool:
    """Whether OpenVINO may run the steps, as far as is known before the model is loaded."""
    from outrider.kernels import processor
    from outrider.kernels.cpu import KernelsUnavailable
    from outrider.kernels.openvino import load_openvino

    is_float32 = config.dtype == "float32" or config.quantization != "none"
    is_chosen = config.cpu_kernels == "openvino" or (
        config.cpu_kernels == "auto" and (is_float32 or not processor.has_bfloat16())
    )
    if config.emulated is not None or runs_on_vllm(config) or not is_chosen:
        return False
    try:
        load_openvino()
    except KernelsUnavailable:
        return False
    return True


def _kernels_note(engine: PagedEngine, why: str) -> str:
    """Says on which kernels an engine's steps run, and if on torch's, why."""
    reason = engine.kernels_note or why
    return engine.kernels_name or (f"torch ({reason})" if reason else "torch")


def _kv_cache_bytes(config: ReplicaConfig, device: torch.device) -> int:
    from outrider.kv_cache.storage import memory_budget

    return config.kv_cache_memory_bytes or memory_budget(
        device, config.gpu_memory_utilization, config.num_gpus
    )


def _tried(engine: PagedSequences, config: ReplicaConfig) -> Engine:
    """Raises `SettingError` if the engine's memory is too small for the set length. Tests whether
    the rows of a target's step depend on each other. If a draft's do, its q is still the one from
    which it draws."""
    from outrider.interfaces.messages import coupling_note
    from outrider.models.compatibility import row_coupling

    if engine.info.max_model_len < config.max_model_len:
        raise SettingError(
            "max_model_len",
            f"{config.max_model_len} tokens do not fit into the memory for keys and values, "
            f"which holds {engine.info.max_model_len}",
        )
    tried = cast("Engine", engine)
    if config.role == "target":
        engine.info = replace(engine.info, row_coupling=row_coupling(tried))
        if note := coupling_note(engine.info.row_coupling):
            logging.getLogger(__name__).warning("model %s: %s", config.model, note)
    return tried


def _build_vllm(config: ReplicaConfig, num_threads: int, ranks: Ranks | None) -> Engine:
    from outrider.models.loading import resolve_device

    # vLLM reads these variables when it is imported. The log lines of vLLM go to our handler.
    os.environ |= {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_NO_USAGE_STATS": "1"}
    is_cuda = resolve_device(config.device).type == "cuda"
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(config.deterministic and is_cuda))
    with with_setting_keys(type(config)):
        check_vllm(config)
    layer, layer_check = None, None
    if isinstance(config, TargetConfig) and config.head_kind:
        layer, layer_check = _draft_layer(config, None, ranks), _draft_check(config)
        if ranks is not None:
            ranks.wait_for_all()
    with with_setting_keys(type(config)):
        from outrider.engine.vllm_engine import VllmEngine

        engine = VllmEngine(
            Path(config.directory),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=batched_tokens(config),
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            gpu_memory_utilization=config.gpu_memory_utilization,
            num_gpus=config.num_gpus,
            ranks=ranks,
            deterministic=config.deterministic,
            enforce_eager=config.enforce_eager,
            draft_layer=layer,
            draft_check=layer_check,
            draft_reads_output=isinstance(config, TargetConfig) and config.head_kind == MTP,
            **load_options(config, num_threads),
        )
        return _tried(engine, config)


def runs_on_vllm(config: ReplicaConfig) -> bool:
    if config.model_engine != AUTO_ENGINE:
        return config.model_engine == VLLM
    try:
        check_vllm(config)
    except SettingError:
        return False
    import torch

    return config.device != "cpu" and torch.cuda.is_available()


def batched_tokens(config: ReplicaConfig) -> int:
    """Returns the largest number of tokens in a step of the replica."""
    default = BATCHED_TOKENS_VLLM if runs_on_vllm(config) else BATCHED_TOKENS_DEFAULT
    return config.max_num_batched_tokens or default


def _kernels(
    config: ReplicaConfig, device: torch.device, dtype: torch.dtype, ranks: Ranks | None
) -> tuple[CpuKernels | None, str]:
    """Returns the kernels for whole steps; None = torch's operators run the steps. Also returns why
    kernels cannot be used. Raises `SettingError` if the configuration names such kernels."""
    from outrider.kernels import cpu, openvino
    from outrider.kernels.cpu import KernelsUnavailable

    loaders: dict[str, Callable[[], CpuKernels]] = {
        cpu.PACKAGE: cpu.load_pace,
        openvino.PACKAGE: openvino.load_openvino,
    }
    chosen, reasons = config.cpu_kernels, []
    for name, load in loaders.items():
        if chosen not in ("auto", name):
            continue
        try:
            if device.type != "cpu":
                raise KernelsUnavailable("they run on CPUs only")
            if ranks is not None:
                raise KernelsUnavailable("they do not support several ranks")
            kernels = load()
            if dtype != kernels.dtype:
                raise KernelsUnavailable(
                    f"they are for {kernels.dtype}, and the model is in {dtype}"
                )
        except KernelsUnavailable as error:
            if chosen == name:
                raise SettingError("cpu_kernels", f"{name} cannot be used: {error}") from error
            reasons.append(f"{name}: {error}")
            continue
        return kernels, ""
    return None, "; ".join(reasons)


def _load(
    config: ReplicaConfig, num_threads: int, ranks: Ranks | None
) -> tuple[torch.nn.Module, ModelInfo]:
    from outrider.models.loading import load_model
    from outrider.models.sharding import load_shard
    from outrider.models.student import load_student

    path = Path(config.directory)
    options = load_options(config, num_threads)
    if isinstance(config, DraftConfig) and config.target_directory:
        return load_student(path, Path(config.target_directory), target=config.target, **options)
    if ranks is None:
        return load_model(path, **options)
    key = "tensor_parallel_size" if config.role == "target" else "draft_tensor_parallel_size"
    return load_shard(path, ranks, key=key, **options)


def load_options(config: ReplicaConfig, num_threads: int | None = None) -> LoadOptions:
    """Returns how a replica's model is loaded."""
    return {
        "name": config.model,
        "dtype": config.dtype if config.quantization == "none" else "float32",
        "device": config.device,
        "trust_remote_code": config.trust_remote_code,
        "num_threads": num_threads,
        "max_model_len": config.max_model_len or None,
    }


def _layer_of_target(
    config: ReplicaConfig, module: torch.nn.Module, info: ModelInfo, ranks: Ranks | None
) -> LoadedDraftHead | None:
    """Returns the target's checked head, or None if there is no head or this rank is a follower.
    Must be called before `speed_up`, because the check needs the unchanged `module`."""
    if not isinstance(config, TargetConfig) or not config.head_kind:
        return None
    from outrider.models.drafter_check import read_library
    from outrider.models.eagle3 import Eagle3Head

    layer = _draft_layer(config, module, ranks)
    if ranks is not None:
        ranks.wait_for_all()
    layer = _draft_check(config)(layer, partial(read_library, module, ranks), info)
    if layer is not None and config.shows_features and isinstance(layer.module, Eagle3Head):
        layer.module.drop_pairs()
    return layer


def _draft_layer(
    config: TargetConfig, module: torch.nn.Module | None, ranks: Ranks | None
) -> LoadedDraftHead | None:
    """Loads the EAGLE-3 head or MTP layer that runs on a target. Returns None on followers.
    `module` is the target's `transformers` model. If `module` is None or divided among ranks, reads
    embeddings and LM head from the target's files."""
    from outrider.models.eagle3 import load_eagle3
    from outrider.models.mtp import load_mtp
    from outrider.models.student import target_ends

    if ranks is not None and ranks.rank:
        return None
    path, name, reads_output = Path(config.head_directory), config.model, module is None
    with blaming("draft_model"):
        target = module
        if module is None or ranks is not None:
            options = load_options(config)
            target = target_ends(Path(config.directory), drafter=config.head, **options)
        if config.head_kind == MTP:
            return load_mtp(path, target, target_name=name, reads_output=reads_output)
        return load_eagle3(path, target, name=config.head, target_name=name)


def _draft_check(config: TargetConfig) -> DraftCheck:
    from outrider.models.drafter_check import checked_head
    from outrider.models.loading import load_tokenizer

    path = Path(config.directory)
    tokenizer = load_tokenizer(path, trust_remote_code=config.trust_remote_code)
    return partial(checked_head, tokenizer=tokenizer, name=config.head)


def build_head(config: DraftConfig) -> tuple[LoadedEagle3, ModelInfo, int]:
    """Loads the EAGLE-3 head of a draft. Returns the head, its description, and the number of bytes
    for its keys and values. Blocks. Raises `ConfigError`."""
    from outrider.models.eagle3 import load_eagle3
    from outrider.models.loading import describe, empty_model
    from outrider.models.module_replacement import speed_up
    from outrider.models.student import target_ends

    path, target = Path(config.directory), Path(config.target_directory)
    options = load_options(config)
    ends = target_ends(target, drafter=config.model, **(options | {"name": config.target}))
    head = load_eagle3(path, ends, name=config.model, target_name=config.target)
    described = describe(empty_model(target, **options), target, **options)
    features = _features_of(described, path)
    info = replace(
        described, weights_fingerprint=features, logit_token_ids=head.token_ids, features=features
    )
    head.module.drop_fuse()
    speed_up(head.module)
    return head, info, _kv_cache_bytes(config, head.module.embed_tokens.weight.device)


def _features_of(target: ModelInfo, head: Path) -> str:
    from outrider.models.fingerprint import tensors_fingerprint

    return f"{target.weights_fingerprint}/{tensors_fingerprint(head)}"


def try_device_kernels(engine: Engine | None, head: LoadedDraftHead | None) -> None:
    """On a CUDA device, compiles the kernels of verdicts and draws before the first session needs
    them. Kernels that cannot be compiled are not used. `engine` or `head` may be None."""
    import torch

    from outrider.interfaces.engine import SequenceStep
    from outrider.speculation.verification import try_kernels

    if not torch.cuda.is_available():
        return
    if engine is not None:
        [logits] = engine.forward([SequenceStep("trial", (0, 0), 2)])
        engine.release("trial")
        try_kernels(logits, engine.info.logit_token_ids)
    if head is not None:
        weight = next(head.module.parameters())
        try_kernels(torch.randn(2, len(head.token_ids), device=weight.device), head.token_ids)


def step_costs(engine: Engine, config: ReplicaConfig) -> StepCosts:
    """Measures an idle engine's steps. Blocks. Must be called on the thread that runs the steps."""
    from outrider.engine.step_costs import measure_step_costs

    num_tokens = batched_tokens(config)
    costs = measure_step_costs(engine, num_tokens, config.max_num_seqs, time.perf_counter)
    logging.getLogger(__name__).info("step costs: %s", costs)
    return costs
