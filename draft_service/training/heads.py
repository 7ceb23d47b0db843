"""Heads on the target, as they learn: `medusa.py` says what they are.

A chain begins behind every learned token but a document's last one: the newest token is that one,
f_0 what the target's head read to say it, and draft token i stands i places further on. Its logits
are scored against what the target says of that place. So the tokens that a head is given are those
of the text, as they are where a draft has been accepted so far.
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
from outrider.models.medusa import DraftHeads
from outrider.models.medusa_checkpoint import make_heads, save_heads
from outrider.speculation.text_acceptance import acceptance_of_windows

from .learner import Depth, Start
from .learning import Batch
from .new_weights import fill_linears

_INNER_WIDTHS: Final = 2
"""The inner width of a new head, in widths of the target."""


class Heads:
    """A `Learner` whose step drafts one token with each head."""

    def __init__(self, module: DraftHeads) -> None:
        """The heads learn; embeddings and head are the target's."""
        module.requires_grad_(False)
        module.heads.requires_grad_(True)
        self.module = module
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        self.head: torch.Tensor = module.head.weight
        self.shape = f"{len(module.heads)} heads"

    def draft(self, batch: Batch) -> list[Depth]:
        """Draft token 1, 2, .. of the chains that the documents are long enough for; those of row r
        begin with its features and are scored against row r + 1, r + 2, .."""
        if batch.features is None:
            raise InvariantError("heads learn from what the target's head reads")
        following = batch.token_ids.reshape(-1)[batch.rows + 1]
        features = batch.features.to(self.head.dtype)
        rows = torch.arange(len(features), device=features.device)
        found = []
        for depth in range(len(self.module.heads)):
            goes_on = batch.behind[rows] > 0
            features, rows = features[goes_on], rows[goes_on]
            if not len(rows):
                break
            features = self.module.advance(depth, features, following[rows])
            rows = rows + 1
            found.append(Depth(features, rows))
        return found

    def by_position(
        self, texts: Sequence[Sequence[npt.NDArray[np.float64]]]
    ) -> tuple[float | None, ...]:
        """As `Learner`."""
        return acceptance_of_windows(texts, len(self.module.heads))

    def save(
        self, directory: Path, token_ids: torch.Tensor, description: TrainedDescription
    ) -> None:
        """As `Learner`."""
        save_heads(directory, self.module, token_ids, description)


def make_new_heads(
    target: Any, num_heads: int, token_ids: npt.NDArray[np.int64], seed: int
) -> Start:
    """Heads on the target's module that change next to nothing yet, for `token_ids` [N] of its
    head. Their weights depend on the seed and on their shapes alone."""
    width = target.get_input_embeddings().weight.shape[1]
    module = make_heads(target, num_heads, _INNER_WIDTHS * width, torch.from_numpy(token_ids))
    fill_linears(module.heads, seed, ("down",), module.embeddings)
    began = "heads that pass on what the target's own head reads"
    key = f"{num_heads}, {len(token_ids)}"
    return Start(Heads(module), token_ids, began, key, is_trained=False)
