"""Loads one rank's share of a model: of each file it reads what the rank holds, nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from outrider.engine.interface import ModelInfo
from outrider.engine.loading import DTYPES, LOADING_ERRORS, describe, resolve_device, set_threads
from outrider.engine.parallel.plan import check_size, plan_of
from outrider.engine.parallel.sharding import Ranks, Share, Slot, shard
from outrider.engine.sources import check_weights
from outrider.errors import ConfigError

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"

_log = logging.getLogger(__name__)


def load_shard(
    path: Path,
    ranks: Ranks,
    *,
    key: str,
    name: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    num_threads: int | None = None,
    attn_implementation: str = "sdpa",
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, ModelInfo]:
    """This rank's share of the model in `path`, in evaluation mode on its device, and what the
    whole model is; otherwise as `load_model`. `key` is the setting that the number of ranks comes
    from. Raises `ConfigError`."""
    name = name or str(path)
    check_weights(path, name)
    where = resolve_device(device)
    set_threads(num_threads)
    module = _empty_model(path, name, dtype, attn_implementation, trust_remote_code)
    plan = plan_of(module, name, key)
    check_size(module, plan, ranks.size, name, key)
    info = describe(
        module, path, name, max_model_len=max_model_len, trust_remote_code=trust_remote_code
    )
    _log.info("loading share %d of %d of %s on %s", ranks.rank + 1, ranks.size, name, where)
    slots = shard(module, plan, ranks)
    try:
        _fill(module, slots, path, name)
    except LOADING_ERRORS as error:
        raise ConfigError(f"model {name}: cannot be loaded: {error}") from error
    return module.requires_grad_(False).to(where).eval(), info


def check_shares(
    path: Path, size: int, *, key: str, name: str, trust_remote_code: bool = False
) -> None:
    """Raises `ConfigError` about the setting `key` unless `size` ranks can share out the model in
    `path`. Reads its configuration alone."""
    module = _empty_model(path, name, "float32", "sdpa", trust_remote_code)
    check_size(module, plan_of(module, name, key), size, name, key)


def _empty_model(
    path: Path, name: str, dtype: str, attn_implementation: str, trust_remote_code: bool
) -> Any:
    """A model whose parameters have no values yet, while its other tensors (rotations, scales),
    which are in no file, have."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with _parameters_on_meta():
            module = AutoModelForCausalLM.from_config(
                config,
                dtype=_resolve_stored_dtype(config, dtype, path),
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
        if (path / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(str(path))
    except LOADING_ERRORS as error:
        raise ConfigError(f"model {name}: cannot be loaded: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"model {name}: its weights are quantised; several ranks cannot share it")
    return module


def _resolve_stored_dtype(config: Any, dtype: str, path: Path) -> torch.dtype:
    """`auto` is what the configuration states, else what the first stored tensor has."""
    if dtype != "auto":
        return DTYPES[dtype]
    stated = getattr(config.get_text_config(), "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    with _open(path) as files:
        first = next(iter(files))
        found: torch.dtype = files[first].get_tensor(first).dtype
        return found


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within, every new parameter loses its values as soon as a module registers it, so that the
    memory it was given has never been written to."""

    def emptied(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    # Its annotation says that a hook returns nothing; its documentation, what it may return.
    hook = nn.modules.module.register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _fill(module: Any, slots: Mapping[str, Slot], path: Path, name: str) -> None:
    """Gives every slot its values. One read for all names of one tensor."""
    shared: dict[int, list[str]] = {}
    for key, slot in slots.items():
        shared.setdefault(id(slot.tensor), []).append(key)
    with _open(path) as files:
        stored_names = _stored_names(module, slots, files)
        for keys in shared.values():
            slot = slots[keys[0]]
            stored = next((stored_names[key] for key in keys if key in stored_names), None)
            if stored is None:
                if slot.tensor.is_meta:
                    raise ConfigError(f"model {name}: its files lack the weights {keys[0]}")
                continue  # a buffer that the model makes itself
            values = _read(files[stored], stored, slot)
            if values is None:
                raise ConfigError(f"model {name}: {stored} does not fit its configuration")
            for key in keys:
                _put(slots[key], values)


def _stored_names(module: Any, slots: Mapping[str, Slot], stored: Iterable[str]) -> dict[str, str]:
    """The stored name of each tensor by the one that it has in the model: the library knows how
    they were named in earlier versions."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [
        found for found in get_model_conversion_mapping(module) if isinstance(found, WeightRenaming)
    ]
    prefix = module.base_model_prefix
    return {rename_source_key(name, renamings, [], prefix, slots)[0]: name for name in stored}


def _put(slot: Slot, values: nn.Parameter) -> None:
    is_parameter = isinstance(slot.tensor, nn.Parameter)
    setattr(slot.owner, slot.attribute, values if is_parameter else values.data)


def _read(file: Any, stored: str, slot: Slot) -> nn.Parameter | None:
    """The part of a stored tensor that belongs into a slot, in its dtype; None where the stored
    one has another shape than the model's."""
    share, view = slot.share, file.get_slice(stored)
    expected, shape = [*slot.tensor.shape], view.get_shape()
    if share is not None:
        expected[share.dim] = share.width
    if shape != expected:
        return None
    if share is None:
        values: torch.Tensor = file.get_tensor(stored)
    else:
        index = (slice(None),) * share.dim + (slice(share.start, share.stop),)
        values = _padded(view[index], share)
    return nn.Parameter(values.to(slot.tensor.dtype).contiguous(), requires_grad=False)


def _padded(values: torch.Tensor, share: Share) -> torch.Tensor:
    missing = share.size - values.shape[share.dim]
    if missing == 0:
        return values
    shape = [*values.shape]
    shape[share.dim] = missing
    return torch.cat([values, values.new_zeros(shape)], dim=share.dim)


@contextmanager
def _open(path: Path) -> Iterator[Mapping[str, Any]]:
    """The open file of every stored tensor."""
    from safetensors import safe_open

    with ExitStack() as stack:
        found = {}
        for file in _weight_files(path):
            handle = stack.enter_context(safe_open(str(file), framework="pt"))
            found.update(dict.fromkeys(handle.keys(), handle))
        yield found


def _weight_files(path: Path) -> list[Path]:
    """As the library picks them: some repositories hold the same weights twice."""
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return [path / file for file in sorted(set(index["weight_map"].values()))]
    return sorted(path.glob("*.safetensors"))
