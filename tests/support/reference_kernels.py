"""The fused kernels written in plain operators, for any dtype. So tests of the code that calls them
run on any machine. Each row is computed alone, so its result does not depend on other rows."""

from typing import Any

import torch
from torch.nn import functional

from outrider.kernels.cpu import Attention, FusedLayers, LayerSizes, LayerWeights, PaceKernels

PAGE = 16


class ReferenceLayers(FusedLayers):
    @torch.jit.ignore
    def linear(
        self, rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return row_by_row(rows, packed, bias)

    @torch.jit.ignore
    def mlp(
        self, rows: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        act = getattr(functional, self.activation)
        return row_by_row(act(row_by_row(rows, gate)) * row_by_row(rows, up), down)

    @torch.jit.ignore
    def norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normed(rows, weight, self.eps)

    @torch.jit.ignore
    def add_norm(
        self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = rows + residual
        return normed(total, weight, self.eps), total

    @torch.jit.ignore
    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotated(query, cos, sin), rotated(key, cos, sin)

    @torch.jit.ignore
    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        pages, places = slots // PAGE, slots % PAGE
        num_pages, num_heads, page_size, width = keys.shape
        keys.view(num_pages, num_heads, width, page_size)[pages, :, :, places] = key
        values[pages, :, places] = value

    @torch.jit.ignore
    def attend(
        self,
        layer: LayerWeights,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        spans: Attention,
    ) -> None:
        expected = [query.shape[1], keys.shape[1], query.shape[2]]
        assert spans.schedules[layer.kind].tolist() == expected
        num_pages, num_heads, page_size, width = keys.shape
        columns = keys.view(num_pages, num_heads, width, page_size)
        starts = spans.starts.tolist()
        assert len(query) == starts[-1]
        for index, end in enumerate(spans.ends.tolist()):
            last = starts[index + 1]
            for row in range(starts[index], last):
                seen = end - (last - row) + 1
                first = 0 if layer.window < 0 else max(0, seen - layer.window - 1)
                own = spans.pages[index][first // PAGE : -(-seen // PAGE)].long()
                slots = slice(first % PAGE, seen - first // PAGE * PAGE)
                seen_keys = columns[own].permute(1, 0, 3, 2).reshape(num_heads, -1, width)[:, slots]
                seen_values = values[own].transpose(0, 1).reshape(num_heads, -1, width)[:, slots]
                rows = query[row].view(num_heads, -1, width)
                scores = rows @ seen_keys.transpose(1, 2) * layer.scaling
                if layer.softcap:
                    scores = torch.tanh(scores / layer.softcap) * layer.softcap
                output[row] = (torch.softmax(scores, -1) @ seen_values).view(query.shape[1:])


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = states.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(rows.dtype)


def row_by_row(
    rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    assert rows.is_contiguous()
    assert rows.dim() == 3
    return torch.stack([functional.linear(row, packed, bias) for row in rows[0]])[None]


class ReferenceKernels(PaceKernels):
    name = "reference kernels"
    layers = ReferenceLayers

    def __init__(self, dtype: torch.dtype, layers: type[FusedLayers] = ReferenceLayers) -> None:
        self.dtype = dtype
        self.layers = layers
        self.num_steps = 0  # number of calls of `schedule`

    def can_pack(self, num_out: int, num_in: int) -> bool:
        return True

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed

    def linear(self, *given: Any) -> torch.Tensor:
        return row_by_row(*given)

    def schedule(
        self, starts: torch.Tensor, ends: torch.Tensor, sizes: LayerSizes, window: int | None
    ) -> torch.Tensor:
        self.num_steps += 1
        assert starts.dtype == ends.dtype == torch.int32
        return torch.tensor([sizes.query_heads, sizes.key_heads, sizes.width])
