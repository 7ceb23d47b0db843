"""Linear layers whose weight is kept in the layout that the CPU's matrix kernels read.

The library's `nn.Linear` keeps rows one after another, and oneDNN rearranges them or strides over
them at each call. A step of a few tokens reads every weight once and is bound by exactly that.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

_PACKED_FOR_ROWS: Final = 16
"""Rows that the layout is chosen for. Those for 5..64 are the same and within 2 % of the best for
1..256 rows; the one for 1 row costs float32 up to twice the time at more."""


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU: [..., in] -> [..., out], of the weight's dtype.

    The first call with a new number of rows takes up to 0.7 ms longer, in which oneDNN prepares
    its kernel; it remembers 1,024 of them a process.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Copies `weight` [out, in] into the layout; it must be one that `can_pack`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not parameters: those are looked up at each use, which costs as much as a small operator.
        operators = torch.ops.mkldnn
        dense = weight.detach().contiguous()
        self._packed: torch.Tensor = operators._reorder_linear_weight(dense, _PACKED_FOR_ROWS)
        self._bias = None if bias is None else bias.detach()
        self._product = operators._linear_pointwise.default

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [..., in] times the weight's transpose, plus the bias: [..., out]."""
        output: torch.Tensor = self._product(rows, self._packed, self._bias, "none", [], "")
        return output

    __call__ = forward

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy of the weight [out, in], bit for bit the one that was packed; for the few
        models that read more of a layer than its result."""
        return self._packed.to_dense()

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias [out], if there is one."""
        return self._bias

    def extra_repr(self) -> str:
        """What `print` shows between the brackets."""
        return f"{self.in_features}, {self.out_features}, bias={self._bias is not None}"


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this machine's oneDNN has a layout for a weight of that device and dtype."""
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.numel() == 0:
        return False
    if weight.dtype == torch.bfloat16:
        return multiplies_bfloat16()
    return weight.dtype == torch.float32 and _has_onednn()


def multiplies_bfloat16() -> bool:
    """Whether this machine's oneDNN has products of bfloat16."""
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
