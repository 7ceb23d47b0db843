"""Draft heads made for one target, on disk (`drafter_checkpoint.py`) and beside its module.

Weights are named as in `DraftHeads`; how many heads there are and how wide they are within is told
by their shapes. Embeddings and the head are the target's, and are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from outrider.errors import ConfigError
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
from outrider.models.loading import LOADING_ERRORS
from outrider.models.medusa import DraftHeads
from outrider.models.weight_files import read_weights

_HEADS: Final = "heads."
_DOWN: Final = ".down.weight"


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Draft heads on a target."""

    module: DraftHeads
    token_ids: tuple[int, ...]
    """[N], ascending: of their logits."""


def make_heads(target: Any, num_heads: int, inner: int, token_ids: torch.Tensor) -> DraftHeads:
    """Heads without values on a target's module, with its embeddings and its head's rows for
    `token_ids` [N]."""
    embeddings = target.get_input_embeddings().weight
    rows = target.get_output_embeddings().weight.detach()[token_ids.to(embeddings.device)]
    head = nn.Parameter(rows, requires_grad=False)
    return DraftHeads(num_heads, inner, embeddings, head)


def load_heads(
    path: Path, target: Any, *, name: str, target_directory: Path, target_name: str
) -> LoadedHeads:
    """The heads in `path` on the module of the target in `target_directory`, of its dtype and on
    its device. Raises `ConfigError`, also for a target that they were not made for."""
    description = check_target(path, name, TrainedKind.MEDUSA, target_directory, target_name)
    try:
        tensors = read_weights(path)
        check_vocabulary(description, name, len(target.get_output_embeddings().weight))
        token_ids = checked_token_ids(tensors, description)
        downs = [tensors[key] for key in sorted(tensors) if key.endswith(_DOWN)]
        if not downs or downs[0].dim() != 2:
            raise ConfigError(f"drafter {name}: its files hold no heads")
        heads = make_heads(target, len(downs), downs[0].shape[1], token_ids)
        put_weights(heads, _stored_names(heads), tensors, heads.embeddings, name)
    except LOADING_ERRORS as error:
        raise ConfigError(f"drafter {name}: cannot be loaded: {error}") from error
    return LoadedHeads(heads.requires_grad_(False).eval(), tuple(token_ids.tolist()))


def save_heads(
    directory: Path, heads: DraftHeads, token_ids: torch.Tensor, description: TrainedDescription
) -> None:
    """Writes the description and what is not the target's of heads whose logits are of `token_ids`
    [N]."""
    tensors = stored_weights(heads, _stored_names(heads))
    save_files(directory, {TOKEN_IDS: token_ids.to(torch.int32), **tensors}, description)


def _stored_names(heads: DraftHeads) -> list[str]:
    return [name for name, _ in heads.named_parameters() if name.startswith(_HEADS)]
