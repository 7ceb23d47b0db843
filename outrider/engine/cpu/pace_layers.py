"""All layers of a decoder in one call, on the operators of `amd-pace`.

A step of 30 layers calls more than 300 operators, and after each one Python takes back its lock,
which the thread that talks to other processes may hold. TorchScript runs them all without the lock,
and saves 1 ms of a step. It is deprecated, but part of the one version of torch that the operators
are built for.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from outrider.engine.cpu.kernels import LayerParts, RunLayers


class _PaceLayers(nn.Module):
    """See `RunLayers`. What differs between layers stands in lists, a number for each."""

    qkv_bias: list[torch.Tensor | None]
    query_norm: list[torch.Tensor | None]
    key_norm: list[torch.Tensor | None]
    output_bias: list[torch.Tensor | None]
    attention_norm: list[torch.Tensor | None]
    mlp_norm: list[torch.Tensor | None]

    def __init__(self, layers: Sequence[LayerParts], isa: str) -> None:
        super().__init__()
        first = layers[0]
        self.num_layers = len(layers)
        self.query_heads, self.key_heads, self.width = (
            first.query_heads,
            first.key_heads,
            first.width,
        )
        self.eps, self.activation, self.isa = first.eps, first.activation, isa
        self.first_norm = [layer.first_norm for layer in layers]
        self.qkv = [layer.qkv for layer in layers]
        self.qkv_bias = [layer.qkv_bias for layer in layers]
        self.query_norm = [layer.query_norm for layer in layers]
        self.key_norm = [layer.key_norm for layer in layers]
        self.rotation = [layer.rotation for layer in layers]
        self.keys = [layer.keys for layer in layers]
        self.values = [layer.values for layer in layers]
        self.scaling = [layer.scaling for layer in layers]
        self.window = [-1 if layer.window is None else layer.window - 1 for layer in layers]
        self.softcap = [layer.softcap or 0.0 for layer in layers]
        self.kind = [layer.kind for layer in layers]
        self.output = [layer.output for layer in layers]
        self.output_bias = [layer.output_bias for layer in layers]
        self.attention_norm = [layer.attention_norm for layer in layers]
        self.second_norm = [layer.second_norm for layer in layers]
        self.gate = [layer.gate for layer in layers]
        self.up = [layer.up for layer in layers]
        self.down = [layer.down for layer in layers]
        self.mlp_norm = [layer.mlp_norm for layer in layers]

    def forward(
        self,
        rows: torch.Tensor,
        cos: list[torch.Tensor],
        sin: list[torch.Tensor],
        slots: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        pages: torch.Tensor,
        schedules: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps, num_tokens = self.eps, rows.size(1)
        num_heads = [self.query_heads, self.key_heads, self.key_heads]
        residual = rows
        for i in range(self.num_layers):
            if i == 0:
                normed = torch.ops.pace.rmsnorm(rows, self.first_norm[i], eps)
            else:
                normed, residual = torch.ops.pace.fused_add_rmsnorm(
                    rows, residual, self.first_norm[i], eps
                )
            heads = torch.ops.pace.libxsmmlinear_plain(normed, self.qkv[i], self.qkv_bias[i])
            heads = heads.view(1, num_tokens, -1, self.width)
            query, key, value = heads.split_with_sizes(num_heads, 2)
            query_norm, key_norm = self.query_norm[i], self.key_norm[i]
            if query_norm is not None and key_norm is not None:
                query = torch.ops.pace.rmsnorm(query, query_norm, eps)
                key = torch.ops.pace.rmsnorm(key, key_norm, eps)
            table = self.rotation[i]
            query, key = torch.ops.pace.fused_rope_apply(query, key, cos[table], sin[table], 2)
            torch.ops.pace.paged_attention_reshape_and_cache(
                key[0], value[0], self.keys[i], self.values[i], slots, self.isa
            )
            asked = query[0]
            attended = torch.empty_like(asked)
            torch.ops.pace.paged_attention_with_kv_cache(
                asked, self.keys[i], self.values[i], attended, starts, ends, self.scaling[i], True,
                None, self.window[i], 0, pages, self.softcap[i], schedules[self.kind[i]], None,
            )  # fmt: skip
            rows = torch.ops.pace.libxsmmlinear_plain(
                attended.view(1, num_tokens, -1), self.output[i], self.output_bias[i]
            )
            attention_norm = self.attention_norm[i]
            if attention_norm is not None:
                rows = torch.ops.pace.rmsnorm(rows, attention_norm, eps)
            normed, residual = torch.ops.pace.fused_add_rmsnorm(
                rows, residual, self.second_norm[i], eps
            )
            rows = torch.ops.pace.libxsmm_fused_mlp(
                normed, self.gate[i], self.up[i], self.down[i], None, None, None, self.activation
            )
            mlp_norm = self.mlp_norm[i]
            if mlp_norm is not None:
                rows = torch.ops.pace.rmsnorm(rows, mlp_norm, eps)
        return rows, residual


def pace_layers(layers: Sequence[LayerParts], isa: str) -> RunLayers | None:
    """The layers in one call; None where they differ in what is the same for all of them."""
    shared = {
        (one.query_heads, one.key_heads, one.width, one.eps, one.activation) for one in layers
    }
    if len(shared) != 1:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Of TorchScript.
        scripted: Any = torch.jit.script(_PaceLayers(layers, isa).eval())

    def run(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # Else the first steps of each shape would wait for a compiler that gains nothing here.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            found: tuple[torch.Tensor, torch.Tensor] = scripted(*given)
        return found

    return run
