"""Linear layers that take their rows in blocks, so that a row's numbers do not depend on how many
others there are.

Where a CPU has matrix tiles, products of many rows go through them and products of few do not: the
two add up in another order. Blocks of few rows all go the same way.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from outrider.models.packed_linear import PackedLinear
from outrider.models.quantized_linear import QuantizedLinear
from outrider.models.widened_linear import WidenedLinear

_BLOCK_ROWS: Final = {nn.Linear: 32, PackedLinear: 32, WidenedLinear: 32, QuantizedLinear: 16}
"""The most rows at which oneDNN was seen to leave the tiles (AMX, bfloat16) alone; 64 use them.
Rounded weights are widened from 32 rows on."""


class BlockedLinear(nn.Module):
    """A linear layer, [..., in] to [..., out], in products of at most a block of rows."""

    def __init__(self, linear: Any, block_rows: int) -> None:
        super().__init__()
        self.linear = linear
        self._block_rows = block_rows

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Of each row."""
        flat = rows.reshape(-1, rows.shape[-1])
        if len(flat) <= self._block_rows:
            output: torch.Tensor = self.linear(rows)
            return output
        blocks = [self.linear(block) for block in torch.split(flat, self._block_rows)]
        return torch.cat(blocks).view(*rows.shape[:-1], -1)

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own [out, in], for the few models that read more of it than its result."""
        weight: torch.Tensor = self.linear.weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own [out], if there is one."""
        bias: torch.Tensor | None = self.linear.bias
        return bias


def block_rows(module: nn.Module) -> None:
    """Every linear layer of a model takes its rows in blocks from now on."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            for kind, num_rows in _BLOCK_ROWS.items():
                if isinstance(child, kind):
                    setattr(parent, name, BlockedLinear(child, num_rows))
