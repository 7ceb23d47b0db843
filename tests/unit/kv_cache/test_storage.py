"""Bytes, and copies of pages and slots."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import SettingError
from outrider.kv_cache.storage import LayerShape, memory_budget, pages_in

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 8, 4, torch.bfloat16, CPU), LayerShape(1, 8, 8, torch.float32, CPU)]
SLOT_BYTES = 2 * 12 * 2 + 16 * 4


def test_too_few_bytes_for_a_page_are_refused() -> None:
    with pytest.raises(SettingError, match="one takes 1792") as caught:
        pages_in(16 * SLOT_BYTES - 1, SHAPES)
    assert caught.value.key == "kv_cache_memory_bytes"


@pytest.mark.parametrize(
    ("free", "num_gpus", "others", "expected"),
    [
        (90, None, 0, 80),
        (90, 0.5, 0, 35),
        (30, 1, 0, 30),
        (90, None, 7, 73),
        (30, 1, 31, 0),
    ],
)
def test_the_budget_on_a_gpu_is_what_the_weights_leave(
    free: int,
    num_gpus: float | None,
    others: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 bytes 0.9 may be taken, or 0.9 of a share; 10 are; no more than is free; and what
    others will take is left to them."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10)
    assert memory_budget(torch.device("cuda"), 0.9, num_gpus, others) == expected
