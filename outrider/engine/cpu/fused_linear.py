"""Linear layers on the packed products of a kernel library."""

from __future__ import annotations

import torch
from torch import nn

from outrider.engine.cpu.kernels import Kernels


class FusedLinear(nn.Module):
    """`nn.Linear` for inference: [..., in] -> [..., out], in the dtype of the kernels."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Copies `weight` [out, in] into the layout of the kernels, which must be able to pack one
        of its shape."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kernels = kernels
        # Not parameters: those are looked up at each use, which costs as much as a small operator.
        self.packed = kernels.pack(weight.detach().contiguous())
        """See `Kernels.pack`."""
        self.bias = None if bias is None else bias.detach().contiguous()
        """[out], if there is one."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [..., in] times the weight's transpose, plus the bias: [..., out]."""
        if not rows.numel():  # kernels take no empty matrices
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        flat = rows.reshape(1, -1, self.in_features).contiguous()
        output = self.kernels.linear(flat, self.packed, self.bias)
        return output.view(*rows.shape[:-1], self.out_features)

    __call__ = forward

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy of the weight [out, in], bit for bit the one that was packed."""
        return self.kernels.unpack(self.packed)

    def extra_repr(self) -> str:
        """What `print` shows between the brackets."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def can_fuse(kernels: Kernels, weight: torch.Tensor) -> bool:
    """Whether a weight [out, in] is of a dtype and shape that the kernels have a product for."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == kernels.dtype
        and kernels.can_pack(*weight.shape)
    )
