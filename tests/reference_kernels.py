"""Fused kernels in plain operators, in any dtype: they show that what calls them is right, on any
machine. A row's result does not depend on others: each is worked out alone."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.engine.cpu.kernels import PaceKernels, Spans
from outrider.kv_cache.storage import BlockedKeysAndValues


class ReferenceKernels(PaceKernels):
    name = "reference kernels"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.num_steps = 0
        """Calls of `schedule`."""

    def can_pack(self, num_out: int, num_in: int) -> bool:
        return True

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed

    def linear(
        self, rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert rows.is_contiguous()
        assert rows.dim() == 3
        return torch.stack([functional.linear(row, packed, bias) for row in rows[0]])[None]

    def mlp(
        self,
        rows: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        act = {"silu": functional.silu, "gelu": functional.gelu}[activation]
        return self.linear(
            act(self.linear(rows, gate, None)) * self.linear(rows, up, None), down, None
        )

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * weight).to(rows.dtype)

    def add_norm(
        self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = rows + residual
        return self.norm(total, weight, eps), total

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos[:, :, None], sin[:, :, None]

        def rotated(states: torch.Tensor) -> torch.Tensor:
            a, b = states.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return rotated(query), rotated(key)

    def write(
        self,
        cache: BlockedKeysAndValues,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        pages, places = slots // self.page_size, slots % self.page_size
        num_pages, num_heads, page_size, width = cache.keys.shape
        cache.keys.view(num_pages, num_heads, width, page_size)[pages, :, :, places] = keys
        cache.values[pages, :, places] = values

    def schedule(
        self, spans: Spans, query_heads: int, key_heads: int, width: int, window: int | None
    ) -> torch.Tensor:
        self.num_steps += 1
        assert spans.starts.dtype == spans.ends.dtype == spans.pages.dtype == torch.int32
        return torch.tensor([query_heads, key_heads, width])

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
        assert schedule.tolist() == [query.shape[1], cache.keys.shape[1], query.shape[2]]
        assert len(query) == int(spans.starts[-1])
        output = torch.empty_like(query)
        starts, ends = spans.starts.tolist(), spans.ends.tolist()
        for index, end in enumerate(ends):
            for row in range(starts[index], starts[index + 1]):
                seen = end - (starts[index + 1] - row) + 1
                first = 0 if window is None else max(0, seen - window)
                output[row] = self._attend_row(
                    query[row], cache, spans.pages[index], first, seen, scaling, softcap
                )
        return output

    def at_once(self, *given: object) -> None:
        return None

    def _attend_row(
        self,
        query: torch.Tensor,
        cache: BlockedKeysAndValues,
        pages: torch.Tensor,
        first: int,
        seen: int,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """[heads, width] of one token's queries [heads, width], to slots `first` to `seen`."""
        first_page = first // self.page_size
        some = pages[first_page : -(-seen // self.page_size)].long()
        keys, values = self._gathered(cache, some)
        begin, end = first - first_page * self.page_size, seen - first_page * self.page_size
        rows = query.view(len(keys), len(query) // len(keys), -1)
        scores = rows @ keys[:, begin:end].transpose(1, 2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        return (torch.softmax(scores, -1) @ values[:, begin:end]).view(query.shape)

    @staticmethod
    def _gathered(
        cache: BlockedKeysAndValues, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_pages, num_heads, page_size, width = cache.keys.shape
        columns = cache.keys.view(num_pages, num_heads, width, page_size)[pages]
        keys = columns.permute(1, 0, 3, 2).reshape(num_heads, -1, width)
        values = cache.values[pages].transpose(0, 1).reshape(num_heads, -1, width)
        return keys, values
