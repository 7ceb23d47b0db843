"""Heads that draft for the model they sit on, from what its own head reads.

    f_0 = what the model's own head read at the token before the newest one
    f_i = f_{i-1} + D_i (silu(G_i u_i) * (U_i u_i)),    u_i = [norm(f_{i-1}), norm(e_i)]
    logits of the i-th token behind the newest one = H f_i

e_1 is the embedding of the newest token, which f_0 did not see, e_2 that of the first drafted one,
and so on; norm divides by the root mean square. H has the rows of the model's own head for a part
of its vocabulary. Heads that see the tokens between are those of Hydra (arXiv 2402.05109) and of
the MLP speculator (2404.19124); Medusa's (2401.10774) see f_0 alone, so their second token does not
know the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from outrider.models.drafter_checkpoint import LoadedHead, TrainedKind, head_of, load_head

_EPS: Final = 1e-6
"""Under the root of the mean square."""


class DraftHead(nn.Module):
    """One depth's step, of width D and inner width M."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(2 * width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """f_i [..., D] from f_{i-1} and e_i, both [..., D]."""
        width = features.shape[-1:]
        seen = (nn.functional.rms_norm(part, width, eps=_EPS) for part in (features, embeddings))
        gate, up = self.gate_up(torch.cat([*seen], -1)).chunk(2, -1)
        down: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return features + down


class DraftHeads(nn.Module):
    """A head for each depth, with embeddings [V, D] and a head [N, D] that are the model's own."""

    def __init__(
        self, num_heads: int, inner: int, embeddings: nn.Parameter, head: nn.Parameter
    ) -> None:
        """The weights of the heads are without values."""
        super().__init__()
        width = embeddings.shape[1]
        with torch.device("meta"):
            self.heads = nn.ModuleList(DraftHead(width, inner) for _ in range(num_heads))
            self.head = nn.Linear(width, head.shape[0], bias=False)
        self.to(embeddings.dtype)
        self.embeddings = embeddings
        self.head.weight = head

    def advance(self, depth: int, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """f_{depth+1} [R, D] from f_depth [R, D] and the tokens [R] behind it; `depth` from 0."""
        embedded = nn.functional.embedding(token_ids, self.embeddings)
        advanced: torch.Tensor = self.heads[depth](features, embedded)
        return advanced

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[R, N], float32, of f_i [R, D] with i >= 1."""
        logits: torch.Tensor = self.head(features)
        return logits.float()


LoadedHeads = LoadedHead[DraftHeads]


def make_heads(target: Any, num_heads: int, inner: int, token_ids: torch.Tensor) -> DraftHeads:
    """Heads without values on a target's module, with its embeddings and its head's rows for
    `token_ids` [N]."""
    head = head_of(target.get_output_embeddings().weight, token_ids)
    return DraftHeads(num_heads, inner, target.get_input_embeddings().weight, head)


def load_heads(
    path: Path, target: Any, *, name: str, target_directory: Path, target_name: str
) -> LoadedHeads:
    """The heads in `path` on the module of the target in `target_directory`, of its dtype and on
    its device. Raises `ConfigError`, also for a target that they were not made for."""

    def make(tensors: dict[str, torch.Tensor], inner: int, token_ids: torch.Tensor) -> DraftHeads:
        num_heads = sum(key.endswith(".down.weight") for key in tensors)
        return make_heads(target, num_heads, inner, token_ids)

    return load_head(
        path, TrainedKind.MEDUSA, len(target.get_output_embeddings().weight),
        "heads.0.down.weight", make, name=name, target_directory=target_directory,
        target_name=target_name,
    )  # fmt: skip
