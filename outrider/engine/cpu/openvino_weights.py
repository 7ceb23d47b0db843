"""Constants of an OpenVINO graph that hold a model's weights.

A weight whose values times a power of two fit into float16, as most weights in bfloat16 do, or that
was rounded to few bits, is stored so. The runtime widens it while it multiplies, so results are
those of float32, but a step reads less memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.errors import check
from outrider.kernels.openvino import OpenVino
from outrider.models.few_bits import IntegerWeight, integers_of

_STAYS_NARROW = "decompression_0"
"""A mark of OpenVINO's converter. Without it, compilation would widen the constant for good."""
_VALUES_AT_ONCE = 2**20  # so that the working memory is small, and leaves no large gaps


class WeightConstants:
    """Makes constants of weights. A weight can be freed once it has a constant, and restored later,
    so that a model and its graph need not fit into memory together."""

    def __init__(self, kernels: OpenVino, *, narrows: bool) -> None:
        """`narrows`: whether weights may be stored in fewer bits than float32."""
        self._kernels, self._narrows = kernels, narrows
        self._op, self._types = kernels.operators, kernels.module.Type
        self._narrow: dict[nn.Parameter, _Float16 | None] = {}
        self._stored: dict[nn.Parameter, Callable[[], Tensor]] = {}
        """Functions that return the values of weights that have constants."""
        self._freed: list[nn.Parameter] = []
        self.are_narrow = False
        """Whether a matrix is stored in fewer bits than float32."""

    def matrix(self, weight: nn.Parameter) -> tuple[Any, int]:
        """Returns a node with the value weight * 2^n, and n."""
        if self._narrows and self._float16(weight) is None:
            whole = integers_of(weight.detach())
            if whole is not None:
                self._stored[weight], self.are_narrow = whole.product, True
                return self._integers(whole), 0
        self.are_narrow |= self._narrows and self._float16(weight) is not None
        return self.table(weight)

    def table(self, weight: nn.Parameter) -> tuple[Any, int]:
        """Like `matrix`, but never in integers, whose rows cannot be looked up."""
        narrow = self._float16(weight) if self._narrows else None
        if narrow is None:
            wide = self._constant(weight.detach().contiguous())
            self._stored[weight] = lambda: torch.from_numpy(wide.data.copy())
            return wide, 0
        constant, exponent = narrow
        self._stored[weight] = lambda: _widened(torch.from_numpy(constant.data.copy()), exponent)
        widened = self._op.convert(constant, self._types.f32)
        widened.get_rt_info()[_STAYS_NARROW] = ""
        return widened, exponent

    def free(self, weight: nn.Parameter) -> None:
        """Frees the memory of a weight, which must have a constant."""
        check(weight in self._stored, "a weight without a constant cannot be freed")
        self._freed.append(weight)
        weight.data = torch.empty(1, dtype=weight.dtype).expand(weight.shape)

    def restore(self) -> None:
        """Gives all freed weights their values again."""
        for weight in self._freed:
            weight.data = self._stored[weight]()
        self._freed.clear()

    def _float16(self, weight: nn.Parameter) -> "_Float16 | None":
        """The constant of a weight in float16, or None if values would be lost. Several nodes may
        use it."""
        if weight not in self._narrow:
            self._narrow[weight] = None
            for exponent in dict.fromkeys((0, _exponent_of(weight))):
                narrow = _narrowed(weight.detach(), exponent)
                if narrow is not None:
                    self._narrow[weight] = self._constant(narrow), exponent
                    break
        return self._narrow[weight]

    def _integers(self, weight: IntegerWeight) -> Any:
        op, types = self._op, self._types
        values = weight.integers.numpy()
        if weight.bits == 4:
            low, high = values[..., ::2] & 15, values[..., 1::2] & 15
            packed = self._kernels.module.Tensor(
                np.ascontiguousarray(low | high << 4), values.shape, types.i4
            )
            constant = self._kernels.module.op.Constant(packed, False)
        else:
            constant = op.constant(values, types.i8)
        wide = op.multiply(
            op.convert(constant, types.f32), op.constant(weight.scales.numpy(), types.f32)
        )
        return op.reshape(wide, op.constant([0, -1], types.i64), True)

    def _constant(self, values: Tensor) -> Any:
        return self._kernels.module.op.Constant(self._kernels.tensor(values.numpy()), False)


_Float16 = tuple[Any, int]  # a constant and n: weight * 2^n


def _exponent_of(weight: Tensor) -> int:
    """The largest n with which weight * 2^n has no overflow in float16."""
    low, high = torch.aminmax(weight)
    peak = max(float(-low), float(high), 1e-30)
    return int(torch.finfo(torch.float16).max // peak).bit_length() - 1


def _narrowed(weight: Tensor, exponent: int) -> Tensor | None:
    """Returns weight * 2^exponent in float16, or None if values would be lost."""
    narrow = torch.empty(weight.shape, dtype=torch.float16)
    rows = max(1, _VALUES_AT_ONCE // weight.shape[1])
    for part, own in zip(torch.split(weight, rows), torch.split(narrow, rows), strict=True):
        own.copy_(part * 2.0**exponent if exponent else part)
        if not torch.equal(_widened(own, exponent), part):
            return None
    return narrow


def _widened(narrow: Tensor, exponent: int) -> Tensor:
    wide = narrow.float()
    return wide * 2.0**-exponent if exponent else wide
