"""Packed linear layers against the library's, and what becomes of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.models.linear_layers import PackedLinear, can_pack

ROW_COUNTS = (0, 1, 2, 3, 5, 8, 16, 17, 64, 100, 256, 512)
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
DTYPES = (torch.float32, torch.bfloat16) if HAS_BFLOAT16 else (torch.float32,)
SUM_TOLERANCE = 1e-6
"""Of the largest output: rounding in float32 of sums of 192 products."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_layer(dtype: torch.dtype, bias: bool, out_features: int = 97) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Linear(192, out_features, bias=bias, dtype=dtype).requires_grad_(False)


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def assert_right(layer: nn.Linear, packed: PackedLinear, rows: torch.Tensor) -> None:
    """Sums are float32's, and rounded once to the dtype of the output."""
    wide = [None if t is None else t.double() for t in (layer.weight, layer.bias)]
    expected, actual = nn.functional.linear(rows.double(), *wide), packed(rows)
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
    """The layout, made for one typical number of rows, is right for all, none included."""
    layer = random_layer(dtype, bias, out_features)
    packed = PackedLinear(layer.weight, layer.bias)
    for num_rows in ROW_COUNTS:
        assert_right(layer, packed, random_rows(1, num_rows, 192, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape_of_rows(dtype: torch.dtype) -> None:
    """One row alone, plain matrices, batches, and rows that do not lie side by side in memory."""
    layer = random_layer(dtype, bias=True)
    packed = PackedLinear(layer.weight, layer.bias)
    for shape in ((192,), (5, 192), (2, 3, 192), (2, 1, 3, 192), (2, 0, 192)):
        assert_right(layer, packed, random_rows(*shape, dtype=dtype))
    assert_right(layer, packed, random_rows(192, 6, dtype=dtype).t())
    assert_right(layer, packed, random_rows(1, 4, 384, dtype=dtype)[..., ::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_can_be_had_back_and_is_a_copy(dtype: torch.dtype) -> None:
    """Bit for bit, though the layout pads and reorders it; and what the caller does to the dense
    weight afterwards changes nothing."""
    layer = random_layer(dtype, bias=True)
    packed = PackedLinear(layer.weight, layer.bias)
    original = layer.weight.clone()
    layer.weight.zero_()
    assert torch.equal(packed.weight, original)
    assert packed.bias is not None
    assert torch.equal(packed.bias, layer.bias)
    assert (packed.in_features, packed.out_features) == (192, 97)
    assert list(packed.parameters()) == []
    assert str(packed) == "PackedLinear(192, 97, bias=True)"


def test_what_cannot_be_packed() -> None:
    assert can_pack(torch.empty(3, 4))
    assert can_pack(torch.empty(3, 4, dtype=torch.bfloat16)) is HAS_BFLOAT16
    for dtype in (torch.float64, torch.float16, torch.int8):
        assert not can_pack(torch.empty(3, 4, dtype=dtype))
    assert not can_pack(torch.empty(3, 4, device="meta"))
    assert not can_pack(torch.empty(0, 4))
    assert not can_pack(torch.empty(3, 4, 5))
