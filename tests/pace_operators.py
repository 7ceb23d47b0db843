"""The operators of `amd-pace`: its own where they run on this machine, else the reference ones
under their names, so that what calls them by name is tried anywhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from reference_kernels import attend_spans, normed, rotated, row_by_row, write_slots
from torch.nn import functional

from outrider.engine.cpu.kernels import KernelsUnavailable, PaceKernels, load_pace

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
    """Each operator in plain ones."""

    library: Any
    kernels: PaceKernels

    def libxsmmlinear_plain(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return row_by_row(rows, self.kernels.unpack(weight), bias)

    def libxsmm_fused_mlp(self, rows: torch.Tensor, *given: Any) -> torch.Tensor:
        gate, up, down = (self.kernels.unpack(weight) for weight in given[:3])
        gated = getattr(functional, given[-1])(row_by_row(rows, gate))
        return row_by_row(gated * row_by_row(rows, up), down)

    def rmsnorm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return normed(rows, weight, eps)

    def fused_add_rmsnorm(
        self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = rows + residual
        return normed(total, weight, eps), total

    def fused_rope_apply(
        self, query: torch.Tensor, key: torch.Tensor, cos: Any, sin: Any, axis: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotated(query, cos, sin), rotated(key, cos, sin)

    def paged_attention_reshape_and_cache(self, *given: Any) -> None:
        write_slots(*given[:5])

    def get_paged_attention_scheduler_metadata(self, *given: Any) -> torch.Tensor:
        return torch.zeros(1)

    def paged_attention_with_kv_cache(
        self, query: Any, keys: Any, values: Any, output: torch.Tensor, starts: Any, ends: Any,
        scaling: float, causal: bool, slopes: Any, left: int, right: int, pages: Any,
        softcap: float, schedule: torch.Tensor, sinks: Any,
    ) -> None:  # fmt: skip
        attend_spans(query, keys, values, output, starts, ends, pages, left, scaling, softcap)
