"""Heads that read the target's hidden states, as they learn: `medusa.py`, `eagle.py` and
`early_exit.py` say what they are.

kind         a chain begins behind           and reads along it
Medusa       every learned token but the     the text's tokens, and what the target's head read at
             last of a document              the first place
EAGLE        the same                        the text's tokens, and its own guesses of what the
                                             target's head read
early exit   every place, of one token       what the target's layer N put out there

Draft token i of a chain is scored against what the target says of the place i further on. So the
tokens that a head is given are those of the text, as they are where a draft has been accepted.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.errors import InvariantError
from outrider.models.drafter_checkpoint import save_head
from outrider.models.eagle import EagleHead, make_eagle
from outrider.models.early_exit import (
    ExitHead,
    check_exit,
    last_norm,
    make_exit,
    norm_weight,
    save_exit,
)
from outrider.models.medusa import DraftHeads, make_heads
from outrider.settings import blaming

from .dataset import Batch, Depth, Learner, Start, next_tokens

NUM_DEPTHS: Final = 3
"""Tokens of the chains that an EAGLE head learns from, and is measured with."""
_CHAIN_INNER_WIDTHS: Final = 2
_EXIT_INNER_WIDTHS: Final = 4
"""The inner width of a new head, in widths of the target."""
_FIRST_SCALE: Final = 0.25
"""What the target's norm is multiplied by in a new exit head: the norm was made for what the last
layer puts out, and is far too sure of what an early one does. (Cross-entropy before any training,
behind layer 6 of the demo target: 15.2 with 1, 8.5 with 0.5, 6.7 with 0.3, 6.5 with 0.2.)"""
_LAYERS_FOR_EACH: Final = 5
"""Of the target's layers one in so many stands before an exit by default."""
_QUIET_DEVIATION: Final = 1e-3
"""Of the weights that a change goes through: at first a drafter passes on what it is given."""


class Heads(Learner):
    """Medusa heads: a step drafts one token with each."""

    def __init__(self, module: DraftHeads) -> None:
        num_heads = len(module.heads)
        super().__init__(
            module, module.heads, [module.head.weight], f"{num_heads} heads", save_head, num_heads
        )

    def draft(self, batch: Batch) -> list[Depth]:
        """Chains that the documents are long enough for; those of row r begin with its hidden
        states and are scored against row r + 1, r + 2, .."""
        features = _features(batch).to(self.head.dtype)
        following = batch.token_ids.reshape(-1)[batch.rows + 1]
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


class Eagle(Learner):
    """An EAGLE head: a step drafts `NUM_DEPTHS` tokens."""

    def __init__(self, module: EagleHead) -> None:
        super().__init__(
            module,
            module.layer,
            [module.head.weight],
            "a layer over features",
            save_head,
            NUM_DEPTHS,
        )

    def draft(self, batch: Batch) -> list[Depth]:
        """Chains that the documents are long enough for; those of row r begin with its pair and are
        scored against row r + 1, r + 2, .. The first pair of a document is that of its first
        learned token: when an answer begins, there are no hidden states of what stands before."""
        read = _features(batch)
        behind = batch.behind
        documents = (nn.functional.pad(behind, (1, 0))[:-1] == 0).cumsum(0) - 1
        firsts = (documents.diff(prepend=documents.new_tensor([-1])) > 0).nonzero()[:, 0]
        places = torch.arange(len(behind), device=behind.device) - firsts[documents]
        longest = int(places.max()) + 1
        features = read.new_zeros((len(firsts), longest, read.shape[1]), dtype=self.head.dtype)
        features[documents, places] = read.to(self.head.dtype)
        tokens = batch.token_ids.new_zeros((len(firsts), longest + NUM_DEPTHS - 1))
        tokens[documents, places] = batch.token_ids.reshape(-1)[batch.rows + 1]
        found = []
        for depth, guessed in enumerate(self.module.unroll(features, tokens, NUM_DEPTHS)):
            [rows] = (behind > depth).nonzero(as_tuple=True)
            if not len(rows):
                break
            found.append(Depth(guessed[documents[rows], places[rows]], rows + depth + 1))
        return found


class Exit(Learner):
    """An early-exit head: it reads what the target's first layers put out."""

    def __init__(self, module: ExitHead, num_layers: int) -> None:
        def save(directory: Any, module: Any, token_ids: Any, description: Any) -> None:
            save_exit(directory, module, num_layers, token_ids, description)

        shape = f"a head behind the target's layer {num_layers}"
        super().__init__(module, module, [module.head.weight], shape, save)

    def draft(self, batch: Batch) -> list[Depth]:
        return next_tokens(self.module(_features(batch).to(self.head.dtype)))


def make_new_heads(
    target: Any, num_heads: int, token_ids: npt.NDArray[np.int64], seed: int
) -> Start:
    """Heads on the target's module that change next to nothing yet, for `token_ids` [N] of its
    head. The weights of every new head depend on the seed and on their shapes alone."""
    width = target.get_input_embeddings().weight.shape[1]
    inner = _CHAIN_INNER_WIDTHS * width
    module = make_heads(target, num_heads, inner, torch.from_numpy(token_ids))
    _fill_linears(module.heads, seed, ("down",), module.embeddings)
    began = "heads that pass on what the target's own head reads"
    return _start(Heads(module), token_ids, began, f"{num_heads}, {len(token_ids)}")


def make_new_eagle(target: Any, token_ids: npt.NDArray[np.int64], seed: int) -> Start:
    """A head on the target's weights that changes next to nothing yet, for `token_ids` [N]."""
    embeddings = target.get_input_embeddings().weight
    rows = target.get_output_embeddings().weight
    inner = _CHAIN_INNER_WIDTHS * embeddings.shape[1]
    module = make_eagle(embeddings, rows, inner, torch.from_numpy(token_ids))
    _fill_linears(module.layer, seed, ("join", "out", "down"), embeddings)
    began = "a layer that passes on what the target's own head reads"
    return _start(Eagle(module), token_ids, began, str(len(token_ids)))


def make_new_exit(
    target: Any, num_layers: int, token_ids: npt.NDArray[np.int64], seed: int
) -> Start:
    """A head behind so many of the target's layers that does what the target's own norm and head
    would there, but less surely, for `token_ids` [N]."""
    embeddings = target.get_input_embeddings().weight
    width = embeddings.shape[1]
    module = make_exit(target, _EXIT_INNER_WIDTHS * width, torch.from_numpy(token_ids))
    module.scale = nn.Parameter(
        (_FIRST_SCALE * norm_weight(last_norm(target), width)).to(embeddings)
    )
    _fill_linears(module, seed, ("mix", "down"), embeddings)
    began = "the target's own norm and head there"
    return _start(Exit(module, num_layers), token_ids, began, f"{num_layers}, {len(token_ids)}")


_start = partial(Start, is_trained=False)


def layers_before_exit(target: Any, wanted: int | None) -> int:
    """How many of the target's layers stand before an exit; None = as many as usual. Raises
    `SettingError` where that cannot be."""
    num_layers = target.config.get_text_config().num_hidden_layers
    found = max(1, round(num_layers / _LAYERS_FOR_EACH)) if wanted is None else wanted
    with blaming("layers" if wanted is not None else "kind"):
        check_exit(target, found)
    return found


def _features(batch: Batch) -> torch.Tensor:
    if batch.features is None:
        raise InvariantError("a head learns from the target's hidden states")
    return batch.features


def _fill_linears(module: nn.Module, seed: int, quiet: Collection[str], like: torch.Tensor) -> None:
    """Gives linear layers of a module that have no values their first weights, in the form of
    `like`: next to nothing where its own name is in `quiet`, else as the library begins such a
    layer."""
    generator = torch.Generator().manual_seed(seed)
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and linear.weight.is_meta:
            values = torch.empty(linear.weight.shape)
            if name.rpartition(".")[2] in quiet:
                values.normal_(std=_QUIET_DEVIATION, generator=generator)
            else:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
            linear.weight = nn.Parameter(values.to(like))
