"""Linear layers in bfloat16 where the CPU has no products of it, against the library's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.models import linear_layers, module_replacement
from outrider.models.linear_layers import WidenedLinear, must_widen

ROW_COUNTS = (0, 1, 3, 4, 5, 64)
SUM_TOLERANCE = 1e-6
"""Of the largest output: rounding in float32 of sums of 192 products."""


def random_layer(*, bias: bool, out_features: int = 97) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layer = nn.Linear(192, out_features, bias=bias, dtype=torch.bfloat16)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block_weights", [1, 1_000, 2**20])
def test_any_number_of_rows(
    bias: bool, block_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows are multiplied in float32, by blocks of any size, and rounded once."""
    monkeypatch.setattr(linear_layers, "_BLOCK_WEIGHTS", block_weights)
    layer = random_layer(bias=bias)
    widened = WidenedLinear(layer.weight, layer.bias)
    wide = [None if t is None else t.double() for t in (layer.weight, layer.bias)]
    for num_rows in ROW_COUNTS:
        rows = torch.randn((2, num_rows, 192), generator=torch.Generator().manual_seed(3))
        actual = widened(rows.bfloat16())
        expected = nn.functional.linear(rows.bfloat16().double(), *wide)
        assert (actual.shape, actual.dtype) == (expected.shape, torch.bfloat16)
        if 2 * num_rows >= 4:
            bound = torch.finfo(torch.bfloat16).eps / 2 * 1.01 * expected.abs()
            bound += SUM_TOLERANCE * expected.abs().max()
            assert ((actual.double() - expected).abs() <= bound).all()


def test_the_weight_is_shared() -> None:
    """Nothing is copied, and what was a parameter may go; rows that lie apart are put together."""
    layer = random_layer(bias=True)
    widened = WidenedLinear(layer.weight, layer.bias)
    assert widened.weight.data_ptr() == layer.weight.data_ptr()
    assert list(widened.parameters()) == []
    assert str(widened) == "WidenedLinear(192, 97, bias=True)"
    turned = WidenedLinear(layer.weight.t(), None)
    assert turned.weight.is_contiguous()
    assert torch.equal(turned.weight, layer.weight.t())


def test_where_weights_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without products of bfloat16, in bfloat16 alone; there every linear layer is."""
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert must_widen(torch.empty(3, 4, dtype=torch.bfloat16)) is not supported
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert must_widen(torch.empty(3, 4, dtype=torch.bfloat16))
    assert not must_widen(torch.empty(3, 4))
    assert not must_widen(torch.empty(3, 4, dtype=torch.bfloat16, device="meta"))
    model = nn.Sequential(random_layer(bias=True), nn.Linear(97, 4)).eval()
    module_replacement.speed_up(model)
    assert [type(layer) for layer in model] == [WidenedLinear, nn.Linear]
