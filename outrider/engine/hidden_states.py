"""Remembers what a model's head reads, for whoever drafts from that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class HeadInputs(nn.Module):
    """A head, and what it was called with last."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head
        self.rows: torch.Tensor | None = None
        """[..., D], in the model's dtype; None before the first call."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """What the head makes of rows [..., D]."""
        self.rows = rows
        logits: torch.Tensor = self.head(rows)
        return logits

    @property
    def weight(self) -> torch.Tensor:
        """The head's own [V, D]."""
        weight: Any = self.head.weight
        return weight  # type: ignore[no-any-return]


def watch_head(module: Any) -> HeadInputs:
    """Puts a watch on the head of a causal language model, and returns it."""
    watched = HeadInputs(module.get_output_embeddings()).eval()
    module.set_output_embeddings(watched)
    return watched
