"""Replaces modules of a loaded model by faster modules with the same call signature, and the same
result up to rounding. On a CPU, linear layers are also replaced (`linear_layers.py`).

The names and shapes of a module's parts suggest a replacement, but only a call shows whether the
module computes anything else, for example clamps its output. So a probe calls the module and its
replacement with a few random rows of different magnitudes. The probe of an MLP or attention leaves
out the last linear layer, because the replacement has the same layer, and a call of this layer may
wait for other ranks. If the probe fails, only the linear layers in the module are replaced. Nothing
is replaced in a module with hooks, or with a `forward` that is set on the instance. A replacement
runs no hooks: its `__call__` is `forward`, which saves a millisecond in a step of 30 layers."""

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from outrider.errors import InvariantError, check
from outrider.kernels.cpu import PaceKernels
from outrider.models.linear_layers import fastest_linear

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class NativeRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis, computed at least in
    float32: [..., D] -> [..., D]. Computes sqrt(mean(x^2) + eps) as hypot(|x|, sqrt(D eps)) /
    sqrt(D), which takes five operators on a CPU. `functional.rms_norm` takes nine."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._inside = torch.promote_types(weight.dtype, torch.float32)
        self.factor = weight.detach().to(self._inside) + offset
        self._scale = self.factor * self.factor.numel() ** 0.5
        self._floor = self._scale.new_tensor((self.factor.numel() * eps) ** 0.5)
        self._has_kernel = weight.is_cuda and offset == 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self._has_kernel:
            shape = tuple(self.weight.shape)
            normed: Tensor = functional.rms_norm(hidden_states, shape, self.weight, self.eps)
            return normed
        inside = hidden_states.to(self._inside, copy=True)
        norms: Tensor = torch.linalg.vector_norm(inside, dim=-1, keepdim=True)
        return inside.div_(norms.hypot_(self._floor)).mul_(self._scale).to(hidden_states.dtype)

    __call__ = forward


class FusedMLP(nn.Module):
    """A gated MLP, down(act(gate(x)) * up(x)): [..., D] -> [..., D]. Computes gate and up in one
    product."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate_up_proj = _joined(block.gate_proj, block.up_proj)
        self.down_proj = block.down_proj
        self.act_fn = block.act_fn
        self._halves = (block.gate_proj.out_features, block.up_proj.out_features)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden_states).split_with_sizes(self._halves, -1)
        output: Tensor = self.down_proj(self.act_fn(gate).mul_(up))
        return output

    __call__ = forward


class DirectLayer(nn.Module):
    """A decoder layer, [..., D] -> [..., D], that calls the modules of `layer` with less overhead.
    With h' = h + attention(norm(h)), the output is h' + mlp(norm(h')). A layer with four norms (as
    in Gemma) also norms the outputs of attention and MLP."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        vars(self).update(_own_attributes(layer))
        self.input_layernorm: Any = layer.input_layernorm
        self.self_attn: Any = layer.self_attn
        self.attention_norm: Any = None  # the norm of attention's output
        self.mlp_input_norm: Any = layer.post_attention_layernorm
        self.mlp: Any = layer.mlp
        self.mlp_output_norm: Any = None
        if hasattr(layer, "pre_feedforward_layernorm"):
            self.attention_norm = layer.post_attention_layernorm
            self.mlp_input_norm = layer.pre_feedforward_layernorm
            self.mlp_output_norm = layer.post_feedforward_layernorm

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        rows, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        if self.attention_norm is not None:
            rows = self.attention_norm(rows)
        hidden_states = hidden_states + rows
        output: Tensor = self.mlp(self.mlp_input_norm(hidden_states))
        if self.mlp_output_norm is not None:
            output = self.mlp_output_norm(output)
        return hidden_states + output

    __call__ = forward


class FusedAttention(nn.Module):
    """Attention with rotary positions. Computes queries, keys and values in one product. Has the
    attributes of `block`, because attention functions read attributes of the attention module."""

    config: Any

    def __init__(
        self, block: Any, eager: Callable[..., Any], interface_options: dict[str, Any]
    ) -> None:
        """`eager` is the block's default attention function. `interface_options` are the options
        that the block passes to attention functions."""
        super().__init__()
        vars(self).update(_own_attributes(block))
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
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output [B, T, D] and the attention function's weights. `position_embeddings`
        are cosines and sines, each [B or 1, T, head width]. `past_key_values` must be None, because
        the attention function stores keys and values."""
        if past_key_values is not None:
            raise InvariantError("a model with replaced modules takes no cache of transformers")
        shape = hidden_states.shape[:-1]
        # [B, T, all heads, head width]
        heads = self.qkv_proj(hidden_states).view(*shape, -1, 2 * self._half)
        rotating, value = heads.split_with_sizes(self._rotating_and_rest, 2)
        rotated = self._rotated(self._normed(rotating), *position_embeddings)
        query, key = rotated.transpose(1, 2).split_with_sizes(self._queries_and_keys, 1)
        value = value.transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self._eager
        )
        output, weights = attend(
            self, query, key, value, attention_mask, **self._interface_options, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1)), weights

    __call__ = forward

    def _normed(self, heads: Tensor) -> Tensor:
        if self.q_norm is None or self.k_norm is None:
            return heads
        query, key = heads.split_with_sizes(self._queries_and_keys, 2)
        return torch.cat((self.q_norm(query), self.k_norm(key)), dim=2)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(a, b) -> (a, b) * cos + (-b, a) * sin, where a and b are the two halves of a head."""
        swapped = heads.roll(self._half, -1)
        return torch.addcmul(heads * cos.unsqueeze(2), swapped, (sin * self._signs).unsqueeze(2))


def _own_attributes(block: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(block).items() if name not in _OF_EVERY_MODULE}


def _joined(*linears: nn.Linear) -> nn.Linear:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


_MLP_CHILDREN = {"gate_proj", "up_proj", "down_proj"}
_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION_NORMS = {"q_norm", "k_norm"}
_LAYER_CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_MLP_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION_PARAMETERS = {
    "hidden_states",
    "position_embeddings",
    "attention_mask",
    "past_key_values",
    "kwargs",
}
_PLAIN_OPTION = (bool, int, float, str, type(None))

_PACKAGE = "outrider.models."
_log = logging.getLogger(__name__)


def speed_up(
    module: nn.Module, kernels: PaceKernels | None = None, packs_linears: bool = True
) -> None:
    """Replaces modules of a causal language model that is in evaluation mode, for inference only.
    Linear layers use the `kernels` if the kernels can pack their weights. If not `packs_linears`,
    linear layers stay as they are.

    Needs memory for the model and one more block, because weights are copied and freed block by
    block. A weight that head and embedding share is copied for the head. Call `to` and
    `load_state_dict` first, because they do not change the weights of replacements."""
    check(not module.training, "only a model in evaluation mode can be sped up")
    with torch.no_grad():
        for replacement in (_native_norm, _fused_mlp, _fused_attention, _direct_layer):
            _swap(module, replacement)
    if packs_linears:
        pack_linears(module, kernels)
    replaced = [part for part in module.modules() if type(part).__module__.startswith(_PACKAGE)]
    counts = Counter(type(part).__name__ for part in replaced)
    _log.info("replaced modules: %s", dict(counts) or "none")


def pack_linears(module: nn.Module, kernels: PaceKernels | None = None) -> None:
    """Replaces the linear layers of a model. See `speed_up`."""
    with torch.no_grad():
        _swap(module, partial(_quick_linear, kernels=kernels))


def _swap(parent: nn.Module, replacement: Callable[[Any], nn.Module | None]) -> None:
    for name, child in list(parent.named_children()):
        if _is_hooked(child):
            continue
        new = replacement(child)
        if new is None:
            _swap(child, replacement)
        else:
            setattr(parent, name, new.eval())


def _native_norm(block: Any) -> nn.Module | None:
    eps = getattr(block, "variance_epsilon", getattr(block, "eps", None))
    if list(block.children()) or not isinstance(eps, float) or _tensors(block) != ["weight"]:
        return None
    if block.weight.dim() != 1:
        return None
    for offset in (0.0, 1.0):
        norm = NativeRMSNorm(block.weight, eps, offset)
        if _same_rows(block, norm, block.weight.numel(), block.weight):
            return norm
    return None


def _fused_mlp(block: Any) -> nn.Module | None:
    if block._modules.keys() - {"act_fn"} != _MLP_CHILDREN or not hasattr(block, "act_fn"):
        return None
    gate, up = block.gate_proj, block.up_proj
    if _tensors(block) or not _joinable(gate, up) or gate.weight.shape != up.weight.shape:
        return None
    fused = FusedMLP(block)
    same = _same_rows(block, fused, gate.in_features, gate.weight, last="down_proj")
    return fused if same else None


def _fused_attention(block: Any) -> nn.Module | None:
    children = block._modules.keys()
    if children not in (_ATTENTION_CHILDREN, _ATTENTION_CHILDREN | _ATTENTION_NORMS):
        return None
    if inspect.signature(block.forward).parameters.keys() != _ATTENTION_PARAMETERS:
        return None
    linears = (block.q_proj, block.k_proj, block.v_proj)
    eager = getattr(sys.modules[type(block).__module__], "eager_attention_forward", None)
    if eager is None or _tensors(block) or not _joinable(*linears):
        return None
    width, weight = linears[0].in_features, linears[0].weight
    head_dim = getattr(block, "head_dim", 0)
    if not head_dim or head_dim % 2 or any(p.out_features % head_dim for p in linears):
        return None
    if _call_attention(block, width, weight, head_dim // 2) is not None:
        return None  # The block rotates only a part of each head, as in GLM.
    called = _call_attention(block, width, weight, head_dim)
    if called is None or not all(isinstance(v, _PLAIN_OPTION) for v in called[1].values()):
        return None
    fused = FusedAttention(block, eager, called[1])
    again = _call_attention(fused, width, weight, head_dim)
    return fused if again is not None and all(map(_agree, called[0], again[0])) else None


def _direct_layer(layer: Any) -> nn.Module | None:
    children = layer._modules.keys()
    if children not in (_LAYER_CHILDREN, _LAYER_CHILDREN | _MLP_NORMS) or _tensors(layer):
        return None
    return DirectLayer(layer) if _same_wiring(layer, DirectLayer) else None


def _quick_linear(layer: Any, kernels: PaceKernels | None) -> nn.Module | None:
    is_conv = type(layer) is Conv1D
    if not is_conv and not _is_plain(layer):
        return None
    weight = layer.weight.t() if is_conv else layer.weight
    new = fastest_linear(weight, layer.bias, kernels)
    if kernels is None or new is None or _same_rows(layer, new, weight.shape[1], weight):
        return new
    return fastest_linear(weight, layer.bias)


def _joinable(*linears: nn.Module) -> bool:
    return all(
        _is_plain(linear)
        and not _is_hooked(linear)
        and linear.in_features == linears[0].in_features
        and (linear.bias is None) == (linears[0].bias is None)
        for linear in linears
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether this is torch's own linear layer, and not quantised."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _tensors(block: nn.Module) -> list[str]:
    return [
        name for name, tensor in (block._parameters | block._buffers).items() if tensor is not None
    ]


PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
"""A module that cannot take a probe raises these errors."""
_SIZES = (1e-3, 1.0, 1.0, 1e2)
_ROUNDINGS = 64
_ROUNDINGS_SHORT = 8  # for dtypes under 32 bits, whose sums are computed in 32 bits
"""Two results x and y of a row agree if |x - y| <= `_ROUNDINGS` * eps * max(|x|). eps is the
machine epsilon."""
_PROBE = "outrider_probe"


def _probe_rows(width: int, like: Tensor) -> Tensor:
    """Returns random rows [1, 4, width] with magnitudes `_SIZES`, in the dtype and on the device of
    `like`. Equal arguments yield equal rows."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(1, len(_SIZES), width, generator=generator, dtype=torch.float64)
    return (rows * torch.tensor(_SIZES, dtype=torch.float64)[:, None]).to(like)


def _agree(first: Tensor, other: Tensor) -> bool:
    """Whether two results [..., D] of one probe are equal up to rounding."""
    if first.shape != other.shape or first.dtype != other.dtype:
        return False
    info = torch.finfo(first.dtype)
    roundings = _ROUNDINGS_SHORT if info.bits < 32 else _ROUNDINGS
    first, other = first.double(), other.double()
    largest = first.abs().amax(-1, keepdim=True)
    return bool(((first - other).abs() <= roundings * info.eps * largest).all())


def _same_rows(
    original: nn.Module, replacement: nn.Module, width: int, like: Tensor, last: str = ""
) -> bool:
    """Whether two modules map a probe [1, 4, width] to the same rows, if the layer `last` is left
    out of both modules."""
    rows = _probe_rows(width, like)
    replaced = {last: nn.Identity()} if last else {}
    try:
        with _replaced(original, **replaced), _replaced(replacement, **replaced):
            return _agree(original(rows), replacement(rows))
    except PROBE_ERRORS:
        return False


def _same_wiring(layer: nn.Module, replacement: Callable[[Any], nn.Module]) -> bool:
    """Whether a layer and its replacement connect their blocks in the same way. With simple
    functions as blocks, both must return the same output and pass the same arguments to
    attention."""
    called: list[dict[str, Any]] = []

    def attend(hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        called.append(given)
        return hidden_states * 3 + 1, None

    blocks = {
        name: _Stub(lambda rows, name=name: rows * len(name) + 1)
        for name, child in layer.named_children()
        if child is not layer.self_attn
    }
    given = {
        "attention_mask": 1,
        "position_ids": 2,
        "past_key_values": 3,
        "use_cache": False,
        "position_embeddings": (4, 5),
        "more": 6,
    }
    rows = torch.arange(4.0, dtype=torch.float64).view(1, 2, 2)
    try:
        with _replaced(layer, self_attn=_Stub(attend), **blocks):
            outputs = [each(rows, **given) for each in (layer, replacement(layer))]
            return torch.equal(*outputs) and called[0] == called[1]
    except PROBE_ERRORS:
        return False


class _Stub(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _call_attention(
    block: Any, width: int, like: Tensor, rotated: int
) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
    """Runs a probe [1, 4, width] through an attention `block`, up to the layer `o_proj`. The first
    `rotated` elements of each head get a rotary angle. Returns two things: (query, key, value,
    input of `o_proj`), and the options that the block itself passes to the attention function.
    Returns None if the block cannot be called like Llama's attention."""
    rows, angles = _probe_rows(width, like), _probe_rows(rotated, like)
    calls: list[Any] = []
    mask, given = object(), {"position_ids": angles[..., 0].long(), "calls": calls}
    try:
        # A deep copy, because setting `_attn_implementation` also changes nested configurations.
        config = deepcopy(block.config)
        config._attn_implementation = _PROBE
        with _replaced(block, config=config, o_proj=nn.Identity()):
            output, _ = block(
                hidden_states=rows,
                position_embeddings=(angles.cos(), angles.sin()),
                attention_mask=mask,
                **given,
            )
        [(states, got_mask, options)] = calls
    except PROBE_ERRORS:
        return None
    if got_mask is not mask or any(options.pop(name, None) is not given[name] for name in given):
        return None
    return (*states, output), options


def _note(
    block: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    options["calls"].append(((query, key, value), attention_mask, options))
    return query.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_PROBE, _note)


@contextmanager
def _replaced(block: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(block, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(block, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(block, name, value)
