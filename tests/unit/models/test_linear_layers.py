"""Packed and widened linear layers against plain products."""

import pytest
import torch
from torch import nn

from outrider.models import linear_layers
from outrider.models.linear_layers import PackedLinear, WidenedLinear

ROW_COUNTS = (0, 1, 2, 3, 5, 8, 16, 17, 64, 100, 256, 512)
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
DTYPES = (torch.float32, torch.bfloat16) if HAS_BFLOAT16 else (torch.float32,)
SUM_TOLERANCE = 1e-6  # relative to the largest output: rounding in float32 of sums of 192 products


def random_layer(dtype: torch.dtype, bias: bool, out_features: int = 97) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Linear(192, out_features, bias=bias, dtype=dtype).requires_grad_(False)


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def assert_right(layer: nn.Linear, quick: nn.Module, rows: torch.Tensor) -> None:
    """Sums are in float32, and rounded once to the dtype of the output."""
    wide = [None if t is None else t.double() for t in (layer.weight, layer.bias)]
    expected, actual = nn.functional.linear(rows.double(), *wide), quick(rows)
    assert actual.shape == expected.shape
    assert actual.dtype == rows.dtype
    if expected.numel():
        rounding = torch.finfo(rows.dtype).eps / 2 * expected.abs()
        bound = 1.01 * rounding + SUM_TOLERANCE * expected.abs().max()
        assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features", [1, 97, 256])
def test_any_number_of_rows(dtype: torch.dtype, bias: bool, out_features: int) -> None:
    layer = random_layer(dtype, bias, out_features)
    packed = PackedLinear(layer.weight, layer.bias)
    for num_rows in ROW_COUNTS:
        assert_right(layer, packed, random_rows(1, num_rows, 192, dtype=dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block_weights", [1, 1_000, 2**20])
def test_many_rows_widen(bias: bool, block_weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "_BLOCK_WEIGHTS", block_weights)
    layer = random_layer(torch.bfloat16, bias)
    widened = WidenedLinear(layer.weight, layer.bias)
    for num_rows in (0, 4, 5, 64):
        assert_right(layer, widened, random_rows(2, num_rows, 192, dtype=torch.bfloat16))
    few = random_rows(3, 192, dtype=torch.bfloat16)
    assert torch.equal(widened(few), layer(few))
