"""What a library of fused CPU kernels offers to a decoder of the Llama family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from outrider.errors import OutriderError
from outrider.kv_cache.storage import BlockedKeysAndValues


class KernelsUnavailable(OutriderError):
    """Why a library's kernels cannot be used."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The new tokens of a step, cut into S spans of consecutive tokens of one sequence."""

    starts: torch.Tensor
    """[S + 1], int32: the row of the step that each begins with, and the number of rows."""
    ends: torch.Tensor
    """[S], int32: the length of its sequence up to and with its last token."""
    pages: torch.Tensor
    """[S, any], int32: the page table of its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """A layer's cache, packed weights and biases, weights of norms, and numbers. What it may lack
    is None."""

    keys: torch.Tensor
    values: torch.Tensor
    query_heads: int
    key_heads: int
    width: int
    eps: float
    """Of its norms."""
    first_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    rotation: int
    """Which of a step's cosines and sines."""
    kind: int
    """Which of a step's schedules."""
    scaling: float
    window: int | None
    softcap: float | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    attention_norm: torch.Tensor | None
    """Of what attention puts out."""
    second_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    activation: str
    mlp_norm: torch.Tensor | None
    """Of what the MLP puts out."""


RunLayers = Callable[
    [
        torch.Tensor, list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor,
        torch.Tensor, torch.Tensor, list[torch.Tensor],
    ],
    tuple[torch.Tensor, torch.Tensor],
]  # fmt: skip
"""(embeddings [1, T, D], cosines and sines [1, T, width / 2] of each rotation, slots [T], the
`starts`, `ends` and `pages` of `Spans`, a schedule of each kind) -> what the last layer puts out,
and what that is yet to be added to: [1, T, D]."""


class Kernels(Protocol):
    """The operators of one library, for rows of one dtype. Rows are [1, T, width], contiguous."""

    @property
    def name(self) -> str:
        """The library and its version."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of rows, weights, keys and values."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page of the caches that `write` and `attend` take."""
        ...

    @property
    def activations(self) -> Sequence[str]:
        """Those of `mlp`."""
        ...

    def can_pack(self, num_out: int, num_in: int) -> bool:
        """Whether a weight [out, in] can be packed."""
        ...

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [out, in], in the layout of `linear`; the first axis of the result goes over
        parts of the output."""
        ...

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] again."""
        ...

    def linear(
        self, rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """rows @ weight.T + bias: [1, T, out]."""
        ...

    def mlp(
        self,
        rows: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """down(activation(gate(rows)) * up(rows)), of packed weights."""
        ...

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """rows / sqrt(mean(rows^2) + eps) * weight, over the last axis of any number of axes."""
        ...

    def add_norm(
        self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm` of rows + residual, and that sum."""
        ...

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary positions of queries and keys [1, T, heads, width], by the cosines and sines
        [1, T, width / 2] of the angles: (a, b) -> (a cos - b sin, b cos + a sin), with halves a
        and b of a head's width."""
        ...

    def write(
        self,
        cache: BlockedKeysAndValues,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Puts keys and values [T, heads, width] into slots [T] of a cache."""
        ...

    def schedule(
        self, spans: Spans, query_heads: int, key_heads: int, width: int, window: int | None
    ) -> torch.Tensor:
        """How `attend` shares its work among threads, for all layers of one kind."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        cache: BlockedKeysAndValues,
        spans: Spans,
        schedule: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Causal attention [T, heads, width] of queries [T, heads, width] to their own sequences'
        slots, their own included; to the last `window` of these, if it is given."""
        ...

    def at_once(self, layers: Sequence[LayerParts]) -> RunLayers | None:
        """All layers in one call, bit for bit what their operators make one by one; None where
        the library has no such call for them."""
        ...


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
