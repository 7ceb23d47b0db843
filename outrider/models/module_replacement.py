"""Makes a loaded model faster in place: stand-ins for its modules, each with the same call
signature and the same result up to rounding.

what                          stands in for                          where
`NativeRMSNorm`               root mean square norms                 everywhere
`FusedMLP`                    gated MLPs                             everywhere
`FusedAttention`              attention with rotary positions        everywhere
`DirectLayer`                 layers of norm, attention, norm, MLP   everywhere
`FusedLinear`                 linear layers, what is fused included  CPU with fused kernels
`PackedLinear`                the same                               CPU, bfloat16 and float32
`WidenedLinear`               the same                               CPU that has no bfloat16
`Int8Linear`, `Int4Linear`    the same, where rounding is wanted     8 bits anywhere, 4 on CPU

A module that is not of the expected build, or whose stand-in does not give the same result
(`module_probes.py`), stays as it is; its linear layers are packed all the same. Modules with hooks,
or with a `forward` of their own, are somebody else's and stay too. Stand-ins take no hooks: to call
one is to call its `forward`, which saves a step of 30 layers a millisecond.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.engine.cpu.fused_linear import FusedLinear, can_fuse
from outrider.engine.cpu.kernels import Kernels
from outrider.errors import ConfigError, check
from outrider.models.llama_blocks import (
    DirectLayer,
    FusedAttention,
    FusedMLP,
    NativeRMSNorm,
)
from outrider.models.module_probes import (
    PROBE_ERRORS,
    call_attention,
    same_call,
    same_rows,
    same_wiring,
)
from outrider.models.packed_linear import PackedLinear, can_pack
from outrider.models.quantized_linear import quantized
from outrider.models.widened_linear import WidenedLinear, must_widen

_MLP_CHILDREN: Final = {"gate_proj", "up_proj", "down_proj"}
_ATTENTION_CHILDREN: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION_NORMS: Final = {"q_norm", "k_norm"}
_LAYER_CHILDREN: Final = {
    "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
}  # fmt: skip
_MLP_NORMS: Final = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION_PARAMETERS: Final = {
    "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs",
}  # fmt: skip
_PLAIN_OPTION: Final = (bool, int, float, str, type(None))

_log = logging.getLogger(__name__)


def speed_up(module: nn.Module, bits: int | None = None, kernels: Kernels | None = None) -> None:
    """Swaps what it can of a causal language model in evaluation mode, for inference alone. With
    `bits` of 8 or 4 its linear layers are rounded to so many; raises `ConfigError` where none can.
    Others have the product of the `kernels`, where that fits.

    The weights that a stand-in has taken over, in its own order or layout, are given back as it
    takes them: beyond the model's size this needs the room of one block. Only a head that shares
    its weight with the embedding is copied, because the embedding keeps its rows. Call this last:
    neither `to` nor `load_state_dict` reaches a stand-in's weights.
    """
    check(not module.training, "only a model in evaluation mode can be sped up")
    swapped: Counter[str] = Counter()
    with torch.no_grad():
        for stand_in in (_native_norm, _fused_mlp, _fused_attention, _direct_layer):
            _swap(module, stand_in, swapped)
        if bits is not None:
            before = swapped.total()
            _swap(module, partial(_quantized_linear, bits=bits), swapped)
            if swapped.total() == before:
                raise ConfigError(
                    f"none of the model's linear layers can be rounded to {bits} bits on this "
                    "device; 8 bits need an 8-bit kernel there, 4 bits a CPU and widths that are "
                    "multiples of 32"
                )
        _swap(module, partial(_quick_linear, kernels=kernels), swapped)
    _log.info("modules swapped: %s", dict(swapped) or "none")


def _swap(
    parent: nn.Module, stand_in: Callable[[Any], nn.Module | None], swapped: Counter[str]
) -> None:
    for name, child in list(parent.named_children()):
        if child._forward_hooks or child._forward_pre_hooks or "forward" in vars(child):
            continue
        found = stand_in(child)
        if found is None:
            _swap(child, stand_in, swapped)
        else:
            setattr(parent, name, found.eval())
            swapped[type(found).__name__] += 1


def _native_norm(block: Any) -> nn.Module | None:
    eps = getattr(block, "variance_epsilon", getattr(block, "eps", None))
    if list(block.children()) or not isinstance(eps, float):
        return None
    if [name for name, _ in _tensors(block)] != ["weight"] or block.weight.dim() != 1:
        return None
    for offset in (0.0, 1.0):
        norm = NativeRMSNorm(block.weight, eps, offset)
        if same_rows(block, norm, block.weight.numel(), block.weight):
            return norm
    return None


def _fused_mlp(block: Any) -> nn.Module | None:
    children = dict(block.named_children())
    if children.keys() - {"act_fn"} != _MLP_CHILDREN or not callable(
        getattr(block, "act_fn", None)
    ):
        return None
    gate, up = block.gate_proj, block.up_proj
    if list(_tensors(block)) or not _joinable(gate, up) or gate.weight.shape != up.weight.shape:
        return None
    fused = FusedMLP(block)
    same = same_rows(block, fused, gate.in_features, gate.weight, last="down_proj")
    return fused if same else None


def _fused_attention(block: Any) -> nn.Module | None:
    children = block._modules.keys()
    if children not in (_ATTENTION_CHILDREN, _ATTENTION_CHILDREN | _ATTENTION_NORMS):
        return None
    if inspect.signature(block.forward).parameters.keys() != _ATTENTION_PARAMETERS:
        return None
    linears = (block.q_proj, block.k_proj, block.v_proj)
    eager = getattr(sys.modules[type(block).__module__], "eager_attention_forward", None)
    if eager is None or list(_tensors(block)) or not _joinable(*linears):
        return None
    width, weight = linears[0].in_features, linears[0].weight
    try:
        if block.head_dim % 2 or any(p.out_features % block.head_dim for p in linears):
            return None
    except PROBE_ERRORS:
        return None
    called = call_attention(block, width, weight)
    if called is None or not all(isinstance(v, _PLAIN_OPTION) for v in called.options.values()):
        return None
    fused = FusedAttention(block, eager, called.options)
    again = call_attention(fused, width, weight)
    return fused if again is not None and same_call(called, again) else None


def _direct_layer(layer: Any) -> nn.Module | None:
    children = layer._modules.keys()
    if children not in (_LAYER_CHILDREN, _LAYER_CHILDREN | _MLP_NORMS) or list(_tensors(layer)):
        return None
    direct = DirectLayer(layer)
    return direct if same_wiring(layer, direct) else None


def _quick_linear(layer: Any, kernels: Kernels | None) -> nn.Module | None:
    weight = _linear_weight(layer)
    if weight is None:
        return None
    if kernels is not None and can_fuse(kernels, weight):
        fused = FusedLinear(kernels, weight, layer.bias)
        if same_rows(layer, fused, weight.shape[1], weight):
            return fused
    if can_pack(weight):
        return PackedLinear(weight, layer.bias)
    return WidenedLinear(weight, layer.bias) if must_widen(weight) else None


def _quantized_linear(layer: Any, bits: int) -> nn.Module | None:
    weight = _linear_weight(layer)
    return None if weight is None else quantized(weight, layer.bias, bits)


def _linear_weight(layer: Any) -> torch.Tensor | None:
    """The weight [out, in] of a linear layer of the library or of torch; None for other modules."""
    found: torch.Tensor | None = None
    if type(layer) is nn.Linear:
        found = layer.weight
    elif type(layer) is Conv1D:
        found = layer.weight.t()
    return found


def _joinable(*linears: nn.Module) -> bool:
    """Whether these can become one layer: plain, of the same input, all or none with a bias."""
    return all(
        type(linear) is nn.Linear
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and linear.in_features == linears[0].in_features
        and (linear.bias is None) == (linears[0].bias is None)
        for linear in linears
    )


def _tensors(block: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and buffers, without its children's."""
    return [*block.named_parameters(recurse=False), *block.named_buffers(recurse=False)]
