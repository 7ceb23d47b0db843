"""Loads one rank's share of a model: of each file it reads what the rank holds, nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.engine.interface import ModelInfo
from outrider.engine.tensor_parallel.plan import check_size, plan_of
from outrider.engine.tensor_parallel.sharding import Ranks, Share, Slot, shard
from outrider.errors import ConfigError
from outrider.models.loading import LOADING_ERRORS, describe, resolve_device, set_threads
from outrider.models.meta_models import empty_model
from outrider.models.sources import check_weights
from outrider.models.weight_files import open_weights, stored_names

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
    module = empty_model(path, name, dtype, attn_implementation, trust_remote_code)
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
    module = empty_model(path, name, "float32", "sdpa", trust_remote_code)
    check_size(module, plan_of(module, name, key), size, name, key)


def _fill(module: Any, slots: Mapping[str, Slot], path: Path, name: str) -> None:
    """Gives every slot its values. One read for all names of one tensor."""
    shared: dict[int, list[str]] = {}
    for key, slot in slots.items():
        shared.setdefault(id(slot.tensor), []).append(key)
    with open_weights(path) as files:
        named = stored_names(module, slots, files)
        for keys in shared.values():
            slot = slots[keys[0]]
            stored = next((named[key] for key in keys if key in named), None)
            if stored is None:
                if slot.tensor.is_meta:
                    raise ConfigError(f"model {name}: its files lack the weights {keys[0]}")
                continue  # a buffer that the model makes itself
            values = _read(files[stored], stored, slot)
            if values is None:
                raise ConfigError(f"model {name}: {stored} does not fit its configuration")
            for key in keys:
                _put(slots[key], values)


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
