"""Linear layers and activations that replace those of transformers on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2CLS

from outrider.engine.cpu.kernels import PaceKernels

_PACKED_FOR_ROWS = 16
"""Number of rows that the layout is optimised for. For 5..64 the layout is the same, and within 2 %
of the best for 1..256 rows; the layout for 1 row makes float32 up to twice as slow with more."""


class InferenceLinear(nn.Module):
    """`nn.Linear` for inference: [..., in] -> [..., out], in the rows' dtype, without a gradient.
    Calls go straight to `forward`, without hooks."""

    def __init_subclass__(cls) -> None:
        cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is [out, in], `bias` [out]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not a parameter, whose lookup at each use costs as much as a small operator.
        self.bias = None if bias is None else bias.detach().contiguous()

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] in dense form, for the few models that read it."""
        raise NotImplementedError


class FusedLinear(InferenceLinear):
    """The product of fused kernels, in their dtype."""

    def __init__(self, kernels: PaceKernels, weight: Tensor, bias: Tensor | None) -> None:
        """Copies `weight`, which the kernels `can_pack`, into their layout."""
        super().__init__(weight, bias)
        self.kernels = kernels
        self.packed = kernels.pack(weight.detach().contiguous())
        """See `PaceKernels.pack`."""

    def forward(self, rows: Tensor) -> Tensor:
        if not rows.numel():  # kernels take no empty matrices
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        flat = rows.reshape(1, -1, self.in_features).contiguous()
        output = self.kernels.linear(flat, self.packed, self.bias)
        return output.view(*rows.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        return self.kernels.unpack(self.packed)


class PackedLinear(InferenceLinear):
    """A weight in oneDNN's layout, on a CPU.

    The first call with a new number of rows takes up to 0.7 ms longer, as oneDNN prepares a kernel.
    It keeps 1,024 of them for the process.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copies `weight`, in bfloat16 or float32, into the layout."""
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
"""The weight is widened for at least this many rows."""
_BLOCK_WEIGHTS = 2**20
"""Weights that are widened at a time; at least those of one output."""


class WidenedLinear(InferenceLinear):
    """For bfloat16 on a CPU that cannot multiply it: multiplies in float32, block by block."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Shares `weight` if it is contiguous."""
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


def quick(
    weight: Tensor, bias: Tensor | None, kernels: PaceKernels | None = None
) -> InferenceLinear | None:
    """The fastest layer with that weight [out, in] on this machine: with the kernels if they can
    pack it, or with oneDNN. None if that is transformers' own layer."""
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
"""Most rows of a product with bit-equal rows. Up to 32 rows oneDNN was seen to use no AMX tiles
(bfloat16)."""


class BlockedLinear(nn.Module):
    """A linear layer, [..., in] to [..., out], in products of at most a block of rows."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear

    def __getattr__(self, name: str) -> Any:
        """The layer's own weight and bias, for the few models that read them."""
        if name in ("weight", "bias"):
            return getattr(self.linear, name)
        return super().__getattr__(name)

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        found = torch.cat([self.linear(block) for block in torch.split(flat, _BLOCK_ROWS)])
        return found.view(*rows.shape[:-1], found.shape[-1])


def block_rows(module: nn.Module) -> None:
    """Makes every linear layer of a model take its rows in blocks."""
    _wrap(module, BlockedLinear, (nn.Linear, InferenceLinear))


_ACTIVATION_ELEMENTS = 2**14
"""Most elements for one thread: torch uses several for more elements of GELU, or for more than
twice as many of other functions."""
_LANES = 64
"""A multiple of the elements that a vectorised loop takes at a time."""
_ELEMENT_WISE = (
    nn.GELU,
    *(
        entry[0] if isinstance(entry, tuple) else entry
        for name, entry in ACT2CLS.items()
        if name not in ("prelu", "xielu")  # These have parameters.
    ),
)


class AlignedActivation(nn.Module):
    """An element-wise function, [...] to [...], run in pieces of whole vectors on one thread each,
    so that an element's result does not depend on its place."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        num = inputs.numel()
        flat = functional.pad(inputs.reshape(-1), (0, -num % _LANES))
        pieces = [self.function(piece) for piece in torch.split(flat, _ACTIVATION_ELEMENTS)]
        return torch.cat(pieces)[:num].view(inputs.shape)


def align_activations(module: nn.Module) -> None:
    """Aligns every activation of a model that is a module of its own."""
    _wrap(module, AlignedActivation, _ELEMENT_WISE)


def _wrap(
    module: nn.Module, wrapper: Callable[[Any], nn.Module], kinds: tuple[type[nn.Module], ...]
) -> None:
    """Wraps every module of these kinds that is not wrapped yet."""
    for parent in list(module.modules()):
        if parent.__class__ is wrapper:
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, kinds):
                setattr(parent, name, wrapper(child))
