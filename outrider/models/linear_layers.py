"""Modules that replace a model's linear layers and activations on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2CLS

from outrider.kernels.cpu import PaceKernels

_PACKED_FOR_ROWS = 16
"""oneDNN chooses the layout of a weight for products with this number of rows. With this layout,
products of 1 to 256 rows take at most 2 % longer than with their best layout."""


class InferenceLinear(nn.Module):
    """A linear layer, [..., in] -> [..., out] in the same dtype, without gradients and hooks."""

    def __init_subclass__(cls) -> None:
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not an `nn.Parameter`, because reading a parameter takes as long as a small operator.
        self.bias = None if bias is None else bias.detach().contiguous()

    @property
    def weight(self) -> Tensor:
        """The dense weight [out, in], for the few models that read it."""
        raise NotImplementedError


class FusedLinear(InferenceLinear):
    """Multiplies with fused CPU kernels, in their dtype."""

    def __init__(self, kernels: PaceKernels, weight: Tensor, bias: Tensor | None) -> None:
        """Copies `weight`, whose shape must satisfy `kernels.can_pack`."""
        super().__init__(weight, bias)
        self.kernels = kernels
        self.packed = kernels.pack(weight.detach().contiguous())

    def forward(self, rows: Tensor) -> Tensor:
        if not rows.numel():  # The kernels take no empty matrices.
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        flat = rows.reshape(1, -1, self.in_features).contiguous()
        output = self.kernels.linear(flat, self.packed, self.bias)
        return output.view(*rows.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        return self.kernels.unpack(self.packed)


class PackedLinear(InferenceLinear):
    """Multiplies with oneDNN on a CPU. The first call with a new number of rows takes up to 0.7 ms
    longer, because oneDNN prepares a kernel. oneDNN keeps up to 1,024 kernels in a process."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copies `weight` (bfloat16 or float32)."""
        super().__init__(weight, bias)
        operators = torch.ops.mkldnn
        dense = weight.detach().contiguous()
        self._packed: Tensor = operators._reorder_linear_weight(dense, _PACKED_FOR_ROWS)
        self._product = operators._linear_pointwise.default

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self._product(rows, self._packed, self.bias, "none", [], "")
        return output

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()


_ROWS_MIN = 4
_BLOCK_WEIGHTS = 2**20


class WidenedLinear(InferenceLinear):
    """Multiplies in float32, for weights in bfloat16 on a CPU without bfloat16 instructions.
    Converts about `_BLOCK_WEIGHTS` weights at a time. Below `_ROWS_MIN` rows, converts nothing."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Shares the memory of `weight` if it is contiguous."""
        super().__init__(weight, bias)
        self._dense = weight.detach().contiguous()

    def forward(self, rows: Tensor) -> Tensor:
        if rows.numel() < _ROWS_MIN * self.in_features:
            return functional.linear(rows, self._dense, self.bias)
        wide = rows.float()
        blocks = torch.split(self._dense, max(1, _BLOCK_WEIGHTS // self.in_features))
        output = torch.cat([functional.linear(wide, block.float()) for block in blocks], -1)
        return (output if self.bias is None else output + self.bias).to(rows.dtype)

    @property
    def weight(self) -> Tensor:
        return self._dense


def fastest_linear(
    weight: Tensor, bias: Tensor | None, kernels: PaceKernels | None = None
) -> InferenceLinear | None:
    """Returns the fastest layer on this machine for a weight [out, in], or None if the model's
    own layer is the fastest. Uses the `kernels` if they can pack the weight."""
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.numel() == 0:
        return None
    if kernels is not None and weight.dtype == kernels.dtype and kernels.can_pack(*weight.shape):
        return FusedLinear(kernels, weight, bias)
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if weight.dtype == torch.bfloat16:
        has_products = has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return PackedLinear(weight, bias) if has_products else WidenedLinear(weight, bias)
    return PackedLinear(weight, bias) if has_onednn and weight.dtype == torch.float32 else None


_BLOCK_ROWS = 16
"""In a product of at most this many rows, a row's result does not depend on the other rows. In
tests with more than 32 rows in bfloat16, oneDNN used AMX tiles, which round differently."""


class BlockedLinear(nn.Module):
    """A linear layer, [..., in] -> [..., out], that multiplies up to `_BLOCK_ROWS` rows at once."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear

    def __getattr__(self, name: str) -> Any:
        """A few models read the weight or bias of their layers."""
        if name in ("weight", "bias"):
            return getattr(self.linear, name)
        return super().__getattr__(name)

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        output = torch.cat([self.linear(block) for block in torch.split(flat, _BLOCK_ROWS)])
        return output.view(*rows.shape[:-1], output.shape[-1])


def block_rows(module: nn.Module) -> None:
    """Wraps every linear layer of a model in a `BlockedLinear`."""
    _wrap(module, BlockedLinear, (nn.Linear, InferenceLinear))


_ACTIVATION_ELEMENTS = 2**14  # With more elements, PyTorch computes GELU on several threads.
_LANES = 64  # a multiple of the number of elements in a CPU's vector register
_ELEMENT_WISE = (
    nn.GELU,
    *(
        entry[0] if isinstance(entry, tuple) else entry
        for name, entry in ACT2CLS.items()
        if name not in ("prelu", "xielu")  # These two have parameters.
    ),
)


class AlignedActivation(nn.Module):
    """An element-wise function, [...] -> [...], that runs on pieces of the input. A piece runs on
    one thread and is padded to whole vectors, so the result of an element does not depend on its
    place."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        num = inputs.numel()
        flat = functional.pad(inputs.reshape(-1), (0, -num % _LANES))
        pieces = [self.function(piece) for piece in torch.split(flat, _ACTIVATION_ELEMENTS)]
        return torch.cat(pieces)[:num].view(inputs.shape)


def align_activations(module: nn.Module) -> None:
    """Wraps every activation module of a model in an `AlignedActivation`."""
    _wrap(module, AlignedActivation, _ELEMENT_WISE)


def _wrap(
    module: nn.Module, wrapper: Callable[[Any], nn.Module], kinds: tuple[type[nn.Module], ...]
) -> None:
    for parent in list(module.modules()):
        if parent.__class__ is wrapper:
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, kinds):
                setattr(parent, name, wrapper(child))
