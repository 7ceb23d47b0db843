"""Draft heads that read the input of the target's output head.

    f_0 = input of the target's output head at the token before the newest one
    f_i = f_{i-1} + D_i (silu(G_i u_i) * (U_i u_i)),    u_i = [norm(f_{i-1}), norm(e_i)]
    logits of the i-th token after the newest one = H f_i

e_1 is the embedding of the newest token, which f_0 did not see, e_2 that of the first drafted one,
and so on; norm divides by the root mean square. H has the rows of the target's head for a part of
its vocabulary. Like the heads of Hydra (arXiv 2402.05109) and of the MLP speculator (2404.19124),
these see the drafted tokens; Medusa's own (2401.10774) see f_0 alone, so the second token does not
depend on the first.
"""

from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from outrider.models.drafter_checkpoint import (
    LoadedHead,
    TargetHead,
    TrainedKind,
    Whose,
    load_head,
)

_EPS = 1e-6
"""Added to the mean square."""


class MedusaHead(nn.Module):
    """The head of one depth, of width D and inner width M."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(2 * width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """f_i [..., D] from f_{i-1} and e_i, both [..., D]."""
        width = features.shape[-1:]
        seen = (nn.functional.rms_norm(part, width, eps=_EPS) for part in (features, embeddings))
        gate, up = self.gate_up(torch.cat([*seen], -1)).chunk(2, -1)
        down: Tensor = self.down(nn.functional.silu(gate) * up)
        return features + down


class DraftHeads(TargetHead):
    """A head for each depth, with the target's embeddings [V, D] and rows of its head [N, D]."""

    def __init__(
        self, embeddings: nn.Parameter, head: nn.Parameter, inner: int, num_heads: int
    ) -> None:
        """The heads' weights have no values yet."""
        super().__init__(head)
        self.embeddings = embeddings
        with torch.device("meta"):
            heads = [MedusaHead(head.shape[1], inner) for _ in range(num_heads)]
        self.heads = nn.ModuleList(heads).to(head.dtype)

    def advance(self, depth: int, features: Tensor, token_ids: Tensor) -> Tensor:
        """f_{depth+1} [R, D] of f_depth [R, D] and the tokens [R] after it; `depth` from 0."""
        embedded = nn.functional.embedding(token_ids, self.embeddings)
        advanced: Tensor = self.heads[depth](features, embedded)
        return advanced


LoadedHeads = LoadedHead[DraftHeads]


def load_heads(path: Path, target: Any, **whose: Unpack[Whose]) -> LoadedHeads:
    """The heads in `path`, with the embeddings and head of a target's module, in their dtype and on
    their device. Raises `ConfigError`, also if they were made for another target."""
    embeddings, rows = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return load_head(path, TrainedKind.MEDUSA, rows, partial(DraftHeads, embeddings), **whose)
