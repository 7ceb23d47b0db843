"""Activations whose numbers do not depend on where in a tensor an element stands.

On a CPU most elements go through vector instructions, and the few at the end of a thread's share
through other code, which rounds otherwise for some functions (the sigmoid's and both GELUs'; exp,
tanh, cosine and the root are the same in both). Where shares end depends on the tensor's size.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import activation
from transformers.activations import ACT2CLS

_PIECE: Final = 2**14
"""Elements that one thread does alone: torch shares GELU out beyond so many, others beyond twice
as many."""
_LANES: Final = 64
"""Elements that a vectorised loop takes at a time, or a multiple of them."""
_KINDS: Final = (
    *(entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()),
    *(getattr(activation, name) for name in activation.__all__ if name != "MultiheadAttention"),
)


class AlignedActivation(nn.Module):
    """An element-wise function, [...] to [...], in whole vectors on one thread a piece."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Of each element."""
        flat = inputs.reshape(-1)
        num = flat.numel()
        if num % _LANES:
            flat = functional.pad(flat, (0, -num % _LANES))
        pieces = [self.function(piece) for piece in torch.split(flat, _PIECE)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole[:num].view(inputs.shape)


def align_activations(module: nn.Module) -> None:
    """Aligns every activation of a model that is a module of its own and has no parameters."""
    for parent in list(module.modules()):
        if isinstance(parent, AlignedActivation):
            continue
        for name, child in list(parent.named_children()):
            if _is_element_wise(child):
                setattr(parent, name, AlignedActivation(child))


def _is_element_wise(child: Any) -> bool:
    over_axes = (nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.GLU)
    return (
        isinstance(child, _KINDS)
        and not isinstance(child, over_axes)
        and not any(True for _ in child.parameters())
    )
