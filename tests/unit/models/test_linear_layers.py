"""Packed, widened and rounded linear layers against plain products."""

import pytest
import torch
from models import quick_linear, tiny_config, tiny_module, twin
from torch import nn

from outrider.models import linear_layers
from outrider.models.linear_layers import (
    Int4Linear,
    Int8Linear,
    PackedLinear,
    WidenedLinear,
    quantized,
)
from outrider.models.module_replacement import speed_up

ROW_COUNTS = (0, 1, 2, 3, 5, 8, 16, 17, 64, 100, 256, 512)
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
DTYPES = (torch.float32, torch.bfloat16) if HAS_BFLOAT16 else (torch.float32,)
SUM_TOLERANCE = 1e-6
"""Of the largest output: rounding in float32 of sums of 192 products."""


def random_layer(dtype: torch.dtype, bias: bool, out_features: int = 97) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Linear(192, out_features, bias=bias, dtype=dtype).requires_grad_(False)


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def assert_right(layer: nn.Linear, quick: nn.Module, rows: torch.Tensor) -> None:
    """Sums are float32's, and rounded once to the dtype of the output."""
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
def test_many_rows_are_widened(
    bias: bool, block_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are multiplied in float32, by blocks of any size, and rounded once."""
    monkeypatch.setattr(linear_layers, "_BLOCK_WEIGHTS", block_weights)
    layer = random_layer(torch.bfloat16, bias)
    widened = WidenedLinear(layer.weight, layer.bias)
    for num_rows in (0, 4, 5, 64):
        assert_right(layer, widened, random_rows(2, num_rows, 192, dtype=torch.bfloat16))
    few = random_rows(3, 192, dtype=torch.bfloat16)
    assert torch.equal(widened(few), layer(few))


KINDS = {8: Int8Linear, 4: Int4Linear}


def weight_of(out: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different sizes, as a model's are."""
    generator = torch.Generator().manual_seed(out)
    sizes = torch.logspace(-2, 0, out)[:, None]
    return (torch.randn(out, width, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_it_multiplies_by_its_rounded_weight(dtype: torch.dtype, bits: int, num_rows: int) -> None:
    """Of any shape of rows, with the bias; and that weight is within half a step of the given one,
    a step being a 127th of a row's largest weight, or a 15th of a group's range."""
    weight = weight_of(48, 64, dtype)
    bias = weight_of(48, 1, dtype)[:, 0]
    layer = quantized(weight, bias, bits)
    assert type(layer) is KINDS[bits]
    rows = torch.randn(num_rows, 1, 64).to(dtype)
    exact = rows.double() @ layer.weight.double().t() + bias.double()
    eps = torch.finfo(dtype).eps
    found = layer(rows)
    assert found.shape == (num_rows, 1, 48)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= 16 * eps * exact.abs().max()
    wide = weight.double()
    if bits == 8:
        steps = wide.abs().amax(1, keepdim=True) / 127
    else:
        groups = wide.view(48, 2, 32)
        steps = ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(32, 1)
    error = (layer.weight.double() - wide).abs()
    assert (error <= 0.5 * steps + 2 * eps * wide.abs().amax(1, keepdim=True)).all()
    assert error.max() > 0


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one that takes another level for the offset. Whether it can is asked once a shape."""
    weight = weight_of(32, 96, torch.bfloat16)
    monkeypatch.setattr(linear_layers, "_CENTRE", 7)
    assert quantized(weight, None, 4) is None
    monkeypatch.undo()
    assert quantized(weight, None, 4) is None
    linear_layers._has_kernel.cache_clear()
    assert quantized(weight, None, 4) is not None


def test_a_model_is_rounded_as_a_whole() -> None:
    """Fused blocks and the head included, all but the layers that cannot be, which are packed; its
    logits are near the model's own, and nearer with more bits."""
    config = tiny_config("llama", 96)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 80, 16
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    original = tiny_module(config, 1, torch.bfloat16)
    ids = torch.arange(1, 20)[None]
    distances = {}
    with torch.inference_mode():
        exact = original(ids, use_cache=False).logits.float()
        for bits, kind in KINDS.items():
            module = twin(original)
            speed_up(module, bits=bits)
            kinds = [type(layer) for layer in module.modules()]
            assert nn.Linear not in kinds
            assert kinds.count(kind) > config.num_hidden_layers
            if bits == 4:  # the width of what comes out of an MLP is no multiple of 32
                assert kinds.count(quick_linear(torch.bfloat16)) == config.num_hidden_layers
            distances[bits] = float(
                (module(ids, use_cache=False).logits.float() - exact).norm() / exact.norm()
            )
    assert 0 < distances[8] < distances[4] < 0.7
