"""An exit head as it learns: `early_exit.py` says what it is.

At every place of a text that a learned token follows it reads what the target's layer N put out
there, and is scored against what the target says of that token. In a draft it reads the same: the
target's first layers run over the draft tokens as they run over a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.errors import InvariantError
from outrider.models.drafter_checkpoint import TrainedDescription
from outrider.models.early_exit import ExitHead
from outrider.models.early_exit_checkpoint import make_exit, save_exit
from outrider.models.first_layers import check_exit, last_norm, norm_weight
from outrider.settings import blaming
from outrider.speculation.text_acceptance import conditional_acceptance

from .learner import Depth, Start
from .learning import Batch
from .new_weights import fill_linears

_INNER_WIDTHS: Final = 4
"""The inner width of a new head, in widths of the target."""
_FIRST_SCALE: Final = 0.25
"""What the target's norm is multiplied by in a new head: the norm was made for what the last layer
puts out, and is far too sure of what an early one does. (Cross-entropy before any training, behind
layer 6 of the demo target: 15.2 with 1, 8.5 with 0.5, 6.7 with 0.3, 6.5 with 0.2, 7.0 with 0.1.)"""
_LAYERS_FOR_EACH: Final = 5
"""Of the target's layers one in so many stands before an exit that nobody has placed."""


class Exit:
    """A `Learner` that reads what the target's first layers put out."""

    def __init__(self, module: ExitHead, num_layers: int) -> None:
        """All of it learns but the head, which is the target's."""
        module.requires_grad_(True)
        module.head.requires_grad_(False)
        self.module, self.num_layers = module, num_layers
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        self.head: torch.Tensor = module.head.weight
        self.shape = f"a head behind the target's layer {num_layers}"

    def draft(self, batch: Batch) -> list[Depth]:
        """The first draft token of every row; what comes behind it is that of the next row."""
        if batch.features is None:
            raise InvariantError("an exit head learns from what a layer of the target puts out")
        hidden = self.module(batch.features.to(self.head.dtype))
        return [Depth(hidden, torch.arange(len(hidden), device=hidden.device))]

    def by_position(
        self, texts: Sequence[Sequence[npt.NDArray[np.float64]]]
    ) -> tuple[float | None, ...]:
        """As `Learner`."""
        return conditional_acceptance([ratios.tolist() for [ratios] in texts])

    def save(
        self, directory: Path, token_ids: torch.Tensor, description: TrainedDescription
    ) -> None:
        """As `Learner`."""
        save_exit(directory, self.module, self.num_layers, token_ids, description)


def layers_before_exit(target: Any, wanted: int | None) -> int:
    """How many of the target's layers stand before an exit; None = as many as usual. Raises
    `SettingError` where that cannot be."""
    num_layers = target.config.get_text_config().num_hidden_layers
    found = max(1, round(num_layers / _LAYERS_FOR_EACH)) if wanted is None else wanted
    with blaming("layers" if wanted is not None else "kind"):
        check_exit(target, found)
    return found


def make_new_exit(
    target: Any, num_layers: int, token_ids: npt.NDArray[np.int64], seed: int
) -> Start:
    """A head behind so many of the target's layers that does what the target's own norm and head
    would there, but less surely, for `token_ids` [N]. Its weights depend on the seed and on their
    shapes alone."""
    embeddings = target.get_input_embeddings().weight
    width = embeddings.shape[1]
    module = make_exit(target, _INNER_WIDTHS * width, torch.from_numpy(token_ids))
    scale = _FIRST_SCALE * norm_weight(last_norm(target), width)
    module.scale = nn.Parameter(scale.to(embeddings))
    fill_linears(module, seed, ("mix", "down"), embeddings)
    began = "the target's own norm and head there"
    key = f"{num_layers}, {len(token_ids)}"
    return Start(Exit(module, num_layers), token_ids, began, key, is_trained=False)
