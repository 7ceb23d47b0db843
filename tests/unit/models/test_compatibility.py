"""Models that cannot be run on pages are refused, each with its reason, before they serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from models import tiny_config, tiny_module
from paged_engines import VOCAB, EngineMaker, checked_engines, dense, gap, ids, run

from outrider.errors import ConfigError

SIZES = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def refused(module: Any, reason: str, max_model_len: int = 128) -> None:
    with pytest.raises(ConfigError, match=f"^model tiny: .*{reason}"):
        EngineMaker()(module.eval(), max_model_len=max_model_len)


def from_config(name: str, **sizes: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_a_recurrent_state() -> None:
    """It cannot be cut back."""
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    refused(transformers.MambaForCausalLM(config), "tokens cannot be taken back")


def test_one_layer_without_keys_and_values() -> None:
    module = tiny_module(tiny_config("qwen3", VOCAB))
    module.config.layer_types = ["full_attention", "linear_attention"]
    refused(module, "linear_attention")


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("GPTJ", {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}, "cannot be replaced"),
        ("Bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}, "the positions of its tokens"),
    ],
)  # fmt: skip
def test_attention_that_is_the_models_own(name: str, sizes: dict[str, Any], reason: str) -> None:
    refused(from_config(name, **sizes), reason)


def test_attention_sinks() -> None:
    module = from_config(
        "GptOss",
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    refused(module, "s_aux")


def test_chunked_attention() -> None:
    """A mask that is no window is found by trying it."""
    config = transformers.Llama4TextConfig(
        **SIZES,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_local_experts=1,
        attention_chunk_size=8,
        layer_types=["chunked_attention"],
    )
    refused(transformers.Llama4ForCausalLM(config), "no sliding window")


def test_a_scale_of_positions_that_depends_on_the_batch() -> None:
    """longrope has one set of frequencies up to a length and another beyond it, for all tokens of
    a step alike: it may be run up to that length."""
    config = tiny_config("llama", VOCAB, 128)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0,
        "original_max_position_embeddings": 32, **factors,
    }  # fmt: skip
    refused(tiny_module(config), "--max-model-len of 32")
    module = tiny_module(config, dtype=torch.float64)
    with checked_engines() as make_engine:
        expected = dense(module, ids(32))
        assert gap(run(make_engine(module, max_model_len=32), "s", ids(32), 32), expected) < 1e-5


def test_a_layer_that_runs_twice() -> None:
    """Its second keys would overwrite its first."""
    module = tiny_module(tiny_config("llama", VOCAB))
    module.model.layers[1] = module.model.layers[0]
    refused(module, "runs twice")


def test_a_model_that_does_not_heed_positions() -> None:
    """Nothing in its configuration tells so, but it answers wrongly when run in parts."""
    module = tiny_module(tiny_config("llama", VOCAB))
    rotary = module.model.rotary_emb.forward

    def counted(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return rotary(states, torch.arange(position_ids.shape[1])[None])

    module.model.rotary_emb.forward = counted
    refused(module, "differ from its own by")


def test_a_model_that_reads_its_neighbours() -> None:
    """One whose tokens change what follows them in a step, whatever sequence that is."""
    module = tiny_module(tiny_config("llama", VOCAB))
    module.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out.cumsum(1))
    refused(module, "differ from its own by")
