"""A decoder of the Llama family on fused kernels: a handful of operators a layer.

It is put together from a model whose blocks were replaced and probed before
(`outrider/models/module_replacement.py`), so what they compute is known: norms of the root mean
square, one product for queries, keys and values, rotary positions, causal attention, one product, a
gated MLP, in layers of two norms (Llama, Mistral, Qwen 2 and 3) or four (Gemma 3). What stands
around the layers is observed while the library runs its own model with other layers in their
places: what the first one reads, which rotation each one is given, and what is made of what the
last one puts out. A model that does anything else is refused by name, and runs as the library has
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from outrider.engine.attention import AttentionLayer
from outrider.engine.cpu.kernels import FusedLinear, PaceKernels
from outrider.errors import OutriderError
from outrider.models.early_exit import layers_of
from outrider.models.module_probes import PROBE_ERRORS, agree, probe_rows
from outrider.models.module_replacement import (
    DirectLayer,
    FusedAttention,
    FusedMLP,
    NativeRMSNorm,
)

_POSITIONS_AT_ONCE: Final = 4096
_CHANGING_ROTATIONS: Final = frozenset({"dynamic", "longrope"})
"""Kinds whose angles are others beyond some length."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(number of the layer, queries, keys and values [T, heads, width]) -> output [T, heads, width]."""

Layers = Callable[
    [torch.Tensor, list[torch.Tensor], list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]
]
"""(embeddings [1, T, D], cosines and sines [1, T, width / 2] of each of the decoder's rotations) ->
what the last layer's MLP puts out, and what it is yet to be added to: [1, T, D]."""

_Rows = Callable[[torch.Tensor], torch.Tensor]
_Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [positions, width / 2]."""


class CannotFuse(OutriderError):
    """Why a model does not run on fused kernels."""


@dataclass(frozen=True, slots=True)
class _KernelNorm:
    """A norm in one operator, and a sum and a norm in one."""

    kernels: PaceKernels
    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.kernels.norm(rows, self.weight, self.eps)

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.add_norm(rows, residual, self.weight, self.eps)


class _PlainNorm:
    """A norm that the kernels do not have, or whose weight their dtype cannot hold, as 1 + w of
    Gemma's in bfloat16."""

    def __init__(self, norm: _Rows) -> None:
        self._norm = norm

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._norm(rows)

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = rows + residual
        return self._norm(total), total


_Norm = _KernelNorm | _PlainNorm


class _Product:
    """A linear layer's product, without the call of its module."""

    def __init__(
        self, kernels: PaceKernels, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self._linear, self.packed, self.bias = kernels.linear, packed, bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._linear(rows, self.packed, self.bias)


@dataclass(frozen=True, slots=True)
class _OneMLP:
    """A gated MLP in one operator."""

    kernels: PaceKernels
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    activation: str

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.kernels.mlp(rows, self.gate, self.up, self.down, self.activation)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer of the decoder."""

    first_norm: _Norm
    qkv: _Product
    heads: tuple[int, int, int]
    """Of queries, keys and values."""
    width: int
    query_norm: _Norm | None
    key_norm: _Norm | None
    rotation: int
    """Which of the decoder's tables of cosines and sines."""
    output: _Product
    attention_norm: _Norm | None
    """Of what attention puts out, in layers of four norms."""
    second_norm: _Norm
    mlp: _OneMLP | _Rows
    mlp_norm: _Norm | None
    scaling: float
    softcap: float | None
    window: int | None

    @property
    def of_operators(self) -> tuple[tuple[int, int, int], int, float, str] | None:
        """Heads, width, eps of all norms and activation; None for a layer that is not made of the
        kernels' operators alone."""
        mlp, first = self.mlp, self.first_norm
        others = (self.query_norm, self.key_norm, self.attention_norm, self.mlp_norm)
        norms = [first, self.second_norm, *(norm for norm in others if norm is not None)]
        if not isinstance(mlp, _OneMLP) or not isinstance(first, _KernelNorm):
            return None
        if any(not isinstance(norm, _KernelNorm) or norm.eps != first.eps for norm in norms):
            return None
        return self.heads, self.width, first.eps, mlp.activation


class FusedDecoder:
    """The decoder and its head. Shares the weights of its model."""

    def __init__(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        layers: Sequence[FusedLayer],
        rotations: Sequence[_Rotation],
        last_norm: _Norm,
        head: _Rows,
        width: int,
        kernels: PaceKernels,
    ) -> None:
        """`rotations` are cosines and sines [positions, width / 2], `width` is D."""
        self.width = width
        self.layers = layers
        self.kernels = kernels
        self.rotations = rotations
        self._embed = embed
        self._last_norm = last_norm
        self._head = head

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        layers: Layers,
    ) -> torch.Tensor:
        """Logits [L, V] of rows [L] among the tokens [T] at these positions [T]."""
        rows, residual = self._run(token_ids, positions, layers)
        rows, residual = rows.index_select(1, logit_rows), residual.index_select(1, logit_rows)
        return self.logits_of(rows, residual)[0]

    def logits_of(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Logits [1, L, V] of what the last layer puts out and what that is added to, [1, L, D]."""
        if not rows.numel():  # kernels take no empty matrices
            return self._head(rows)
        return self._head(self._last_norm.add(rows, residual)[0])

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted_rows: torch.Tensor,
        layers: Layers,
    ) -> torch.Tensor:
        """What the last of these layers puts out of these rows: [L, D]."""
        rows, residual = self._run(token_ids, positions, layers)
        return (rows + residual)[0].index_select(0, wanted_rows)

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, layers: Layers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (
            [table.index_select(0, positions)[None] for table in tables]
            for tables in zip(*self.rotations, strict=True)
        )
        return layers(self._embed(token_ids[None]), cos, sin)

    def one_by_one(self, attend: Attend, num_layers: int | None = None) -> Layers:
        """The layers, or the first of them, operator by operator."""

        def run(
            rows: torch.Tensor, cos: list[torch.Tensor], sin: list[torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            rotate, num_tokens, residual = self.kernels.rotate, rows.shape[1], rows
            for index, layer in enumerate(self.layers[:num_layers]):
                if index:
                    normed, residual = layer.first_norm.add(rows, residual)
                else:
                    normed = layer.first_norm(residual)
                heads = layer.qkv(normed).view(1, num_tokens, -1, layer.width)
                query, key, value = heads.split_with_sizes(layer.heads, 2)
                if layer.query_norm is not None and layer.key_norm is not None:
                    query, key = layer.query_norm(query), layer.key_norm(key)
                query, key = rotate(query, key, cos[layer.rotation], sin[layer.rotation])
                attended = attend(index, query[0], key[0], value[0])
                rows = layer.output(attended.view(1, num_tokens, -1))
                if layer.attention_norm is not None:
                    rows = layer.attention_norm(rows)
                normed, residual = layer.second_norm.add(rows, residual)
                rows = layer.mlp(normed)
                if layer.mlp_norm is not None:
                    rows = layer.mlp_norm(rows)
            return rows, residual

        return run


def fused_decoder(
    module: Any, layers: Sequence[AttentionLayer], max_model_len: int, kernels: PaceKernels
) -> FusedDecoder:
    """The decoder of a causal language model whose modules were replaced for these kernels, with
    the `layers` that `find_layers` found. Raises `CannotFuse`."""
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
    tables: list[_Rotation] = []
    rotations = [_number(tables, rotation) for rotation in observed]
    return FusedDecoder(
        embed=base.embed_tokens,
        layers=[
            _layer(block, layer, rotation, kernels)
            for block, layer, rotation in zip(blocks, layers, rotations, strict=True)
        ],
        rotations=tables,
        last_norm=_norm(base.norm, kernels),
        head=module.get_output_embeddings(),
        width=base.embed_tokens.weight.shape[1],
        kernels=kernels,
    )


def _layer(block: Any, layer: AttentionLayer, rotation: int, kernels: PaceKernels) -> FusedLayer:
    if not isinstance(block, DirectLayer):
        raise CannotFuse(f"it has a layer of another build, {type(block).__name__}")
    attention, mlp = block.self_attn, block.mlp
    if not isinstance(attention, FusedAttention):
        raise CannotFuse(f"it has attention of another build, {type(attention).__name__}")
    shape = layer.shape
    if shape.key_width != shape.value_width or shape.dtype != kernels.dtype:
        raise CannotFuse(
            f"its keys and values are of {shape.key_width} and {shape.value_width} numbers in "
            f"{shape.dtype}"
        )
    return FusedLayer(
        first_norm=_norm(block.input_layernorm, kernels),
        qkv=_product(attention.qkv_proj),
        heads=(layer.query_heads, shape.num_heads, shape.num_heads),
        width=shape.key_width,
        query_norm=_optional_norm(attention.q_norm, kernels),
        key_norm=_optional_norm(attention.k_norm, kernels),
        rotation=rotation,
        output=_product(attention.o_proj),
        attention_norm=_optional_norm(block.attention_norm, kernels),
        second_norm=_norm(block.mlp_input_norm, kernels),
        mlp=_mlp(mlp, kernels),
        mlp_norm=_optional_norm(block.mlp_output_norm, kernels),
        scaling=layer.scaling,
        softcap=layer.softcap,
        window=layer.window,
    )


def _product(layer: Any) -> _Product:
    if not isinstance(layer, FusedLinear):
        raise CannotFuse(f"a linear layer's shape or build does not fit ({layer})")
    return _Product(layer.kernels, layer.packed, layer.bias)


def _mlp(block: Any, kernels: PaceKernels) -> _OneMLP | _Rows:
    if not isinstance(block, FusedMLP):
        raise CannotFuse(f"it has an MLP of another build, {type(block).__name__}")
    gate_up, down = block.gate_up_proj, block.down_proj
    both, last = _product(gate_up), _product(down)
    activation = _activation(block.act_fn, kernels)
    if activation is None or gate_up.bias is not None or down.bias is not None:
        act, half = block.act_fn, gate_up.out_features // 2

        def in_parts(rows: torch.Tensor) -> torch.Tensor:
            gate, up = both(rows).split_with_sizes((half, half), -1)
            return last(act(gate).mul_(up))

        return in_parts
    return _OneMLP(kernels, *both.packed.chunk(2), last.packed, activation)


def _activation(function: Any, kernels: PaceKernels) -> str | None:
    """What the kernels call an activation; None for one that they lack. The library's GELU by the
    hyperbolic tangent differs from the exact one by less than bfloat16 tells apart."""
    rows = torch.linspace(-8, 8, 1025, dtype=kernels.dtype)
    known: dict[str, _Rows] = {"silu": functional.silu, "gelu": functional.gelu}
    for name in kernels.activations:
        expected = known[name](rows)
        tolerance = torch.finfo(rows.dtype).eps * expected.abs().clamp(min=1)
        if bool(((function(rows) - expected).abs() <= tolerance).all()):
            return name
    return None


def _norm(norm: Any, kernels: PaceKernels) -> _Norm:
    if not isinstance(norm, NativeRMSNorm):
        return _PlainNorm(norm)
    weight = norm.factor.to(kernels.dtype)
    if not torch.equal(weight.to(norm.factor.dtype), norm.factor):
        return _PlainNorm(norm)
    fused = _KernelNorm(kernels, weight.contiguous(), norm.eps)
    probe = probe_rows(len(weight), weight)
    return fused if agree(norm(probe), fused(probe)) else _PlainNorm(norm)


def _optional_norm(norm: Any, kernels: PaceKernels) -> _Norm | None:
    return None if norm is None else _norm(norm, kernels)


class _NotingLayer(nn.Module):
    """Stands in a layer's place: notes what it reads, and puts out what it is told to."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        vars(self).update(
            {name: value for name, value in vars(layer).items() if name not in vars(self)}
        )
        self.read: list[torch.Tensor] = []
        self.rotations: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.puts_out: torch.Tensor | None = None

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, **_: Any
    ) -> torch.Tensor:
        self.read.append(hidden_states)
        self.rotations.append(position_embeddings)
        return hidden_states if self.puts_out is None else self.puts_out


@torch.inference_mode()
def _observe(module: Any, blocks: Sequence[Any], num_positions: int) -> list[_Rotation]:
    """Runs the model with other layers in the place of its own; returns the rotation of each.
    Raises `CannotFuse` where what is around them is not an embedding, a norm and a head."""
    base = module.base_model
    parts = {name for name, _ in base.named_children()}
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        raise CannotFuse(f"its decoder is made of {', '.join(sorted(parts))}")
    kinds = getattr(base.rotary_emb, "rope_type", "default")
    changing = _CHANGING_ROTATIONS & set(kinds.values() if isinstance(kinds, dict) else [kinds])
    if changing:
        raise CannotFuse(f"its rotations ({', '.join(changing)}) depend on the length")
    noting = [_NotingLayer(block).eval() for block in blocks]
    layers = layers_of(module)
    try:
        for index, one in enumerate(noting):
            layers[index] = one
        for start in range(0, num_positions, _POSITIONS_AT_ONCE):
            positions = torch.arange(start, min(start + _POSITIONS_AT_ONCE, num_positions))
            base(
                input_ids=torch.zeros_like(positions)[None], position_ids=positions[None],
                use_cache=False,
            )  # fmt: skip
        weight = base.embed_tokens.weight
        rows = probe_rows(weight.shape[1], weight)
        ids = torch.arange(rows.shape[1])[None] % len(weight)
        noting[-1].puts_out = rows
        found = module(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
        if not torch.equal(noting[0].read[-1], base.embed_tokens(ids)):
            raise CannotFuse("its first layer reads something else than its embedding")
        if not torch.equal(found.logits, module.get_output_embeddings()(base.norm(rows))):
            raise CannotFuse("its logits are something else than its head makes of its last norm")
    finally:
        for index, block in enumerate(blocks):
            layers[index] = block
    return [_rotation(one.rotations[:-1]) for one in noting]


def _rotation(parts: Sequence[_Rotation]) -> _Rotation:
    """Cosines and sines [positions, width / 2] of what a layer was given, [1, positions, width]."""
    tables = []
    for table in (torch.cat([part[which][0] for part in parts]) for which in (0, 1)):
        half = table.shape[1] // 2
        if not torch.equal(table[:, :half], table[:, half:]):
            raise CannotFuse("the halves of a head are rotated by different angles")
        tables.append(table[:, :half].contiguous())
    return tables[0], tables[1]


def _number(tables: list[_Rotation], rotation: _Rotation) -> int:
    """Which of the `tables` a rotation is, to which a new one is added."""
    for number, known in enumerate(tables):
        if all(torch.equal(*pair) for pair in zip(known, rotation, strict=True)):
            return number
    tables.append(rotation)
    return len(tables) - 1
