"""The operators of `amd-pace`: its own where they run on this machine, else the reference ones
under their names, so that what calls them by name is tried anywhere."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from reference_kernels import ReferenceKernels

from outrider.engine.cpu.kernels import KernelsUnavailable, PaceKernels, Spans, load_pace

_SCHEMAS = (
    "libxsmmlinear_plain(Tensor rows, Tensor weight, Tensor? bias) -> Tensor",
    "libxsmm_fused_mlp(Tensor rows, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, "
    "Tensor? up_bias, Tensor? down_bias, str activation) -> Tensor",
    "rmsnorm(Tensor rows, Tensor weight, float eps) -> Tensor",
    "fused_add_rmsnorm(Tensor rows, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "fused_rope_apply(Tensor query, Tensor key, Tensor cos, Tensor sin, int axis) "
    "-> (Tensor, Tensor)",
    "paged_attention_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) keys, "
    "Tensor(b!) values, Tensor slots, str isa) -> ()",
    "get_paged_attention_scheduler_metadata(int num, int heads, int key_heads, int width, "
    "Tensor ends, ScalarType dtype, Tensor starts, bool causal, int window, str isa, bool split) "
    "-> Tensor",
    "paged_attention_with_kv_cache(Tensor query, Tensor keys, Tensor values, Tensor(a!) output, "
    "Tensor starts, Tensor ends, float scaling, bool causal, Tensor? slopes, int left, int right, "
    "Tensor pages, float softcap, Tensor schedule, Tensor? sinks) -> ()",
)


@cache
def pace_kernels() -> PaceKernels:
    try:
        return load_pace()
    except KernelsUnavailable:
        pass
    library = torch.library.Library("pace", "DEF")
    operators = _Reference()
    for schema in _SCHEMAS:
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, getattr(operators, name), "CPU")
    operators.library = library  # It ends with its object.
    operators.kernels = PaceKernels()
    return operators.kernels


class _Reference:
    """Each operator in terms of `ReferenceKernels`."""

    library: Any
    kernels: PaceKernels

    def __init__(self) -> None:
        self._plain = ReferenceKernels(torch.bfloat16)
        self.rmsnorm, self.fused_add_rmsnorm = self._plain.norm, self._plain.add_norm

    def libxsmmlinear_plain(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self._plain.linear(rows, self.kernels.unpack(weight), bias)

    def libxsmm_fused_mlp(self, rows: torch.Tensor, *given: Any) -> torch.Tensor:
        gate, up, down = (self.kernels.unpack(weight) for weight in given[:3])
        return self._plain.mlp(rows, gate, up, down, given[-1])

    def fused_rope_apply(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._plain.rotate(*given[:4])

    def paged_attention_reshape_and_cache(
        self, key: Any, value: Any, keys: Any, values: Any, slots: Any, isa: str
    ) -> None:
        self._plain.write(_cache(keys, values), slots, key, value)

    def get_paged_attention_scheduler_metadata(
        self, num: int, heads: int, key_heads: int, width: int, *given: Any
    ) -> torch.Tensor:
        return torch.tensor([heads, key_heads, width])

    def paged_attention_with_kv_cache(
        self, query: Any, keys: Any, values: Any, output: torch.Tensor, starts: Any, ends: Any,
        scaling: float, causal: bool, slopes: Any, left: int, right: int, pages: Any,
        softcap: float, schedule: torch.Tensor, sinks: Any,
    ) -> None:  # fmt: skip
        spans, window = Spans(starts, ends, pages), left + 1 if left >= 0 else None
        cached = _cache(keys, values)
        output.copy_(
            self._plain.attend(query, cached, spans, schedule, scaling, window, softcap or None)
        )


def _cache(keys: torch.Tensor, values: torch.Tensor) -> Any:
    return SimpleNamespace(keys=keys, values=values)
