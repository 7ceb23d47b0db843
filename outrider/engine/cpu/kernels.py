"""The fused CPU kernels of `amd-pace`: bfloat16, on processors with AVX-512 BF16.

`amd-pace` pins versions of packages that its own server needs, so it is installed without its
dependencies, and its package is not imported here: its shared library alone is loaded, which
registers the operators `torch.ops.pace`. The library is built for one version of torch.
"""
# Annotations are not postponed: TorchScript reads those of `_LayersAtOnce`.

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Final

import torch
from torch import nn

from outrider.errors import OutriderError
from outrider.kv_cache.storage import BlockedKeysAndValues

PACKAGE: Final = "amd-pace"
VERSION: Final = "1.3.0"
TORCH_VERSION: Final = "2.13"
"""What `VERSION` of the library is built for."""
_LIBRARY: Final = "pace/lib/libpace_cpp.so"
_OUT_UNIT: Final = 32
_IN_UNIT: Final = 64
"""Widths of a packed weight are multiples of these."""
_ISA: Final = "vec16"
"""The attention for pages of 16 tokens."""


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


class PaceKernels:
    """The operators. Rows are [1, T, width], contiguous."""

    name: str = f"{PACKAGE} {VERSION}"
    dtype: torch.dtype = torch.bfloat16
    """Of rows, weights, keys and values."""
    page_size = 16
    activations: Final = ("silu", "gelu")
    """Those of `mlp`."""

    def __init__(self) -> None:
        """The operators must be registered; see `load_pace`."""
        operators: Any = torch.ops.pace
        self.linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = (
            operators.libxsmmlinear_plain.default
        )
        """(rows, packed weight, bias) -> rows @ weight.T + bias, [1, T, out]."""
        self.norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = (
            operators.rmsnorm.default
        )
        """(rows, weight, eps) -> rows / sqrt(mean(rows^2) + eps) * weight, over the last axis of
        any number of axes."""
        self.add_norm: Callable[
            [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
        ] = operators.fused_add_rmsnorm.default
        """(rows, residual, weight, eps) -> `norm` of rows + residual, and that sum."""
        self._mlp = operators.libxsmm_fused_mlp.default
        self._rotate = operators.fused_rope_apply.default
        self._write = operators.paged_attention_reshape_and_cache.default
        self._schedule = operators.get_paged_attention_scheduler_metadata.default
        self._attend = operators.paged_attention_with_kv_cache.default

    def can_pack(self, num_out: int, num_in: int) -> bool:
        """Whether a weight [out, in] can be packed."""
        return num_out % _OUT_UNIT == 0 and num_in % _IN_UNIT == 0

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [out, in] in the layout of `linear`: [out / 32, in / 64, 32, 32, 2]."""
        num_out, num_in = weight.shape
        tiles = weight.view(num_out // _OUT_UNIT, _OUT_UNIT, num_in // _IN_UNIT, _IN_UNIT // 2, 2)
        return tiles.permute(0, 2, 3, 1, 4).contiguous()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] again."""
        num_out, num_in = packed.shape[0] * _OUT_UNIT, packed.shape[1] * _IN_UNIT
        return packed.permute(0, 3, 1, 2, 4).reshape(num_out, num_in)

    def mlp(
        self,
        rows: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """down(activation(gate(rows)) * up(rows)), of packed weights."""
        output: torch.Tensor = self._mlp(rows, gate, up, down, None, None, None, activation)
        return output

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary positions of queries and keys [1, T, heads, width], by the cosines and sines
        [1, T, width / 2] of the angles: (a, b) -> (a cos - b sin, b cos + a sin), with halves a
        and b of a head's width."""
        rotated: tuple[torch.Tensor, torch.Tensor] = self._rotate(query, key, cos, sin, 2)
        return rotated

    def write(
        self,
        cache: BlockedKeysAndValues,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Puts keys and values [T, heads, width] into slots [T] of a cache."""
        self._write(keys, values, cache.keys, cache.values, slots, _ISA)

    def schedule(
        self, spans: Spans, query_heads: int, key_heads: int, width: int, window: int | None
    ) -> torch.Tensor:
        """How `attend` shares its work among threads, for all layers of one kind. It is never split
        along the context, where the number of splits, and with it the order of a row's sums, would
        depend on the rest of the step. The kernels ask OpenMP for the number of threads, which
        torch sets on a thread that is new when it is first asked for it."""
        torch.get_num_threads()
        found: torch.Tensor = self._schedule(
            len(spans.ends), query_heads, key_heads, width, spans.ends, self.dtype, spans.starts,
            True, -1 if window is None else window, _ISA, False,
        )  # fmt: skip
        return found

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
        output = torch.empty_like(query)
        left, right = (-1, 0) if window is None else (window - 1, 0)
        self._attend(
            query, cache.keys, cache.values, output, spans.starts, spans.ends, scaling, True, None,
            left, right, spans.pages, softcap or 0.0, schedule, None,
        )  # fmt: skip
        return output

    def at_once(
        self, layers: Sequence[Any], caches: Sequence[BlockedKeysAndValues], kinds: Sequence[int]
    ) -> RunLayers | None:
        """All `FusedLayer`s in one call on their caches, bit for bit what their operators make one
        by one; `kinds` are the numbers of their schedules. None for layers that are not made of the
        operators alone, or that differ in what the call has once."""
        shared = {layer.of_operators for layer in layers}
        if len(shared) != 1 or None in shared:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Of TorchScript.
            scripted: Any = torch.jit.script(_LayersAtOnce(layers, caches, kinds).eval())

        def run(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            # Else the first steps of each shape would wait for a compiler that gains nothing here.
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
                found: tuple[torch.Tensor, torch.Tensor] = scripted(*given)
            return found

        return run


@cache
def load_pace() -> PaceKernels:
    """The kernels, once for the process. Raises `KernelsUnavailable` with the reason."""
    capabilities = torch.cpu.get_capabilities()
    if not (capabilities.get("avx512_f") and capabilities.get("avx512_bf16")):
        raise KernelsUnavailable("this processor has no AVX-512 BF16")
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise KernelsUnavailable(f"{PACKAGE} is not installed") from None
    if distribution.version != VERSION:
        raise KernelsUnavailable(f"{PACKAGE} {distribution.version} is installed, not {VERSION}")
    if not torch.__version__.startswith(f"{TORCH_VERSION}."):
        raise KernelsUnavailable(
            f"{PACKAGE} {VERSION} is built for torch {TORCH_VERSION}; this is {torch.__version__}"
        )
    try:
        path = str(distribution.locate_file(_LIBRARY))
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        return PaceKernels()
    except (OSError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise KernelsUnavailable(f"{PACKAGE}'s library cannot be loaded: {reason}") from error


class _LayersAtOnce(nn.Module):
    """All layers of a decoder in one call; what differs between them stands in lists.

    A step of 30 layers calls more than 300 operators, and after each one Python takes back its
    lock, which the thread that talks to other processes may hold. TorchScript runs them all without
    the lock, and saves 1 ms of a step. It is deprecated, but part of the one version of torch that
    the operators are built for.
    """

    qkv_bias: list[torch.Tensor | None]
    query_norm: list[torch.Tensor | None]
    key_norm: list[torch.Tensor | None]
    output_bias: list[torch.Tensor | None]
    attention_norm: list[torch.Tensor | None]
    mlp_norm: list[torch.Tensor | None]

    def __init__(
        self, layers: Sequence[Any], caches: Sequence[BlockedKeysAndValues], kinds: Sequence[int]
    ) -> None:
        super().__init__()
        (self.query_heads, self.key_heads, _), self.width, self.eps, self.activation = layers[
            0
        ].of_operators
        self.num_layers, self.isa = len(layers), _ISA
        self.keys = [cache.keys for cache in caches]
        self.values = [cache.values for cache in caches]
        self.kind = list(kinds)

        def weights(norm: str) -> list[Any]:
            return [getattr(getattr(one, norm), "weight", None) for one in layers]

        self.first_norm, self.second_norm = weights("first_norm"), weights("second_norm")
        self.query_norm, self.key_norm = weights("query_norm"), weights("key_norm")
        self.attention_norm, self.mlp_norm = weights("attention_norm"), weights("mlp_norm")
        self.qkv = [one.qkv.packed for one in layers]
        self.qkv_bias = [one.qkv.bias for one in layers]
        self.rotation = [one.rotation for one in layers]
        self.scaling = [one.scaling for one in layers]
        self.window = [-1 if one.window is None else one.window - 1 for one in layers]
        self.softcap = [one.softcap or 0.0 for one in layers]
        self.output = [one.output.packed for one in layers]
        self.output_bias = [one.output.bias for one in layers]
        self.gate = [one.mlp.gate for one in layers]
        self.up = [one.mlp.up for one in layers]
        self.down = [one.mlp.down for one in layers]

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


class FusedLinear(nn.Module):
    """`nn.Linear` for inference: [..., in] -> [..., out], in the dtype of the kernels."""

    def __init__(
        self, kernels: PaceKernels, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Copies `weight` [out, in] into the layout of the kernels, which must be able to pack one
        of its shape."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kernels = kernels
        # Not parameters: those are looked up at each use, which costs as much as a small operator.
        self.packed = kernels.pack(weight.detach().contiguous())
        """See `PaceKernels.pack`."""
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
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def can_fuse(kernels: PaceKernels, weight: torch.Tensor) -> bool:
    """Whether a weight [out, in] is of a dtype and shape that the kernels have a product for."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == kernels.dtype
        and kernels.can_pack(*weight.shape)
    )
