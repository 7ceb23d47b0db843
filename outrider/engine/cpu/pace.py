"""The fused CPU kernels of `amd-pace`: bfloat16, on processors with AVX-512 BF16.

`amd-pace` pins versions of packages that its own server needs, so it is installed without its
dependencies, and its package is not imported here: its shared library alone is loaded, which
registers the operators `torch.ops.pace`. The library is built for one version of torch.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Any, Final

import torch
from torch import nn

from outrider.engine.cpu.kernels import KernelsUnavailable, LayerParts, RunLayers, Spans
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


class PaceKernels:
    """Implements `Kernels`."""

    name: Final = f"{PACKAGE} {VERSION}"
    dtype: Final = torch.bfloat16
    page_size: Final = 16
    activations: Final = ("silu", "gelu")

    def __init__(self) -> None:
        """The operators must be registered; see `load_pace`."""
        operators: Any = torch.ops.pace
        self._linear = operators.libxsmmlinear_plain.default
        self._mlp = operators.libxsmm_fused_mlp.default
        self.norm = operators.rmsnorm.default
        self.add_norm = operators.fused_add_rmsnorm.default
        self._rotate = operators.fused_rope_apply.default
        self._write = operators.paged_attention_reshape_and_cache.default
        self._schedule = operators.get_paged_attention_scheduler_metadata.default
        self._attend = operators.paged_attention_with_kv_cache.default
        self.linear = self._linear

    def can_pack(self, num_out: int, num_in: int) -> bool:
        """See `Kernels.can_pack`."""
        return num_out % _OUT_UNIT == 0 and num_in % _IN_UNIT == 0

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Kernels.pack`: [out / 32, in / 64, 32, 32, 2]."""
        num_out, num_in = weight.shape
        tiles = weight.view(num_out // _OUT_UNIT, _OUT_UNIT, num_in // _IN_UNIT, _IN_UNIT // 2, 2)
        return tiles.permute(0, 2, 3, 1, 4).contiguous()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """See `Kernels.unpack`."""
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
        """See `Kernels.mlp`."""
        output: torch.Tensor = self._mlp(rows, gate, up, down, None, None, None, activation)
        return output

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernels.rotate`."""
        rotated: tuple[torch.Tensor, torch.Tensor] = self._rotate(query, key, cos, sin, 2)
        return rotated

    def write(
        self,
        cache: BlockedKeysAndValues,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """See `Kernels.write`."""
        self._write(keys, values, cache.keys, cache.values, slots, _ISA)

    def schedule(
        self, spans: Spans, query_heads: int, key_heads: int, width: int, window: int | None
    ) -> torch.Tensor:
        """See `Kernels.schedule`. Work is never split along the context, where the number of
        splits, and with it the order of a row's sums, would depend on the rest of the step. The
        kernels ask OpenMP for the number of threads, which torch sets on a thread that is new when
        it is first asked for it."""
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
        """See `Kernels.attend`."""
        output = torch.empty_like(query)
        left, right = (-1, 0) if window is None else (window - 1, 0)
        self._attend(
            query, cache.keys, cache.values, output, spans.starts, spans.ends, scaling, True, None,
            left, right, spans.pages, softcap or 0.0, schedule, None,
        )  # fmt: skip
        return output

    def at_once(self, layers: Sequence[LayerParts]) -> RunLayers | None:
        """See `Kernels.at_once`."""
        return pace_layers(layers, _ISA)


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
