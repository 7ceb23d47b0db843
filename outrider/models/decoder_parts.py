"""The parts of a decoder of the Llama family, for engines that run the decoder themselves.

`outrider/models/module_replacement.py` has already replaced and probed the model's layers, so their
computation is known. Layers have two norms (Llama, Mistral, Qwen 2 and 3) or four (Gemma 3).

`DecoderParts` runs the model once with placeholders instead of layers, to learn the input of the
first layer, the rotation of each layer, and how logits follow from the last layer's output. If any
of the three differs from a Llama's, the code of transformers must run the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import OutriderError
from outrider.kv_cache.attention import AttentionLayer
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
_CHANGING_ROTATIONS = frozenset({"dynamic", "longrope"})  # they depend on a sequence's length
Rotation = tuple[Tensor, Tensor]  # cosines and sines [positions, width / 2]


class CannotFuse(OutriderError):
    """A model cannot run without the code of transformers. The message says why."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer of a decoder."""

    block: DirectLayer
    """Its attention is a `FusedAttention`, its MLP a `FusedMLP`, and its norms `NativeRMSNorm`."""
    attention: AttentionLayer  # keys and values have the same width
    rotation: int  # an index of `DecoderParts.rotations`

    @property
    def linears(self) -> tuple[Any, ...]:
        attention, mlp = self.block.self_attn, self.block.mlp
        return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj

    @property
    def norms(self) -> Iterator[Any]:
        block, attention = self.block, self.block.self_attn
        norms = (
            block.input_layernorm,
            block.attention_norm,
            block.mlp_input_norm,
            block.mlp_output_norm,
            attention.q_norm,
            attention.k_norm,
        )
        return (norm for norm in norms if norm is not None)


class DecoderParts:
    """All parts of a decoder. They share the model's weights."""

    def __init__(self, module: Any, layers: Sequence[AttentionLayer], max_model_len: int) -> None:
        """`layers` is the result of `find_layers`. Raises `CannotFuse`."""
        base = module.base_model
        blocks: list[Any] = list(getattr(base, "layers", ()))
        if not blocks or [layer.block for layer in layers] != [
            getattr(block, "self_attn", None) for block in blocks
        ]:
            raise CannotFuse("its layers are not those of a Llama")
        try:
            observed = _observe(module, blocks, max_model_len)
        except PROBE_ERRORS as error:
            raise CannotFuse(
                f"its decoder fails on the tokens of the self-check ({error})"
            ) from error
        self.rotations: list[Rotation] = []
        self.layers = [
            LayerParts(block, layer, _number(self.rotations, rotation))
            for block, layer, rotation in zip(blocks, layers, observed, strict=True)
        ]
        self.embed: Any = base.embed_tokens
        self.norm: Any = base.norm  # before the LM head
        self.head: Any = module.get_output_embeddings()
        self._check_classes()

    @property
    def norms(self) -> Iterator[NativeRMSNorm]:
        for layer in self.layers:
            yield from layer.norms
        yield self.norm

    def _check_classes(self) -> None:
        for layer in self.layers:
            shape = layer.attention.shape
            for module, kind, what in (
                (layer.block, DirectLayer, "a layer"),
                (layer.block.self_attn, FusedAttention, "attention"),
                (getattr(layer.block, "mlp", None), FusedMLP, "an MLP"),
            ):
                if not isinstance(module, kind):
                    raise CannotFuse(f"it has {what} of the class {type(module).__name__}")
            if shape.key_width != shape.value_width:
                raise CannotFuse("its keys and values have different widths")
        for norm in self.norms:
            if not isinstance(norm, NativeRMSNorm):
                raise CannotFuse(f"it has a norm of the class {type(norm).__name__}")


class _NotingLayer(nn.Module):
    """A placeholder for a layer. Records its input and rotation, and returns the input."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        own = vars(self)
        own |= {name: value for name, value in vars(layer).items() if name not in own}
        self.read = torch.empty(0)
        self.rotations: list[Rotation] = []

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
        self.read = hidden_states
        self.rotations.append(position_embeddings)
        return hidden_states


@torch.inference_mode()
def _observe(module: Any, blocks: Sequence[Any], num_positions: int) -> list[Rotation]:
    """Returns the rotation of each layer. Raises `CannotFuse` if the parts outside of the layers
    are not those of a Llama."""
    base = module.base_model
    parts = {name for name, _ in base.named_children()}
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        raise CannotFuse(f"its decoder's parts differ from a Llama's: {', '.join(sorted(parts))}")
    kinds = getattr(base.rotary_emb, "rope_type", "default")
    changing = _CHANGING_ROTATIONS & set(kinds.values() if isinstance(kinds, dict) else [kinds])
    if changing:
        raise CannotFuse(f"its rotations ({', '.join(changing)}) depend on the length of a text")
    noting = [_NotingLayer(block).eval() for block in blocks]
    layers = layers_of(module)
    try:
        for index, layer in enumerate(noting):
            layers[index] = layer
        for start in range(0, num_positions, _POSITIONS_AT_ONCE):
            positions = torch.arange(start, min(start + _POSITIONS_AT_ONCE, num_positions))[None]
            base(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
        rotations = [_rotation(layer.rotations) for layer in noting]
        ids = torch.arange(_OBSERVED_TOKENS)[None] % len(base.embed_tokens.weight)
        output = module(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
        rows = base.embed_tokens(ids)
        if not torch.equal(noting[0].read, rows):
            raise CannotFuse("the input of its first layer is not the output of its embedding")
        if not torch.equal(output.logits, module.get_output_embeddings()(base.norm(rows))):
            raise CannotFuse("its logits are not computed by its last norm and its LM head alone")
    finally:
        for index, block in enumerate(blocks):
            layers[index] = block
    return rotations


def _rotation(parts: Sequence[Rotation]) -> Rotation:
    """Joins a layer's cosines and sines [1, positions, width] to tables [positions, width / 2]."""
    tables = []
    for table in (torch.cat([part[which][0] for part in parts]) for which in (0, 1)):
        half = table.shape[1] // 2
        if not torch.equal(table[:, :half], table[:, half:]):
            raise CannotFuse("the halves of a head are rotated by different angles")
        tables.append(table[:, :half].contiguous())
    return tables[0], tables[1]


def _number(tables: list[Rotation], rotation: Rotation) -> int:
    """Returns the index of a rotation in `tables`. Appends the rotation if it is missing."""
    for number, known in enumerate(tables):
        if all(torch.equal(*pair) for pair in zip(known, rotation, strict=True)):
            return number
    tables.append(rotation)
    return len(tables) - 1
