"""A head that reads features, as it learns: `eagle_head.py` says what it is.

As with heads on the target a chain begins behind every learned token but a document's last one, and
the tokens along it are those of the text; the features along it are the head's own guesses, as they
are where it drafts. The first pair of a document is that of its first learned token: what stands
before, nobody has features of when an answer begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.distillation.learner import Depth, Start
from outrider.distillation.learning import Batch
from outrider.engine.drafter_files import TrainedDescription
from outrider.engine.eagle_head import EagleHead
from outrider.engine.fingerprints import tensors_fingerprint
from outrider.engine.trained_eagle import load_eagle_on, make_eagle, save_eagle
from outrider.errors import InvariantError
from outrider.settings import blaming
from outrider.speculation.acceptance import acceptance_of_windows

NUM_DEPTHS: Final = 3
"""Tokens of the chains that it learns from, and is measured with."""
_INNER_WIDTHS: Final = 2
"""The inner width of a new layer, in widths of the target."""
_LAST_DEVIATION: Final = 1e-3
"""Of the weights that a new layer's changes go through: at first it passes on what it is given."""


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
    generator = torch.Generator().manual_seed(seed)
    for name, linear in module.layer.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        values = torch.empty(linear.weight.shape)
        if name in ("join", "out", "down"):
            values.normal_(std=_LAST_DEVIATION, generator=generator)
        else:  # As the library begins such a layer.
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        linear.weight = nn.Parameter(values.to(embeddings))
    began = "a layer that passes on what the target's own head reads"
    return Start(Eagle(module), token_ids, began, str(len(token_ids)), is_trained=False)


def load_learned_eagle(
    drafter: Path, target: Any, *, name: str, target_directory: Path, target_name: str
) -> Start:
    """A head that was made for this target, both by the names that people know, to learn on.
    Raises `SettingError` for one that was made for another, or that cannot be read."""
    with blaming("start_from"):
        loaded = load_eagle_on(
            drafter,
            target.get_input_embeddings().weight,
            target.get_output_embeddings().weight,
            name=name,
            target_directory=target_directory,
            target_name=target_name,
        )
        key = tensors_fingerprint(drafter)
    ids = np.array(loaded.token_ids, dtype=np.int64)
    return Start(Eagle(loaded.module), ids, f"the drafter `{name}`", key, is_trained=True)
