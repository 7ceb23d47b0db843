"""Several steps of decoding in one call, for an engine that need not be asked after each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.interface import SequenceStep


@dataclass(frozen=True, slots=True)
class Chain:
    """What one sequence is to run and then to draw."""

    step: SequenceStep
    """A chain, with one row of logits."""
    num_tokens: int
    """To draw, at least one; all but the last are run."""


class Draws(Protocol):
    """Draws the tokens of S chains on the device of their logits, and waits for nothing there."""

    @property
    def key(self) -> Hashable:
        """All that `draw` depends on beside its arguments."""
        ...

    def words(self, num_rows: int) -> npt.NDArray[np.int64]:
        """What `draw` reads of these chains, with `num_rows` - S others that nobody looks at: as
        many words for any S."""
        ...

    def draw(self, logits: torch.Tensor, words: torch.Tensor, depth: int) -> torch.Tensor:
        """Draws token `depth` of every row [S, V]: int64 [S, any], beginning with the token."""
        ...


@runtime_checkable
class ChainEngine(Protocol):
    """An engine that can do so."""

    def draw_chains(self, chains: Sequence[Chain], draws: Draws) -> npt.NDArray[Any] | None:
        """Runs each chain's step, draws its tokens, and runs all but the last: what was drawn,
        [most tokens, chains, any]; of a shorter chain the last ones mean nothing. None where it
        cannot be done at once; then no sequence has changed. Raises what `Engine.forward` does."""
        ...
