"""Attention over whole texts computes what the library's own does, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from models import tiny_config, tiny_module

from draft_service.training.student import NAME, use_dense_attention


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt_neox"])
def test_logits_and_gradients_are_the_librarys(family: str) -> None:
    """With heads that share keys, and with windows shorter than the text."""
    found = []
    ids = torch.randint(0, 32, (3, 19), generator=torch.Generator().manual_seed(1))
    for dense in (False, True):
        module = tiny_module(tiny_config(family))
        if dense:
            use_dense_attention(module)
            assert module.config._attn_implementation == NAME
        module.requires_grad_(True)
        logits = module(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        found.append((logits.detach(), next(iter(module.parameters())).grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_model_whose_scores_are_more_than_a_product_keeps_its_own() -> None:
    config = tiny_config("gemma2")
    config.attn_logit_softcapping = 0.3
    module = tiny_module(config)
    use_dense_attention(module)
    assert module.config._attn_implementation != NAME
