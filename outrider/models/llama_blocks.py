"""Blocks of the Llama family with fewer operators and fewer, larger matrix products.

Each stands in for the library's own block: the same call signature, the same calls of the attention
interface and of the cache, the same result up to rounding. Where one fits is decided in
`module_replacement.py`. Sizes are those of the weights, so that a block may hold a part of a
model's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))


class NativeRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis, at least float32 inside:
    [..., D] -> [..., D].

    On a CPU five operators, where the library's own norm takes eight and `functional.rms_norm`
    nine: sqrt(mean(x^2) + eps) is hypot(|x|, sqrt(D eps)) / sqrt(D).
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._inside = torch.promote_types(weight.dtype, torch.float32)
        self.factor = weight.detach().to(self._inside) + offset
        """[D]: weight + offset, at least in float32."""
        self._scale = self.factor * self.factor.numel() ** 0.5
        self._floor = self._scale.new_tensor((self.factor.numel() * eps) ** 0.5)
        self._has_kernel = weight.is_cuda and offset == 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Of [..., D], in its dtype."""
        if self._has_kernel:
            shape = tuple(self.weight.shape)
            normed: torch.Tensor = functional.rms_norm(hidden_states, shape, self.weight, self.eps)
            return normed
        inside = hidden_states.to(self._inside, copy=True)
        norms: torch.Tensor = torch.linalg.vector_norm(inside, dim=-1, keepdim=True)
        return inside.div_(norms.hypot_(self._floor)).mul_(self._scale).to(hidden_states.dtype)

    __call__ = forward


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one product: [..., D] -> [..., D].

    Takes from the library's `block` its `gate_proj`, `up_proj`, `down_proj` and `act_fn`."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate_up_proj = _joined(block.gate_proj, block.up_proj)
        self.down_proj = block.down_proj
        self.act_fn = block.act_fn
        self._halves = (block.gate_proj.out_features, block.up_proj.out_features)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Of [..., D], in its dtype."""
        gate, up = self.gate_up_proj(hidden_states).split_with_sizes(self._halves, -1)
        output: torch.Tensor = self.down_proj(self.act_fn(gate).mul_(up))
        return output

    __call__ = forward


class DirectLayer(nn.Module):
    """A layer of a model with less between its blocks: [..., D] -> [..., D].

    h + attention(norm(h)), and then to that + mlp(norm(.)); in a layer of four norms (Gemma's) what
    attention and MLP put out is normed, too. Takes from the library's `layer` its blocks under
    their names there, and all that it knows of itself. What it is called with goes to its
    attention.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        vars(self).update(_own_knowledge(layer))
        self.input_layernorm: Any = layer.input_layernorm
        self.self_attn: Any = layer.self_attn
        self.post_attention_layernorm: Any = layer.post_attention_layernorm
        self.mlp: Any = layer.mlp
        self._has_four_norms = hasattr(layer, "pre_feedforward_layernorm")
        if self._has_four_norms:
            self.pre_feedforward_layernorm: Any = layer.pre_feedforward_layernorm
            self.post_feedforward_layernorm: Any = layer.post_feedforward_layernorm

    @property
    def attention_norm(self) -> Any:
        """The norm of what attention puts out, or None."""
        return self.post_attention_layernorm if self._has_four_norms else None

    @property
    def mlp_input_norm(self) -> Any:
        """The norm of what the MLP reads."""
        if self._has_four_norms:
            return self.pre_feedforward_layernorm
        return self.post_attention_layernorm

    @property
    def mlp_output_norm(self) -> Any:
        """The norm of what the MLP puts out, or None."""
        return self.post_feedforward_layernorm if self._has_four_norms else None

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Of [..., D], in its dtype."""
        output: torch.Tensor
        rows, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        if not self._has_four_norms:
            hidden_states = hidden_states + rows
            output = self.mlp(self.post_attention_layernorm(hidden_states))
            return hidden_states + output
        hidden_states = hidden_states + self.post_attention_layernorm(rows)
        rows = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        output = self.post_feedforward_layernorm(rows)
        return hidden_states + output

    __call__ = forward


class FusedAttention(nn.Module):
    """Attention with rotary positions, with queries, keys and values in one product.

    Keeps all that the library's `block` knows of itself (`config`, `layer_idx`,
    `num_key_value_groups`, ...), because attention functions read it there. They are called with
    `interface_options`, as that block calls them; `eager` is its own function for attention.
    """

    config: Any
    layer_idx: int

    def __init__(
        self, block: Any, eager: AttentionFunction, interface_options: dict[str, Any]
    ) -> None:
        super().__init__()
        vars(self).update(_own_knowledge(block))
        projections = (block.q_proj, block.k_proj, block.v_proj)
        num_queries, num_keys, num_values = (p.out_features // block.head_dim for p in projections)
        self.qkv_proj = _joined(*projections)
        self.o_proj = block.o_proj
        self.q_norm, self.k_norm = getattr(block, "q_norm", None), getattr(block, "k_norm", None)
        self._queries_and_keys = (num_queries, num_keys)
        self._rotating_and_rest = (num_queries + num_keys, num_values)
        self._eager = eager
        self._interface_options = interface_options
        self._half = block.head_dim // 2
        self._signs = block.q_proj.weight.new_ones(block.head_dim)
        self._signs[: self._half] = -1

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of `hidden_states` [B, T, D] and the positions' cosines and sines, each [B or 1, T, head
        width], the block's output [B, T, D] and what the attention function says of weights."""
        shape = hidden_states.shape[:-1]
        # [B, T, all heads, head width]; parts of it stay views until the cache takes them.
        heads = self.qkv_proj(hidden_states).view(*shape, -1, 2 * self._half)
        rotating, value = heads.split_with_sizes(self._rotating_and_rest, 2)
        rotated = self._rotated(self._normed(rotating), *position_embeddings)
        query, key = rotated.transpose(1, 2).split_with_sizes(self._queries_and_keys, 1)
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self._eager
        )
        output, weights = attend(
            self, query, key, value, attention_mask, **self._interface_options, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1)), weights

    __call__ = forward

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        if self.q_norm is None or self.k_norm is None:
            return heads
        query, key = heads.split_with_sizes(self._queries_and_keys, 2)
        return torch.cat((self.q_norm(query), self.k_norm(key)), dim=2)

    def _rotated(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(a, b) -> (a, b) * cos + (-b, a) * sin, with halves a and b of each head's width."""
        swapped = heads.roll(self._half, -1)
        return torch.addcmul(heads * cos.unsqueeze(2), swapped, (sin * self._signs).unsqueeze(2))


def _own_knowledge(block: nn.Module) -> dict[str, Any]:
    """What a block of the library holds that not every module does."""
    return {name: value for name, value in vars(block).items() if name not in _OF_EVERY_MODULE}


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One layer whose output is theirs, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
