"""What is trained, of either kind: what training, measuring and saving know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.models.drafter_checkpoint import TrainedDescription

from .learning import Batch


@dataclass(frozen=True, slots=True)
class Depth:
    """Draft token i of C chains, which go along the texts of a batch."""

    hidden: torch.Tensor
    """[C, D]: what the head reads of it."""
    rows: torch.Tensor
    """[C], ascending: the rows of the batch whose answers are about its place."""


class Learner(Protocol):
    """A drafter that learns: what is trained of it, and what it drafts."""

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Those that are trained, by name."""

    @property
    def head(self) -> torch.Tensor:
        """[N, D], which stays as it is."""

    @property
    def shape(self) -> str:
        """For people: what the weights are parts of, and how many."""

    def draft(self, batch: Batch) -> list[Depth]:
        """Draft token 1, 2, .. that a step of it finds in each text, given the tokens before it;
        with a gradient where one is wanted."""

    def by_position(
        self, texts: Sequence[Sequence[npt.NDArray[np.float64]]]
    ) -> tuple[float | None, ...]:
        """The chance of draft token 1, 2, .. given that those before it were accepted, from
        min(1, q(x) / p(x)) of each `Depth` along every text."""

    def save(
        self, directory: Path, token_ids: torch.Tensor, description: TrainedDescription
    ) -> None:
        """Writes its files, but for the card; its logits are of `token_ids` [N]."""


@dataclass(frozen=True, slots=True)
class Start:
    """A learner before it learns."""

    learner: Learner
    token_ids: npt.NDArray[np.int64]
    """[N], ascending: those of its head."""
    name: str
    """What it begins as; for people."""
    key: str
    """What tells it from every other of the same target and texts."""
    is_trained: bool
    """Whether it has learned before."""
