"""An exit head made for one target, on disk (`drafter_checkpoint.py`) and beside its module.

Weights are named as in `ExitHead`; how wide it is within is told by their shapes, and `num_layers`
[1] is how many of the target's layers stand before it. The head is the target's, and not stored.
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
from outrider.models.early_exit import ExitHead
from outrider.models.first_layers import check_exit
from outrider.models.loading import LOADING_ERRORS
from outrider.models.weight_files import read_weights

_NUM_LAYERS: Final = "num_layers"
_DOWN: Final = "down.weight"
_HEAD: Final = "head.weight"


@dataclass(frozen=True, slots=True)
class LoadedExit:
    """An exit head on a target."""

    module: ExitHead
    token_ids: tuple[int, ...]
    """[N], ascending: of its logits."""
    num_layers: int
    """Of the target, that stand before it."""


def make_exit(target: Any, inner: int, token_ids: torch.Tensor) -> ExitHead:
    """An exit head without values, with the rows of the target's head for `token_ids` [N]."""
    weight = target.get_output_embeddings().weight.detach()
    rows = weight[token_ids.to(weight.device)]
    return ExitHead(inner, nn.Parameter(rows, requires_grad=False))


def load_exit(
    path: Path, target: Any, *, name: str, target_directory: Path, target_name: str
) -> LoadedExit:
    """The exit head in `path` on the module of the target in `target_directory`, of its dtype and
    on its device. Raises `ConfigError`, also for a target that it was not made for."""
    description = check_target(path, name, TrainedKind.EARLY_EXIT, target_directory, target_name)
    try:
        tensors = read_weights(path)
        check_vocabulary(description, name, len(target.get_output_embeddings().weight))
        token_ids = checked_token_ids(tensors, description)
        down, layers = tensors.get(_DOWN), tensors.get(_NUM_LAYERS)
        if down is None or down.dim() != 2:
            raise ConfigError(f"drafter {name}: its files hold no exit head")
        if layers is None or [*layers.shape] != [1] or layers.dtype != torch.int32:
            raise ConfigError(f"drafter {name}: {_NUM_LAYERS} is missing, or no whole number")
        num_layers = int(layers)
        try:
            check_exit(target, num_layers)
        except ConfigError as error:
            raise ConfigError(f"drafter {name}: of the target {target_name}: {error}") from error
        module = make_exit(target, down.shape[1], token_ids)
        put_weights(module, _stored_names(module), tensors, module.head.weight, name)
    except LOADING_ERRORS as error:
        raise ConfigError(f"drafter {name}: cannot be loaded: {error}") from error
    return LoadedExit(module.requires_grad_(False).eval(), tuple(token_ids.tolist()), num_layers)


def save_exit(
    directory: Path,
    module: ExitHead,
    num_layers: int,
    token_ids: torch.Tensor,
    description: TrainedDescription,
) -> None:
    """Writes the description and what is not the target's of an exit head behind `num_layers`
    layers, whose logits are of `token_ids` [N]."""
    tensors = {
        TOKEN_IDS: token_ids.to(torch.int32),
        _NUM_LAYERS: torch.tensor([num_layers], dtype=torch.int32),
        **stored_weights(module, _stored_names(module)),
    }
    save_files(directory, tensors, description)


def _stored_names(module: ExitHead) -> list[str]:
    return [name for name, _ in module.named_parameters() if name != _HEAD]
