"""The fused CPU kernels of `amd-pace`, for bfloat16 on processors with AVX-512 BF16.

`amd-pace` requires exact versions of packages that only its own server needs. So it is installed
without dependencies, and only its shared library is loaded. The library registers the operators
`torch.ops.pace`, and is built for one version of torch."""
# `from __future__ import annotations` would hide the annotations of `FusedLayers` from TorchScript.

from functools import cache
from importlib import metadata
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from outrider.errors import OutriderError
from outrider.kernels import processor

PACKAGE = "amd-pace"
VERSION = "1.3.0"
TORCH_VERSION = "2.13"  # the version of torch for which `amd-pace` is built
_LIBRARY = "pace/lib/libpace_cpp.so"
_OUT_UNIT, _IN_UNIT = 32, 64
"""The sizes of a packed weight [out, in] are multiples of these numbers."""
_ISA = "vec16"  # selects the attention kernel for pages of 16 tokens


class KernelsUnavailable(OutriderError):
    """The kernels cannot be used. The message says why."""


class Attention(NamedTuple):
    """Tables for attention in a step whose T rows form S spans (see `fused_decoder.py`)."""

    starts: Tensor  # [S + 1], int32: the first row of each span, and T at the end
    ends: Tensor  # [S], int32: the number of slots up to and including the span's last token
    pages: Tensor  # [S, any], int32: the page table of each span's sequence
    schedules: list[Tensor]  # `PaceKernels.schedule` for each `LayerWeights.kind`


class LayerWeights(NamedTuple):
    """One layer of a decoder. The weights of linear layers are packed."""

    first_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    attention_norm: Tensor | None  # the norm of attention's output, if a layer has four norms
    second_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    mlp_norm: Tensor | None
    rotation: int  # an index of `FusedDecoder.rotations`
    kind: int  # an index of `FusedDecoder.windows`
    scaling: float
    softcap: float  # see `AttentionLayer`; 0 = no cap
    window: int  # how many earlier tokens a token sees; -1 = all


class LayerSizes(NamedTuple):
    """The sizes and the activation of a layer."""

    query_heads: int
    key_heads: int
    width: int
    eps: float
    activation: str


class FusedLayers(nn.Module):
    """All layers of a decoder. Rows are [1, T, D], contiguous.

    A step of 30 layers calls more than 300 operators. In Python, each call would release and take
    the GIL, for which other threads compete. TorchScript makes all calls without the GIL, which
    saves 1 ms for each step. TorchScript is deprecated, but torch `TORCH_VERSION` still has it."""

    weights: list[LayerWeights]

    def __init__(self, weights: list[LayerWeights], sizes: LayerSizes) -> None:
        super().__init__()
        self.query_heads, self.key_heads, self.width, self.eps, self.activation = sizes
        self.weights = weights
        self.isa = _ISA

    def forward(
        self,
        rows: Tensor,
        cos: list[Tensor],
        sin: list[Tensor],
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        spans: Attention,
        taps: list[int],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Runs the first N layers on embeddings `rows` [1, T, D]. `keys` and `values` are the
        caches of these N layers. `cos` and `sin` have a table [1, T, width / 2] for each rotation.
        `taps` are layers' indices in ascending order. Returns the last layer's output, the residual
        to be added to this output, and the inputs of the layers in `taps`."""
        residual = rows
        tapped: list[Tensor] = []
        for i in range(len(keys)):
            layer = self.weights[i]
            if i == 0:
                normed = self.norm(rows, layer.first_norm)
            else:
                normed, residual = self.add_norm(rows, residual, layer.first_norm)
            if i in taps:
                tapped.append(residual)
            heads = self.linear(normed, layer.qkv, layer.qkv_bias)
            query, key, value = heads.view(1, heads.size(1), -1, self.width).split_with_sizes(
                [self.query_heads, self.key_heads, self.key_heads], 2
            )
            query_norm, key_norm = layer.query_norm, layer.key_norm
            if query_norm is not None and key_norm is not None:
                query, key = self.norm(query, query_norm), self.norm(key, key_norm)
            query, key = self.rotate(query, key, cos[layer.rotation], sin[layer.rotation])
            self.write(key[0], value[0], keys[i], values[i], slots)
            output = torch.empty_like(query[0])
            self.attend(layer, query[0], keys[i], values[i], output, spans)
            rows = self.linear(output.view(1, output.size(0), -1), layer.output, layer.output_bias)
            attention_norm, mlp_norm = layer.attention_norm, layer.mlp_norm
            if attention_norm is not None:
                rows = self.norm(rows, attention_norm)
            normed, residual = self.add_norm(rows, residual, layer.second_norm)
            rows = self.mlp(normed, layer.gate, layer.up, layer.down)
            if mlp_norm is not None:
                rows = self.norm(rows, mlp_norm)
        return rows, residual, tapped

    def linear(self, rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.pace.libxsmmlinear_plain(rows, packed, bias)  # type: ignore[no-any-return]

    def mlp(self, rows: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch.ops.pace.libxsmm_fused_mlp(  # type: ignore[no-any-return]
            rows, gate, up, down, None, None, None, self.activation
        )

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns rows / sqrt(mean(rows^2) + eps) * weight, over the last axis. The weight may have
        a wider dtype than the rows, because the rows' dtype would round Gemma's weights 1 + w."""
        if weight.dtype == rows.dtype:
            return torch.ops.pace.rmsnorm(rows, weight, self.eps)  # type: ignore[no-any-return]
        wide = rows.to(weight.dtype)
        scale = torch.rsqrt(wide.square().mean(-1, True) + self.eps)
        return (wide * scale * weight).to(rows.dtype)

    def add_norm(self, rows: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the `norm` of rows + residual, and the sum itself."""
        if weight.dtype == rows.dtype:
            return torch.ops.pace.fused_add_rmsnorm(  # type: ignore[no-any-return]
                rows, residual, weight, self.eps
            )
        total = rows + residual
        return self.norm(total, weight), total

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys [1, T, heads, width]: (a, b) -> (a cos - b sin, b cos + a sin),
        where a and b are the halves of a head."""
        return torch.ops.pace.fused_rope_apply(query, key, cos, sin, 2)  # type: ignore[no-any-return]

    def write(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Writes keys and values [n, heads, width] to slots [n] of a layer's cache."""
        torch.ops.pace.paged_attention_reshape_and_cache(key, value, keys, values, slots, self.isa)

    def attend(
        self,
        layer: LayerWeights,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        spans: Attention,
    ) -> None:
        """Writes the causal attention of queries [T, heads, width] to `output`."""
        torch.ops.pace.paged_attention_with_kv_cache(
            query,
            keys,
            values,
            output,
            spans.starts,
            spans.ends,
            layer.scaling,
            True,
            None,
            layer.window,
            0,
            spans.pages,
            layer.softcap,
            spans.schedules[layer.kind],
            None,
        )


class PaceKernels:
    """The operators of `amd-pace`, and their requirements."""

    name: str = f"{PACKAGE} {VERSION}"
    dtype: torch.dtype = torch.bfloat16
    activations: Final = ("silu", "gelu")
    layers: type[FusedLayers] = FusedLayers

    def can_pack(self, num_out: int, num_in: int) -> bool:
        """Whether `pack` can pack a weight [out, in]."""
        return num_out % _OUT_UNIT == 0 and num_in % _IN_UNIT == 0

    def pack(self, weight: Tensor) -> Tensor:
        """Converts a weight [out, in] to the kernels' layout, [out / 32, in / 64, 32, 32, 2]."""
        num_out, num_in = weight.shape
        tiles = weight.view(num_out // _OUT_UNIT, _OUT_UNIT, num_in // _IN_UNIT, _IN_UNIT // 2, 2)
        return tiles.permute(0, 2, 3, 1, 4).contiguous()

    def unpack(self, packed: Tensor) -> Tensor:
        """Returns the weight [out, in] that `pack` has packed."""
        num_out, num_in = packed.shape[0] * _OUT_UNIT, packed.shape[1] * _IN_UNIT
        return packed.permute(0, 3, 1, 2, 4).reshape(num_out, num_in)

    def linear(self, rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """Returns rows [1, T, in] @ weight.T + bias, [1, T, out]."""
        return torch.ops.pace.libxsmmlinear_plain(rows, packed, bias)  # type: ignore[no-any-return]

    def schedule(
        self, starts: Tensor, ends: Tensor, sizes: LayerSizes, window: int | None
    ) -> Tensor:
        """Divides the work of attention among threads, for all layers with this window. Never
        splits a context: with a split, the order in which a row's terms are added would depend on
        the other rows of the step."""
        torch.get_num_threads()  # In a new thread, this call tells OpenMP the number of threads.
        schedule: Tensor = torch.ops.pace.get_paged_attention_scheduler_metadata(
            len(ends),
            sizes.query_heads,
            sizes.key_heads,
            sizes.width,
            ends,
            self.dtype,
            starts,
            True,
            -1 if window is None else window,
            _ISA,
            False,
        )
        return schedule


@cache
def load_pace() -> PaceKernels:
    """Loads the kernels, once in a process. Raises `KernelsUnavailable`."""
    if not processor.has_bfloat16():
        raise KernelsUnavailable("this processor has no AVX-512 BF16")
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise KernelsUnavailable(f"{PACKAGE} is not installed") from None
    if distribution.version != VERSION:
        raise KernelsUnavailable(f"{PACKAGE} {distribution.version} is installed, not {VERSION}")
    if not torch.__version__.startswith(f"{TORCH_VERSION}."):
        raise KernelsUnavailable(
            f"{PACKAGE} {VERSION} needs torch {TORCH_VERSION}, not {torch.__version__}"
        )
    try:
        path = str(distribution.locate_file(_LIBRARY))
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        return PaceKernels()
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise KernelsUnavailable(f"{PACKAGE}'s library cannot be loaded: {reason}") from error
