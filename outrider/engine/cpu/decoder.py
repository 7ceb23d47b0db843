"""A decoder of the Llama family on fused kernels.

`outrider/models/module_replacement.py` has already replaced and probed the model's layers, so their
computation is known. Layers have two norms (Llama, Mistral, Qwen 2 and 3) or four (Gemma 3).

`FusedDecoder` runs the model with placeholders for the layers, to learn the input of the first
layer, the rotation that each layer gets, and the use of the last layer's output. If any of these
differs from a Llama, the code of transformers runs the model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.engine.attention import AttentionLayer
from outrider.engine.cpu.kernels import LayerSizes, LayerWeights, PaceKernels
from outrider.errors import OutriderError
from outrider.models.linear_layers import FusedLinear
from outrider.models.module_replacement import (
    PROBE_ERRORS,
    DirectLayer,
    FusedAttention,
    FusedMLP,
    NativeRMSNorm,
)
from outrider.models.target_layers import layers_of

_POSITIONS_AT_ONCE = 4096
_OBSERVED_TOKENS = 4
_CHANGING_ROTATIONS = frozenset({"dynamic", "longrope"})
"""The angles of rotary positions of these types depend on the length of the sequence."""
_Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [positions, width / 2]."""


class CannotFuse(OutriderError):
    """A model cannot run on fused kernels. The message says why."""


class FusedDecoder:
    """Runs a model's decoder and LM head on fused kernels. Shares the model's weights."""

    def __init__(
        self,
        module: Any,
        layers: Sequence[AttentionLayer],
        max_model_len: int,
        kernels: PaceKernels,
    ) -> None:
        """`module` was replaced for these kernels. `layers` are those of `find_layers`. Raises
        `CannotFuse`."""
        base = module.base_model
        blocks: list[Any] = list(getattr(base, "layers", ()))
        if not blocks or [layer.block for layer in layers] != [
            getattr(block, "self_attn", None) for block in blocks
        ]:
            raise CannotFuse("its layers are not those of a Llama")
        try:
            observed = _observe(module, blocks, max_model_len)
        except PROBE_ERRORS as error:
            raise CannotFuse(f"its decoder cannot be observed ({error})") from error
        self.kernels = kernels
        self.rotations: list[_Rotation] = []
        self.windows = list(dict.fromkeys(layer.window for layer in layers))
        epsilons = {norm.eps for norm in base.modules() if isinstance(norm, NativeRMSNorm)}
        sizes = {
            _sizes(block, layer, kernels, eps)
            for block, layer in zip(blocks, layers, strict=True)
            for eps in epsilons
        }
        if len(sizes) != 1:
            raise CannotFuse("its layers differ in their heads, activations or norms")
        [self.sizes] = sizes
        weights = map(self._weights, blocks, layers, observed)
        self.layers = kernels.layers(list(weights), self.sizes)
        self.embed = base.embed_tokens
        self.width: int = base.embed_tokens.weight.shape[1]
        self._last_norm = _norm(base.norm, kernels)
        self._head = module.get_output_embeddings()

    def logits(self, rows: Tensor, residual: Tensor) -> Tensor:
        """Logits [1, L, V] from the last layer's output and the residual, [1, L, D] each."""
        logits: Tensor
        if rows.numel():  # The kernels accept no empty matrices.
            rows = self.layers.add_norm(rows, residual, self._last_norm)[0]
        logits = self._head(rows)
        return logits

    def _weights(self, block: Any, layer: AttentionLayer, rotation: _Rotation) -> LayerWeights:
        attention, mlp, kernels = block.self_attn, block.mlp, self.kernels
        gate, up = mlp.gate_up_proj.packed.chunk(2)
        return LayerWeights(
            first_norm=_norm(block.input_layernorm, kernels),
            qkv=attention.qkv_proj.packed,
            qkv_bias=attention.qkv_proj.bias,
            query_norm=_optional_norm(attention.q_norm, kernels),
            key_norm=_optional_norm(attention.k_norm, kernels),
            output=attention.o_proj.packed,
            output_bias=attention.o_proj.bias,
            attention_norm=_optional_norm(block.attention_norm, kernels),
            second_norm=_norm(block.mlp_input_norm, kernels),
            gate=gate,
            up=up,
            down=mlp.down_proj.packed,
            mlp_norm=_optional_norm(block.mlp_output_norm, kernels),
            rotation=_number(self.rotations, rotation),
            kind=self.windows.index(layer.window),
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            window=-1 if layer.window is None else layer.window - 1,
        )


def _sizes(block: Any, layer: AttentionLayer, kernels: PaceKernels, eps: float) -> LayerSizes:
    for found, kind, what in (
        (block, DirectLayer, "a layer"),
        (layer.block, FusedAttention, "attention"),
        (getattr(block, "mlp", None), FusedMLP, "an MLP"),
    ):
        if not isinstance(found, kind):
            raise CannotFuse(f"it has {what} of the class {type(found).__name__}")
    attention, mlp, shape = block.self_attn, block.mlp, layer.shape
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    wrong = [linear for linear in linears if not isinstance(linear, FusedLinear)]
    if wrong:
        raise CannotFuse(f"the kernels cannot run its linear layer {wrong[0]}")
    if shape.key_width != shape.value_width:
        raise CannotFuse("its keys and values have different widths")
    activation = _activation(mlp.act_fn, kernels)
    if activation is None or mlp.gate_up_proj.bias is not None or mlp.down_proj.bias is not None:
        raise CannotFuse(f"its MLP has a bias, or an activation of another kind ({mlp.act_fn})")
    return LayerSizes(layer.query_heads, shape.num_heads, shape.key_width, eps, activation)


def _activation(function: Any, kernels: PaceKernels) -> str | None:
    """Returns the kernels' name for an activation function, or None if they lack it. Allows small
    differences, so that the tanh approximation of GELU counts as GELU."""
    rows = torch.linspace(-8, 8, 1025, dtype=kernels.dtype)
    for name in kernels.activations:
        expected = getattr(functional, name)(rows)
        tolerance = torch.finfo(rows.dtype).eps * expected.abs().clamp(min=1)
        if bool(((function(rows) - expected).abs() <= tolerance).all()):
            return name
    return None


def _norm(norm: Any, kernels: PaceKernels) -> Tensor:
    """Returns the factors of a norm, in the kernels' dtype if it represents them exactly."""
    if not isinstance(norm, NativeRMSNorm):
        raise CannotFuse(f"it has a norm of the class {type(norm).__name__}")
    weight = norm.factor.to(kernels.dtype)
    return weight if torch.equal(weight.to(norm.factor.dtype), norm.factor) else norm.factor


def _optional_norm(norm: Any, kernels: PaceKernels) -> Tensor | None:
    return None if norm is None else _norm(norm, kernels)


class _NotingLayer(nn.Module):
    """A placeholder for a layer. Records its input and rotation, and returns the input."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        vars(self).update(
            {name: value for name, value in vars(layer).items() if name not in vars(self)}
        )
        self.read = torch.empty(0)
        self.rotations: list[_Rotation] = []

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
        self.read = hidden_states
        self.rotations.append(position_embeddings)
        return hidden_states


@torch.inference_mode()
def _observe(module: Any, blocks: Sequence[Any], num_positions: int) -> list[_Rotation]:
    """Returns the rotation of each layer. Raises `CannotFuse` if the parts outside of the layers
    are not those of a Llama."""
    base = module.base_model
    parts = {name for name, _ in base.named_children()}
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        raise CannotFuse(f"its decoder is made of {', '.join(sorted(parts))}")
    kinds = getattr(base.rotary_emb, "rope_type", "default")
    changing = _CHANGING_ROTATIONS & set(kinds.values() if isinstance(kinds, dict) else [kinds])
    if changing:
        raise CannotFuse(f"its rotations ({', '.join(changing)}) depend on the length of a text")
    noting = [_NotingLayer(block).eval() for block in blocks]
    layers = layers_of(module)
    try:
        for index, one in enumerate(noting):
            layers[index] = one
        for start in range(0, num_positions, _POSITIONS_AT_ONCE):
            positions = torch.arange(start, min(start + _POSITIONS_AT_ONCE, num_positions))[None]
            base(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
        rotations = [_rotation(one.rotations) for one in noting]
        ids = torch.arange(_OBSERVED_TOKENS)[None] % len(base.embed_tokens.weight)
        found = module(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
        rows = base.embed_tokens(ids)
        if not torch.equal(noting[0].read, rows):
            raise CannotFuse("the input of its first layer is not the output of its embedding")
        if not torch.equal(found.logits, module.get_output_embeddings()(base.norm(rows))):
            raise CannotFuse("its logits are not the output of its head on its last norm")
    finally:
        for index, block in enumerate(blocks):
            layers[index] = block
    return rotations


def _rotation(parts: Sequence[_Rotation]) -> _Rotation:
    """Joins a layer's cosines and sines [1, positions, width] to tables [positions, width / 2]."""
    tables = []
    for table in (torch.cat([part[which][0] for part in parts]) for which in (0, 1)):
        half = table.shape[1] // 2
        if not torch.equal(table[:, :half], table[:, half:]):
            raise CannotFuse("the halves of a head are rotated by different angles")
        tables.append(table[:, :half].contiguous())
    return tables[0], tables[1]


def _number(tables: list[_Rotation], rotation: _Rotation) -> int:
    """Returns the index of a rotation in `tables`, to which it is appended if missing."""
    for number, known in enumerate(tables):
        if all(torch.equal(*pair) for pair in zip(known, rotation, strict=True)):
            return number
    tables.append(rotation)
    return len(tables) - 1
