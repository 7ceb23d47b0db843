"""Published drafters are recognised by their files, and their EAGLE-3 heads load unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig

from outrider.errors import ConfigError
from outrider.models.eagle3 import LoadedEagle3, load_eagle3
from outrider.models.mtp import load_mtp
from outrider.models.published_drafters import recognise
from tests.support.models import tiny_module

SCALE = 16  # every width of a published drafter is divided by it
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def scaled(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: scaled(value)
        if isinstance(value, dict)
        else value // SCALE
        if key in WIDTHS
        else value
        for key, value in config.items()
    }


def save_facts(facts: dict[str, Any], directory: Path) -> None:
    """Saves the configuration and random tensors of a published drafter, with smaller widths."""
    torch.manual_seed(0)
    tensors = {}
    for name, tensor in facts["tensors"].items():
        shape = [max(1, size // SCALE) for size in tensor["shape"]]
        if ".mlp.gate." in name:  # It has a row for each expert.
            shape[0] = tensor["shape"][0]
        if name.endswith("_scale_inv"):  # A scale is for a block of 128 by 128.
            shape = [-(-size // 128) for size in tensors[name.removesuffix("_scale_inv")].shape]
        is_float8 = tensor.get("dtype") == "F8_E4M3"
        tensors[name] = torch.randn(shape).to(torch.float8_e4m3fn if is_float8 else torch.bfloat16)
    if "d2t" in tensors:
        num_all, num = facts["target"]["vocab"] // SCALE, len(tensors["d2t"])
        token_ids = torch.randperm(num_all)[:num].sort().values
        tensors["d2t"] = token_ids - torch.arange(num)
        tensors["t2d"] = torch.zeros(num_all, dtype=torch.bool).index_fill(0, token_ids, True)
    save_file(tensors, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(scaled(facts["config"])))


def load(facts: dict[str, Any], directory: Path) -> tuple[LoadedEagle3, Any]:
    """The head and its target."""
    sizes, name = facts["target"], str(directory)
    config = LlamaConfig(
        vocab_size=sizes["vocab"] // SCALE,
        hidden_size=sizes["hidden_size"] // SCALE,
        num_hidden_layers=sizes["layers"],
        num_attention_heads=4,
        intermediate_size=8,
    )
    target = tiny_module(config, dtype=torch.bfloat16)
    return load_eagle3(directory, target, name=name, target_name=sizes["name"]), target


def facts_of(test_data: Path, name: str) -> dict[str, Any]:
    return json.loads((test_data / f"published_drafters/{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "layer_ids", "norm_before_residual", "owns_embeddings", "theta", "eps"),
    [
        ("raw_specforge_qwen3_235b", (2, 47, 91), False, False, 1e6, 1e-6),
        ("raw_specforge_qwen3_8b", (2, 18, 33), False, False, 1e6, 1e-6),
        ("raw_thoughtworks_qwen3_32b", (2, 32, 61), False, False, 1e4, 1e-6),
        ("raw_yuhuili_llama31_8b", (2, 16, 29), False, False, 1e4, 1e-5),
        ("speculators_nmtesting_llama31_8b_converted", (2, 16, 29), False, True, 1e4, 1e-5),
        ("speculators_redhatai_qwen3_8b", (2, 18, 33), True, True, 1e6, 1e-6),
    ],
)
def test_published_heads_load(
    name: str,
    layer_ids: tuple[int, ...],
    norm_before_residual: bool,
    owns_embeddings: bool,
    theta: float,
    eps: float,
    test_data: Path,
    tmp_path: Path,
) -> None:
    facts = facts_of(test_data, f"eagle3_{name}")
    save_facts(facts, tmp_path)
    assert recognise(tmp_path) == "eagle3"
    loaded, target = load(facts, tmp_path)
    config = loaded.module.config
    assert config.layer_ids == layer_ids
    assert config.norm_before_residual == norm_before_residual
    turn = loaded.module.rotary_emb.inv_freq[1].item()
    assert turn == pytest.approx(theta ** (-2 / loaded.module.key_width))
    assert loaded.module.norm.variance_epsilon == eps
    embeddings = (loaded.module.embed_tokens.weight, target.get_input_embeddings().weight)
    assert (embeddings[0] is not embeddings[1]) == owns_embeddings
    assert len(loaded.token_ids) == facts["tensors"]["d2t"]["shape"][0] // SCALE
    features = loaded.module.fuse(torch.randn(1, 3, 3 * config.target_width, dtype=torch.bfloat16))
    [hidden] = loaded.module.unroll(features, torch.tensor([[1, 2, 3]]), 1)
    assert loaded.module.logits(hidden).shape == (1, 3, len(loaded.token_ids))


@pytest.mark.parametrize(
    ("name", "family", "num_layers"),
    [("mtp_deepseek_v3", "deepseek_v3", 1), ("mtp_qwen3_next", "qwen3_next", 4)],
)
def test_published_mtp_layers_load(
    name: str, family: str, num_layers: int, test_data: Path, tmp_path: Path
) -> None:
    facts = facts_of(test_data, name)
    stated, before = facts["config"], facts["config"]["num_hidden_layers"]
    stated |= {
        "model_type": family,
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": num_layers,
    }
    facts["tensors"] = {
        key.replace(f"layers.{before}.", f"layers.{num_layers}."): tensor
        for key, tensor in facts["tensors"].items()
    }
    save_facts(facts, tmp_path)
    assert recognise(tmp_path) == "mtp"
    target = tiny_module(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    head: Any = load_mtp(tmp_path, target, target_name=name).module
    features = torch.randn(1, 3, facts["target"]["hidden_size"] // SCALE, dtype=torch.bfloat16)
    *_, hidden = head.unroll(features, torch.tensor([[1, 2, 3, 4]]), 2)
    assert head.logits(hidden).shape == (1, 3, facts["target"]["vocab"] // SCALE)


def test_a_head_whose_sizes_are_not_stated_is_refused(test_data: Path, tmp_path: Path) -> None:
    facts = facts_of(test_data, "eagle3_speculators_redhatai_llama31_8b")
    save_facts(facts, tmp_path)
    with pytest.raises(ConfigError, match="num_attention_heads is 0"):
        load(facts, tmp_path)


def test_a_published_parallel_drafter_is_recognised(test_data: Path, tmp_path: Path) -> None:
    facts = facts_of(test_data, "pard_qwen3_0_6b")
    for tensor in facts["tensors"].values():
        tensor["shape"] = [1]
    save_facts(facts, tmp_path)
    assert recognise(tmp_path) == "pard"


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        ({"speculators_model_type": "peagle"}, ["fc.weight"], "kind peagle, which is not served"),
        ({"speculators_model_type": "dflash"}, ["fc.weight"], "kind dflash, which is not served"),
        ({"architectures": ["DFlashDraftModel"]}, ["fc.weight"], "kind DFlash,"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, ["layers.0.x"], "kind Eagle,"),
        ({"architectures": ["LlamaForCausalLM"]}, ["fc.weight", "layers.0.x"], "kind EAGLE,"),
        ({"architectures": ["MedusaModel"]}, ["blocks.0.layers.0.weight"], "kind Medusa,"),
        ({"medusa_num_heads": 3}, ["0.0.linear.weight"], "kind medusa,"),
        ({"pard_token": 5, "pard2_target_layers": [-1]}, ["lm_head.weight"], "kind pard2,"),
        ({"ptd_token": 5}, ["fc.weight"], "kind P-EAGLE,"),
        ({}, ["fc.weight", "mask_hidden"], "kind P-EAGLE,"),
        ({"architectures": [None]}, ["fc.weight"], "cannot be loaded: expected string"),
    ],
)
def test_what_is_not_served_or_malformed_is_refused(
    config: dict[str, Any], names: list[str], message: str, tmp_path: Path
) -> None:
    save_file({name: torch.ones(1) for name in names}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"drafter {tmp_path}: .*{message}"):
        recognise(tmp_path)


@pytest.mark.parametrize("layers", ["model.layers", "model.language_model.layers"])
@pytest.mark.parametrize("extra", ["mtp.fc", "model.layers.1.eh_proj"])
def test_our_own_models_and_drafters_are_not_found(layers: str, extra: str, tmp_path: Path) -> None:
    """A model with its own MTP layers is taken for a model."""
    assert recognise(tmp_path) is None
    names = (f"{layers}.0.mlp.weight", "mtp.layers.0.mlp.weight", f"{extra}.weight")
    save_file({name: torch.ones(1) for name in names}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GlmForCausalLM"]}))
    assert recognise(tmp_path) is None
    (tmp_path / "drafter.json").write_text("{}")
    assert recognise(tmp_path) is None
