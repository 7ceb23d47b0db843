"""An `EagleHead` made for one target, on disk (`drafter_checkpoint.py`) and beside its target.

Weights are named as in `EagleHead`; the inner width is told by their shapes. Embeddings and the
head are the target's, and are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from outrider.engine.interface import ModelInfo
from outrider.errors import ConfigError, check
from outrider.models.drafter_checkpoint import (
    TOKEN_IDS,
    TrainedDescription,
    TrainedKind,
    check_target,
    check_vocabulary,
    checked_token_ids,
    put_weights,
    save_files,
    stored_weights,
)
from outrider.models.eagle import EagleHead
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.loading import LOADING_ERRORS, describe, resolve_device, set_threads
from outrider.models.meta_models import empty_model
from outrider.models.student_checkpoint import target_weights
from outrider.models.weight_files import read_weights

_LAYER: Final = "layer."
_DOWN: Final = "layer.down.weight"


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """A head that drafts from features."""

    module: EagleHead
    token_ids: tuple[int, ...]
    """[N], ascending: of its logits."""


def make_eagle(
    embeddings: nn.Parameter, rows: torch.Tensor, inner: int, token_ids: torch.Tensor
) -> EagleHead:
    """A head whose layer has no values, with the target's embeddings [V, D] and the rows of the
    target's head [V, D] for `token_ids` [N]."""
    head = nn.Parameter(rows.detach()[token_ids.to(rows.device)], requires_grad=False)
    return EagleHead(inner, embeddings, head)


def load_eagle(
    path: Path,
    target_directory: Path,
    *,
    name: str,
    target: str,
    dtype: str = "auto",
    device: str = "auto",
    num_threads: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[LoadedEagle, ModelInfo]:
    """The head in `path`, with embeddings and head of the target in `target_directory`, and what
    it is. `num_threads` is set for the whole process. Raises `ConfigError`, also for a target that
    it was not made for."""
    where = resolve_device(device)
    set_threads(num_threads)
    empty = empty_model(target_directory, target, dtype, "sdpa", trust_remote_code)
    check(empty.get_output_embeddings().bias is None, "drafters are made for heads without a bias")
    info = describe(
        empty, target_directory, name, max_model_len=None, trust_remote_code=trust_remote_code
    )
    try:
        embeddings, rows = (
            values.to(empty.dtype) for values in target_weights(empty, target_directory, name)
        )
        loaded = load_eagle_on(
            path, embeddings.to(where), rows.to(where),
            name=name, target_directory=target_directory, target_name=target,
        )  # fmt: skip
        fingerprint = tensors_fingerprint(path)
    except LOADING_ERRORS as error:
        raise ConfigError(f"drafter {name}: cannot be loaded: {error}") from error
    info = replace(info, weights_fingerprint=fingerprint, logit_token_ids=loaded.token_ids)
    return loaded, info


def load_eagle_on(
    path: Path,
    embeddings: torch.Tensor,
    rows: torch.Tensor,
    *,
    name: str,
    target_directory: Path,
    target_name: str,
) -> LoadedEagle:
    """The head in `path` with these embeddings and head rows [V, D] of the target in
    `target_directory`, of their dtype and on their device. Raises `ConfigError`, also for a target
    that it was not made for."""
    description = check_target(path, name, TrainedKind.EAGLE, target_directory, target_name)
    try:
        check_vocabulary(description, name, len(rows))
        tensors = read_weights(path)
        token_ids = checked_token_ids(tensors, description)
        if _DOWN not in tensors or tensors[_DOWN].dim() != 2:
            raise ConfigError(f"drafter {name}: its files lack the weights {_DOWN}")
        fixed = nn.Parameter(embeddings, requires_grad=False)
        module = make_eagle(fixed, rows, tensors[_DOWN].shape[1], token_ids)
        put_weights(module, _stored_names(module), tensors, embeddings, name)
    except LOADING_ERRORS as error:
        raise ConfigError(f"drafter {name}: cannot be loaded: {error}") from error
    return LoadedEagle(module.requires_grad_(False).eval(), tuple(token_ids.tolist()))


def save_eagle(
    directory: Path, module: EagleHead, token_ids: torch.Tensor, description: TrainedDescription
) -> None:
    """Writes the description and what is not the target's of a head whose logits are of `token_ids`
    [N]."""
    tensors = stored_weights(module, _stored_names(module))
    save_files(directory, {TOKEN_IDS: token_ids.to(torch.int32), **tensors}, description)


def _stored_names(module: EagleHead) -> list[str]:
    return [name for name, _ in module.named_parameters() if name.startswith(_LAYER)]
