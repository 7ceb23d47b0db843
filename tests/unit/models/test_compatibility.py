"""Models that cannot be run on pages are refused, each with its reason, before they serve."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from models import tiny_config, tiny_module
from paged_engines import VOCAB, EngineMaker, checked_engines, dense, gap, ids, run

from outrider.errors import ConfigError
from outrider.models.compatibility import check_features

SIZES = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def refused(module: Any, reason: str, max_model_len: int = 128) -> None:
    with pytest.raises(ConfigError, match=f"^model tiny: .*{reason}"):
        EngineMaker()(module.eval(), max_model_len=max_model_len)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "num_local_experts": 1}


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("Mamba", {"hidden_size": 16, "state_size": 4}, "cannot be rolled back"),
        ("GPTJ", {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}, "cannot be replaced"),
        ("Bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}, "the positions of its tokens"),
        ("GptOss", {**SMALL, **EXPERTS, "num_experts_per_tok": 1}, "s_aux"),
        (
            "Llama4Text",
            {**SMALL, **EXPERTS, "intermediate_size_mlp": 16, "attention_chunk_size": 8,
             "layer_types": ["chunked_attention"]},
            "neither causal nor a sliding window",
        ),
    ],
)  # fmt: skip
def test_other_attention_is_refused(name: str, sizes: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    refused(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), reason)


def test_one_layer_without_keys_and_values() -> None:
    module = tiny_module(tiny_config("qwen3", VOCAB))
    module.config.layer_types = ["full_attention", "linear_attention"]
    refused(module, "linear_attention")


def test_a_scale_of_positions_that_depends_on_the_batch() -> None:
    """longrope has one set of frequencies up to a length and another beyond it, for all tokens of a
    step. So the model may run up to that length only."""
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
    """The second run would overwrite the keys of the first."""
    module = tiny_module(tiny_config("llama", VOCAB))
    module.model.layers[1] = module.model.layers[0]
    refused(module, "runs twice")


def test_a_model_that_does_not_heed_positions() -> None:
    """Its configuration does not show it, but it answers wrongly when a text is run in parts."""
    module = tiny_module(tiny_config("llama", VOCAB))
    rotary = module.model.rotary_emb.forward

    def counted(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return rotary(states, torch.arange(position_ids.shape[1])[None])

    module.model.rotary_emb.forward = counted
    refused(module, "with a paged cache differ from the expected logits by")


def test_features_may_differ_in_one_row_as_half_precision_has_it_and_not_in_many() -> None:
    expected = torch.randn((21, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    found = expected.clone()
    found[1] *= 1.5
    check_features(Mock(features=lambda: [found]), expected)
    with pytest.raises(
        ConfigError, match=r"differ from the expected features by 0.5 of their norm; 0.2 is allowed"
    ):
        check_features(Mock(features=lambda: [1.5 * expected]), expected)
