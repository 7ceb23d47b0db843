"""Replaced modules, alone and in whole models, and modules that stay unchanged."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import eager_attention_forward  # noqa: F401 -- looked up beside a block's class

from outrider.models.linear_layers import PackedLinear
from outrider.models.module_replacement import (
    DirectLayer,
    FusedAttention,
    FusedMLP,
    NativeRMSNorm,
    speed_up,
)
from tests.support.models import quick_linear, tiny_config, tiny_module

VOCAB = 32
SHORT, LONG = torch.bfloat16, torch.float64
FAMILIES = ("llama", "qwen3", "mistral", "gemma", "gemma3")
GENERIC = ("gpt_neox", "gpt2")
RELATIVES = {
    "qwen2": ({}, 2),  # a bias on queries, keys and values
    "llama": ({"head_dim": 16, "attention_bias": True, "mlp_bias": True}, 2),  # heads wider than x
    "smollm3": ({"no_rope_layers": [1, 0]}, 1),  # one layer does not rotate
    "granite": ({"attention_multiplier": 0.3, "residual_multiplier": 0.5}, 2),
    "gemma2": ({}, 2),
    "olmo": ({"clip_qkv": 1.0}, 0),
    "cohere": ({}, 0),  # rotates neighbours, not halves
    "stablelm": ({"partial_rotary_factor": 0.25}, 0),
    "phi3": ({}, 0),  # has joined its linear layers itself
}
"""Settings of other models of the library, and how many of their two attention blocks are fused."""


def twins(config: Any, dtype: torch.dtype, attention: str = "sdpa") -> tuple[Any, Any]:
    """A model as the library runs it, and the same model with replaced modules."""
    config._attn_implementation = attention
    original, swapped = tiny_module(config, dtype=dtype), tiny_module(config, dtype=dtype)
    for module in (original, swapped):  # norms begin as ones or zeros, biases as zeros
        generator = torch.Generator().manual_seed(11)
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand(parameter.shape, generator=generator).to(dtype))
    speed_up(swapped)
    return original, swapped


def classes(module: nn.Module) -> Counter[type]:
    return Counter(type(child) for child in module.modules())


@torch.inference_mode()
def some_logits(module: Any) -> torch.Tensor:
    """Logits [27, VOCAB] of a prompt, one token, and rows of two sequences."""
    ids = torch.randint(0, VOCAB, (1, 18), generator=torch.Generator().manual_seed(1))
    parts = (ids, ids[:, 5:6], ids[:, :4].expand(2, 4).clone())
    return torch.cat([row for part in parts for row in module(part, use_cache=False).logits])


def check_logits(original: Any, swapped: Any) -> None:
    """The bound of float32 is some 100 roundings of 6e-8, times weights that are not small."""
    expected = some_logits(original)
    error = (some_logits(swapped) - expected).abs().max() / expected.abs().max()
    assert error.item() <= (1e-12 if original.dtype == LONG else 2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [*FAMILIES, *GENERIC])
@pytest.mark.parametrize("dtype", [LONG, torch.float32])
def test_logits_of_whole_models(family: str, attention: str, dtype: torch.dtype) -> None:
    check_logits(*twins(tiny_config(family, VOCAB), dtype, attention))


@pytest.mark.parametrize("model_type", RELATIVES)
@pytest.mark.parametrize("dtype", [LONG, torch.float32])
def test_whatever_differs_keeps_its_own_code(model_type: str, dtype: torch.dtype) -> None:
    settings, num_fused = RELATIVES[model_type]
    original, swapped = twins(tiny_config(model_type, VOCAB, **settings), dtype, "eager")
    assert classes(swapped)[FusedAttention] == num_fused
    check_logits(original, swapped)
    if dtype == torch.float32:
        assert classes(swapped)[nn.Linear] == 0
        assert classes(swapped)[PackedLinear] > 0


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize(
    ("family", "num_norms"),
    [("llama", 5), ("qwen3", 9), ("mistral", 5), ("gemma", 5), ("gemma3", 13)],
)
def test_what_is_swapped_in_llama_family(family: str, num_norms: int, dtype: torch.dtype) -> None:
    _, swapped = twins(tiny_config(family, VOCAB), dtype)
    found = classes(swapped)
    assert (found[FusedAttention], found[FusedMLP], found[NativeRMSNorm]) == (2, 2, num_norms)
    assert found[DirectLayer] == 2
    assert (found[quick_linear(dtype)], found[nn.Linear]) == (9, 0)
    assert not any(child.training for child in swapped.modules())
    before = str(swapped)
    speed_up(swapped)
    assert str(swapped) == before


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("dtype", [LONG, SHORT])
def test_weights_that_were_taken_over_are_given_back(family: str, dtype: torch.dtype) -> None:
    """Only embeddings and norms remain parameters, or, if weights are not packed, as many as
    before. The old matrices are freed."""
    module = tiny_module(tiny_config(family, VOCAB), dtype=dtype)
    embedding = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    old = [weakref.ref(p) for p in module.parameters() if p.dim() == 2 and id(p) not in embedding]
    size = sum(p.numel() for p in module.parameters())
    speed_up(module)
    left = sum(p.numel() for p in module.parameters())
    if dtype == SHORT:
        assert sum(ref() is not None for ref in old) == 0
        rows = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Embedding))
        assert left < rows + 0.05 * size
    else:
        assert left == size


def test_modules_with_hooks_stay() -> None:
    """Neither such a module nor a product that would contain it is replaced."""
    module = tiny_module(tiny_config("llama", VOCAB), dtype=torch.float32)
    layer, seen = module.model.layers[0], []
    layer.self_attn.q_proj.register_forward_hook(lambda *_: seen.append("q"))
    layer.mlp.register_forward_pre_hook(lambda *_: seen.append("mlp"))
    module.lm_head.forward = lambda rows: nn.functional.linear(rows, module.lm_head.weight)
    speed_up(module)
    kept = (layer.self_attn, layer.self_attn.q_proj, layer.mlp, module.lm_head)
    assert [type(m).__name__ for m in kept] == ["LlamaAttention", "Linear", "LlamaMLP", "Linear"]
    some_logits(module)
    assert seen == ["q", "mlp"] * 3


def test_configurations_within_a_block_keep_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library also sets the attention of the configurations inside a configuration."""
    config = tiny_config("llama", VOCAB)
    monkeypatch.setattr(type(config), "sub_configs", {"vision_config": type(config)})
    config.vision_config = tiny_config("llama", VOCAB)
    _, swapped = twins(config, torch.float32)
    assert classes(swapped)[FusedAttention] == 2
    assert swapped.config._attn_implementation == "sdpa"
    assert swapped.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_of_rows_of_any_size(dtype: torch.dtype, offset: float) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(6, 96, generator=generator, dtype=LONG)
    rows = (rows * torch.tensor([0, 1e-4, 3e-3, 1, 1e4, 1e8], dtype=LONG)[:, None]).to(dtype)
    weight = nn.Parameter(torch.rand(96, generator=generator).to(dtype), requires_grad=False)
    wide = rows.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * (weight.double() + offset)
    actual = NativeRMSNorm(weight, 1e-5, offset)(rows)
    assert actual.dtype == dtype
    bound = 2 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.51 * torch.finfo(dtype).eps
    assert ((actual.double() - expected).abs() <= bound * expected.abs()).all()


def test_weights_of_a_kind_of_their_own_are_left_alone() -> None:
    """Quantised weights are parameters of another class, which cannot be joined or packed."""

    class Rounded(nn.Parameter):
        pass

    module = tiny_module(tiny_config("llama"))
    for linear in (found for found in module.modules() if isinstance(found, nn.Linear)):
        linear.weight = Rounded(linear.weight)
    speed_up(module)
    assert {type(one) for one in module.modules() if hasattr(one, "in_features")} == {nn.Linear}
