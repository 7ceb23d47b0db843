"""Layers of rounded weights: what they compute, how far they round, and where there are none."""

from __future__ import annotations

import pytest
import torch
from models import quick_linear, tiny_config, tiny_module, twin
from torch import nn

from outrider.errors import ConfigError
from outrider.models import linear_layers
from outrider.models.linear_layers import Int4Linear, Int8Linear, quantized
from outrider.models.module_replacement import speed_up

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


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_zeros_stays_one(bits: int) -> None:
    weight = weight_of(16, 32, torch.bfloat16)
    weight[3] = 0
    layer = quantized(weight, None, bits)
    assert layer is not None
    assert (layer(torch.ones(1, 32, dtype=torch.bfloat16))[0, 3] == 0).all()


def test_a_shape_that_a_kernel_does_not_take_is_left_alone() -> None:
    """4 bits need groups of 32, and outputs in sixteens."""
    assert quantized(weight_of(16, 48, torch.bfloat16), None, 4) is None
    assert quantized(weight_of(10, 32, torch.bfloat16), None, 4) is None
    assert quantized(weight_of(10, 48, torch.bfloat16), None, 8) is not None


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
    torch.set_num_threads(1)
    config = tiny_config("llama", 96)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 80, 16
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    original = tiny_module(config, 1, torch.bfloat16)
    ids = torch.arange(1, 20)[None]
    distances = {}
    with torch.inference_mode():
        exact = original(ids).logits.float()
        for bits, kind in KINDS.items():
            module = twin(original)
            speed_up(module, bits=bits)
            kinds = [type(layer) for layer in module.modules()]
            assert nn.Linear not in kinds
            assert kinds.count(kind) > config.num_hidden_layers
            if bits == 4:  # the width of what comes out of an MLP is no multiple of 32
                assert kinds.count(quick_linear(torch.bfloat16)) == config.num_hidden_layers
            distances[bits] = float((module(ids).logits.float() - exact).norm() / exact.norm())
    assert 0 < distances[8] < distances[4] < 0.7


def test_a_model_without_a_layer_to_round_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rounded to 4 bits"):
        speed_up(nn.Sequential(nn.Linear(8, 8)).eval(), bits=4)
