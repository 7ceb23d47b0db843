"""Linear layers with weights of 8 or 4 bits, by the matrix kernels that the library has for them.

Rows stay as they are, so that only weights are rounded. A step of one row is bound by reading its
weights. On a CPU with avx512_bf16, one thread, over the demo target's layers (its head aside), the
kernels take 0.6 (8 bits) and 0.55 (4 bits) of the time of `PackedLinear` in bfloat16 for one row,
more than it for 5, and up to 2.5 times as long for 16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from outrider.models.module_probes import PROBE_ERRORS, agree, probe_rows

_GROUP: Final = 32
"""Weights of a row that share a scale and an offset at 4 bits."""
_LEVELS: Final = 15
"""Steps between the least and the greatest weight of a group."""
_CENTRE: Final = 8
"""The level that the kernel takes for its offset."""
_INNER_TILES: Final = 2
"""Of the packed layout; the CPU's kernel takes any."""
_WIDE_ROWS: Final = 32
"""Rows from which widening a weight of 8 bits, and a plain product, is the quicker way."""


class QuantizedLinear(nn.Module, ABC):
    """`nn.Linear` for inference with a rounded weight: [..., in] -> [..., out], of the rows' dtype.

    It has no gradient and takes no hooks: to call it is to call its `forward`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [..., in] times the weight's transpose, plus the bias: [..., out]."""
        product = self._product(rows.reshape(-1, self.in_features))
        if self._bias is not None:
            product = product + self._bias
        return product.view(*rows.shape[:-1], self.out_features)

    __call__ = forward

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weight [out, in]."""
        return self._widened()

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias [out], if there is one."""
        return self._bias

    @abstractmethod
    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows [N, in]: [N, out]."""

    @abstractmethod
    def _widened(self) -> torch.Tensor:
        """The rounded weight [out, in]."""


class Int8Linear(QuantizedLinear):
    """Weights of 8 bits, one scale for each row of the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        exact = weight.detach().float()
        scales = (exact.abs().amax(1) / 127).clamp_min(torch.finfo(weight.dtype).tiny)
        self._levels: torch.Tensor = (exact / scales[:, None]).round().to(torch.int8)
        self._scales = scales.to(weight.dtype)
        self._kernel = torch.ops.aten._weight_int8pack_mm.default

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) < _WIDE_ROWS:
            narrow: torch.Tensor = self._kernel(rows, self._levels, self._scales)
            return narrow
        return functional.linear(rows, self._widened())

    def _widened(self) -> torch.Tensor:
        return self._levels.to(self._scales.dtype) * self._scales[:, None]


class Int4Linear(QuantizedLinear):
    """Weights of 4 bits, a scale and an offset for each group of a row. On CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The width of `weight` must be a multiple of the group."""
        super().__init__(weight, bias)
        groups = weight.detach().float().reshape(self.out_features, -1, _GROUP)
        least, greatest = groups.amin(2), groups.amax(2)
        tiny = torch.finfo(weight.dtype).tiny
        scales = ((greatest - least) / _LEVELS).clamp_min(tiny).to(weight.dtype).float()
        levels = ((groups - least[:, :, None]) / scales[:, :, None]).round().clamp(0, _LEVELS)
        offsets = (least + _CENTRE * scales).to(weight.dtype)
        self._packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            levels.flatten(1).to(torch.int32), _INNER_TILES
        )
        # [groups of a row, out, 2]
        table = torch.stack((scales.to(weight.dtype), offsets), -1).transpose(0, 1)
        self._scales_and_offsets = table.contiguous()
        self._kernel = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._kernel(rows, self._packed, _GROUP, self._scales_and_offsets)
        return product

    def _widened(self) -> torch.Tensor:
        identity = torch.eye(self.in_features, dtype=self._scales_and_offsets.dtype)
        return self._product(identity).t()


_KINDS: Final[dict[int, type[QuantizedLinear]]] = {8: Int8Linear, 4: Int4Linear}


def quantized(weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> nn.Module | None:
    """A layer with `weight` [out, in] rounded to 8 or 4 bits; None where this machine has no kernel
    that does what it is to do for a weight of that device, dtype and shape."""
    if not _has_kernel(bits, *weight.shape, weight.dtype, weight.device):
        return None
    return _KINDS[bits](weight, bias)


@cache
def _has_kernel(
    bits: int, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Asked once for each shape, of a random weight: whether a layer's weight is the given one but
    for half a step of rounding, the widest that there is in each row; and few rows and many give
    what that weight gives in twice the width."""
    wide_dtype = torch.float32 if dtype.itemsize < torch.float32.itemsize else torch.float64
    generator = torch.Generator().manual_seed(num_out)
    weight = torch.randn(num_out, num_in, generator=generator).to(device, dtype)
    few = probe_rows(num_in, weight)
    many = few.expand(_WIDE_ROWS // few.shape[1], -1, -1)
    try:
        layer = _KINDS[bits](weight, None)
        rounded, wide = layer.weight.to(wide_dtype), weight.to(wide_dtype)
        half_steps = wide.abs().amax(1, keepdim=True) * (
            1 / (2**bits - 2) + 4 * torch.finfo(dtype).eps
        )
        exact = (few.to(wide_dtype) @ rounded.t()).to(dtype)
        return (
            bool(((rounded - wide).abs() <= half_steps).all())
            and agree(layer(few), exact)
            and agree(layer(many), exact.expand(len(many), -1, -1))
        )
    except PROBE_ERRORS:
        return False
