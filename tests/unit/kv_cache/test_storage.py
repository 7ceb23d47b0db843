"""Bytes, and copies of pages."""

from typing import Any

import pytest
import torch

from outrider.errors import SettingError
from outrider.kv_cache.storage import KVCache, LayerShape, memory_budget, page_bytes_of, pages_in
from outrider.limits import PAGE_SIZE

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 8, 4, torch.bfloat16, CPU), LayerShape(1, 8, 8, torch.float32, CPU)]
SLOT_BYTES = 2 * 12 * 2 + 16 * 4


def test_too_few_bytes_for_a_page_are_refused() -> None:
    with pytest.raises(SettingError, match="one page takes 1792") as caught:
        pages_in(16 * SLOT_BYTES - 1, page_bytes_of(SHAPES, PAGE_SIZE))
    assert caught.value.key == "kv_cache_memory_bytes"


@pytest.mark.parametrize(
    ("free", "num_gpus", "expected"), [(90, None, 80), (90, 0.5, 35), (30, 1, 30), (90, 0.1, 0)]
)
def test_the_budget_on_a_gpu_is_what_the_weights_leave(
    free: int, num_gpus: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may use 0.9 of its share of 100 bytes, of which 10 are in use. The budget is no
    larger than the free memory."""
    cached = [5]  # The allocator keeps what the fused weights had until it is told.
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free - sum(cached), 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 + sum(cached))
    assert memory_budget(torch.device("cuda"), 0.9, num_gpus) == expected


@pytest.mark.parametrize("is_blocked", [False, True])
def test_pages_are_copied_in_every_layer(is_blocked: bool) -> None:
    shapes = [LayerShape(heads, 4, 4, torch.float32, CPU) for heads in (2, 1, 2, 2)]
    cache = KVCache([*shapes, LayerShape(1, 6, 0, torch.float32, CPU)], 3, PAGE_SIZE, is_blocked)
    layers = cache.layers
    before = []
    for number, layer in enumerate(layers):
        for tensor in (layer.keys, layer.values):
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 10_000 * number)
        before += [found.clone() for found in _paged(layer)]
    cache.copy_pages([(0, 1), (1, 2)])
    after = [found for layer in layers for found in _paged(layer)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, torch.stack([old[0], old[0], old[1]]))


def _paged(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [pages, place, any]."""
    keys, values = layer.keys, layer.values
    if keys.dim() == 4:
        columns = keys.view(*keys.shape[:2], keys.shape[3], keys.shape[2])
        return columns.permute(0, 3, 1, 2), values.transpose(1, 2)
    keys, values = (one.unflatten(1, (-1, PAGE_SIZE)).permute(1, 2, 0, 3) for one in (keys, values))
    return keys, values
