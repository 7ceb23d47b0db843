"""Tiny models that vLLM can run on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, MambaConfig, MixtralConfig

from tests.support.models import tiny_config, tiny_module

HEAD_WIDTH = 32
"""The smallest width of a head that vLLM's attention for CPUs accepts."""
MAX_MODEL_LEN = 256
VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_WIDTH,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MakeEngine = Callable[..., Any]


def config_of(family: str, **changes: Any) -> Any:
    sizes = SIZES | changes
    if family == "mixtral":
        return MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    if family == "mamba":
        return MambaConfig(vocab_size=VOCAB, hidden_size=64, state_size=8, num_hidden_layers=2)
    if family == "deepseek_v2":
        return DeepseekV2Config(
            **sizes,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        )
    config = tiny_config(family, VOCAB, MAX_MODEL_LEN)
    for name, value in sizes.items():
        setattr(config, name, value)
    return config


def save(
    family: str, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    module = tiny_module(config_of(family, **changes), seed, dtype)
    module.save_pretrained(directory)
    return module


def leave_groups() -> None:
    """Removes vLLM's groups of ranks, because another model may need other groups. A deployment's
    process makes them only once."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
