"""Linear layers in bfloat16 for CPUs that multiply no bfloat16 themselves.

There torch takes the rows one by one, each over the whole weight. From some number of rows on it is
quicker to widen the weight to float32, a block at a time that stays in the caches, and to multiply
that. What it brings is measured in docs/performance.md.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from outrider.models.packed_linear import multiplies_bfloat16

_ROWS_MIN: Final = 4
"""Rows from which on the weight is widened."""
_BLOCK_WEIGHTS: Final = 2**20
"""Weights that are widened at once, as far as one output's are fewer."""


class WidenedLinear(nn.Module):
    """`nn.Linear` in bfloat16 for inference: [..., in] -> [..., out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Shares `weight` [out, in], unless its rows are not one after another, and `bias` [out];
        the weight must be one that `must_widen`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not parameters: those are looked up at each use, which costs as much as a small operator.
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [..., in] times the weight's transpose, plus the bias: [..., out]."""
        if rows.numel() < _ROWS_MIN * self.in_features:
            return nn.functional.linear(rows, self.weight, self.bias)
        wide = rows.float()
        blocks = torch.split(self.weight, max(1, _BLOCK_WEIGHTS // self.in_features))
        output = torch.cat([nn.functional.linear(wide, block.float()) for block in blocks], -1)
        return (output if self.bias is None else output + self.bias).to(rows.dtype)

    __call__ = forward

    def extra_repr(self) -> str:
        """What `print` shows between the brackets."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def must_widen(weight: torch.Tensor) -> bool:
    """Whether a weight is in bfloat16 on a CPU that has no products of it."""
    return (
        weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not multiplies_bfloat16()
    )
