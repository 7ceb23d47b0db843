"""Maker of a tiny Llama in a GGUF file, for tests."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests.support.models import byte_level_tokenizer, tiny_config, tiny_module


def save_tiny_gguf(path: Path) -> Path:
    """Saves a random Llama of 320 tokens with 8-bit matrices, a byte-level tokenizer and a chat
    template, as llama.cpp's converter would write it. Returns `path`."""
    tokenizer = byte_level_tokenizer()
    config = tiny_config("llama", len(tokenizer))
    config.intermediate_size = 64  # A block has 32 values.
    module = tiny_module(config)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens[index] for index in range(len(tokens))])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[index in special] for index in range(len(tokens))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    rng = np.random.default_rng(0)
    for name, parameter in module.named_parameters():
        values = parameter.numpy()
        if values.ndim == 1:  # Norms that are not all 1, and that bfloat16 cannot hold exactly.
            values = rng.uniform(0.5, 1.5, values.shape).astype(np.float32)
        for part, num_heads in heads.items():
            if part in name:
                values = paired_rows(values, num_heads)
        stored = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 1:
            writer.add_tensor(stored, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def paired_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders rows [H * D, ..] of queries or keys as llama.cpp does for a Llama: the two rows that
    a rotation mixes become neighbours, instead of being half a head apart."""
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
