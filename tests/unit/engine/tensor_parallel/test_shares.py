"""A model on several ranks gives the logits of the whole one; each rank holds only its share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, Olmo2Config, Phi3Config

from outrider.config.deployment import TargetConfig
from outrider.errors import ConfigError, SettingError
from outrider.models.loading import load_model
from outrider.models.sharding import check_shares, load_shard
from outrider.replica.engines import build_engine
from tests.support.models import save_tiny_model, tiny_config, tiny_module
from tests.support.thread_ranks import on_each, thread_ranks

KEY = "tensor_parallel_size"
VOCAB_SIZE = 37  # no size divides it
SPARE = 0.05
"""Share of a model that a rank may hold beyond its equal part, for padding and for what every rank
holds."""


def _config(family: str) -> Any:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "phi3":  # what a rank multiplies is gathered at once, and cut again
        return Phi3Config(**sizes, tie_word_embeddings=False)
    if family == "olmo2":
        return Olmo2Config(**sizes, tie_word_embeddings=False)
    config = tiny_config(family, VOCAB_SIZE)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = 4
    return config


def _saved(directory: Path, family: str) -> Path:
    module = tiny_module(_config(family), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()  # a bias that is added once a rank would show
    module.save_pretrained(directory)
    return directory


def _logits(modules: list[Any], token_ids: torch.Tensor) -> list[torch.Tensor]:
    def run(rank: int) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = modules[rank](input_ids=token_ids).logits
        return logits

    return on_each(len(modules), run)


def _numbers(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma", "gemma3", "gpt_neox", "phi3", "olmo2"]
)
def test_the_leader_has_the_logits_of_the_whole_model(tmp_path: Path, family: str) -> None:
    """Logits agree in float64 to 1e-10, for all styles of plans, with tied heads and others; the
    other ranks get none. Every rank has the same description of the model, and little more than its
    share."""
    path, size = _saved(tmp_path, family), 4
    whole, info = load_model(path)
    ranks = thread_ranks(size)
    shares = [load_shard(path, rank, key=KEY) for rank in ranks]
    assert [shown for _, shown in shares] == [info] * size
    token_ids = torch.arange(11, 37).view(2, 13)
    wanted = _logits([whole], token_ids)[0]
    leader, *followers = _logits([module for module, _ in shares], token_ids)
    assert (leader - wanted).abs().max() <= 1e-10
    assert all(logits.shape == (2, 13, 0) for logits in followers)
    bound = (1 / size + SPARE) * _numbers(whole)
    assert all(_numbers(module) <= bound for module, _ in shares)


@pytest.mark.parametrize(
    ("family", "size", "reason"),
    [
        ("llama", 3, "3 does not divide the 4 attention heads of model .*; 1, 2 do"),
        ("llama", 4, "4 does not divide the 2 key-value heads of model .*; 1, 2 do"),
        ("gpt_neox", 8, "8 does not divide the 4 attention heads of model .*; 1, 2, 4 do"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(
    tmp_path: Path, family: str, size: int, reason: str
) -> None:
    path = save_tiny_model(tmp_path, family=family)
    with pytest.raises(SettingError, match=f"^{KEY}: {reason}$"):
        load_shard(path, thread_ranks(size)[0], key=KEY)
    (path / "model.safetensors").unlink()
    with pytest.raises(SettingError, match=reason):
        check_shares(path, size, key=KEY, name="tiny")
    check_shares(path, 2, key=KEY, name="tiny")


def test_a_model_that_cannot_be_shared_out_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "gpt2", family="gpt2")
    with pytest.raises(SettingError, match=r"GPT2LMHeadModel\) has no plan"):
        check_shares(path, 2, key=KEY, name="tiny")
    experts = MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=2,
        architectures=["MixtralForCausalLM"],
    )
    experts.save_pretrained(tmp_path / "mixtral")
    with pytest.raises(SettingError, match="unknown style moe_tp_experts"):
        check_shares(tmp_path / "mixtral", 2, key=KEY, name="tiny")


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Otherwise a missing tensor would be random, and a larger one would be cut."""
    path = save_tiny_model(tmp_path)
    stored = load_file(path / "model.safetensors")
    wrong = "model.layers.0.mlp.up_proj.weight"
    wider = stored | {wrong: torch.cat([stored[wrong], stored[wrong]])}
    save_file(wider, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{wrong} do not fit"):
        load_shard(path, thread_ranks(2)[0], key=KEY)
    fewer = {name: tensor for name, tensor in stored.items() if name != wrong}
    save_file(fewer, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack the weights {wrong}"):
        load_shard(path, thread_ranks(2)[0], key=KEY)


class _AllHere(Exception):
    """Raised in place of what comes once all ranks have loaded."""


class _FirstRank:
    """A rank that has its share before the other one."""

    rank, size = 0, 2

    def wait_for_all(self) -> None:
        raise _AllHere

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the other rank still loads")

    all_reduce = gather = all_gather


def test_nothing_that_must_be_quick_comes_before_all_have_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TargetConfig(directory=str(_saved(tmp_path, "llama")), device="cpu", num_threads=1)
    with caplog.at_level("INFO"), pytest.raises(_AllHere):
        build_engine(config, 1, _FirstRank())
    assert "loading share 1 of 2" in caplog.text
    assert "replaced modules" in caplog.text
