"""Rounded weights can be had back as integers and scales, and nothing else passes for them."""

import pytest
import torch

from outrider.models.few_bits import integers_of, round_weights, rounded
from tests.support.models import tiny_config, tiny_module
from tests.support.paged_engines import VOCAB

LARGEST_ERROR = {8: 0.5 / 127, 4: 1 / 8}
"""Of a weight, relative to the largest one that shares its scale."""


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-38, 1e-9, 0.02, 1e9])
def test_integers_and_scales_are_found_in_their_products(bits: int, size: float) -> None:
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(3)) * size
    weight[3] = 0
    weight[5, 64:128] = 0
    weight[6, 0] = -weight[6].abs().max() * 2
    made = rounded(weight, bits)
    found = integers_of(made.product())
    assert found is not None
    assert found.bits == bits
    assert torch.equal(found.integers, made.integers)
    assert torch.equal(found.scales, made.scales)
    groups = weight.view(64, made.scales.shape[1], -1)
    error = (made.product() - weight).view_as(groups).abs()
    assert (error <= LARGEST_ERROR[bits] * 1.001 * groups.abs().amax(-1, keepdim=True)).all()


def test_other_weights_have_no_integers() -> None:
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(4))
    assert integers_of(weight) is None
    product = rounded(weight, 8).product()
    product[-1, -1] *= 1.001
    assert integers_of(product) is None


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_models_linear_layers_are_rounded(bits: int, is_tied: bool) -> None:
    """An LM head, and weights that 64 does not divide, have 8 bits at least. Embeddings keep theirs
    unless they share the head's."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    module = tiny_module(
        tiny_config("llama", VOCAB, tie_word_embeddings=is_tied, **sizes), dtype=torch.float32
    )
    before = module.model.embed_tokens.weight.clone()
    round_weights(module, bits)
    layer = module.model.layers[1]
    for linear, expected in (
        (layer.self_attn.q_proj, bits),
        (layer.mlp.up_proj, bits),
        (layer.mlp.down_proj, 8),
        (module.lm_head, 8),
    ):
        found = integers_of(linear.weight.detach())
        assert found is not None
        assert found.bits == expected
    assert torch.equal(module.model.embed_tokens.weight, before) == (not is_tied)
