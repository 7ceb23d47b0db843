"""A head that reads features, as it learns: `eagle.py` says what it is.

As with heads on the target a chain begins behind every learned token but a document's last one, and
the tokens along it are those of the text; the features along it are the head's own guesses, as they
are where it drafts. The first pair of a document is that of its first learned token: what stands
before, nobody has features of when an answer begins.
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
from outrider.models.eagle import EagleHead
from outrider.models.eagle_checkpoint import make_eagle, save_eagle
from outrider.speculation.text_acceptance import acceptance_of_windows

from .learner import Depth, Start
from .learning import Batch
from .new_weights import fill_linears

NUM_DEPTHS: Final = 3
"""Tokens of the chains that it learns from, and is measured with."""
_INNER_WIDTHS: Final = 2
"""The inner width of a new layer, in widths of the target."""


class Eagle:
    """A `Learner` whose step drafts `NUM_DEPTHS` tokens."""

    def __init__(self, module: EagleHead) -> None:
        """The layer learns; embeddings and head are the target's."""
        module.requires_grad_(False)
        module.layer.requires_grad_(True)
        self.module = module
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        self.head: torch.Tensor = module.head.weight
        self.shape = "a layer over features"

    def draft(self, batch: Batch) -> list[Depth]:
        """Draft token 1, 2, .. of the chains that the documents are long enough for; those of row r
        begin with its pair and are scored against row r + 1, r + 2, .."""
        if batch.features is None:
            raise InvariantError("a head learns from what the target's head reads")
        behind = batch.behind
        documents = (nn.functional.pad(behind, (1, 0))[:-1] == 0).cumsum(0) - 1
        firsts = (documents.diff(prepend=documents.new_tensor([-1])) > 0).nonzero()[:, 0]
        places = torch.arange(len(behind), device=behind.device) - firsts[documents]
        longest = int(places.max()) + 1
        shape = (len(firsts), longest)
        features = batch.features.new_zeros(
            (*shape, batch.features.shape[1]), dtype=self.head.dtype
        )
        features[documents, places] = batch.features.to(self.head.dtype)
        tokens = batch.token_ids.new_zeros((shape[0], longest + NUM_DEPTHS - 1))
        tokens[documents, places] = batch.token_ids.reshape(-1)[batch.rows + 1]
        found = []
        for depth, guessed in enumerate(self.module.unroll(features, tokens, NUM_DEPTHS)):
            [rows] = (behind > depth).nonzero(as_tuple=True)
            if not len(rows):
                break
            found.append(Depth(guessed[documents[rows], places[rows]], rows + depth + 1))
        return found

    def by_position(
        self, texts: Sequence[Sequence[npt.NDArray[np.float64]]]
    ) -> tuple[float | None, ...]:
        """As `Learner`."""
        return acceptance_of_windows(texts, NUM_DEPTHS)

    def save(
        self, directory: Path, token_ids: torch.Tensor, description: TrainedDescription
    ) -> None:
        """As `Learner`."""
        save_eagle(directory, self.module, token_ids, description)


def make_new_eagle(target: Any, token_ids: npt.NDArray[np.int64], seed: int) -> Start:
    """A head on the target's weights that changes next to nothing yet, for `token_ids` [N] of the
    target's head. Its weights depend on the seed and on their shapes alone."""
    embeddings = target.get_input_embeddings().weight
    module = make_eagle(
        embeddings,
        target.get_output_embeddings().weight,
        _INNER_WIDTHS * embeddings.shape[1],
        torch.from_numpy(token_ids),
    )
    fill_linears(module.layer, seed, ("join", "out", "down"), embeddings)
    began = "a layer that passes on what the target's own head reads"
    return Start(Eagle(module), token_ids, began, str(len(token_ids)), is_trained=False)
