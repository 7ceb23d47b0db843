"""Makes tiny models with random weights, whose distributions are far from uniform."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from outrider.models.eagle3 import Eagle3Config, Eagle3Head, LoadedEagle3, save_speculators
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.linear_layers import fastest_linear
from outrider.models.student import StudentDescription, save_student

MAX_MODEL_LEN = 128
_SPREAD = 0.4
"""Standard deviation of weights. It gives next-token distributions with a few likely tokens."""


def tiny_config(
    family: str, vocab_size: int = 32, max_model_len: int = MAX_MODEL_LEN, **changes: Any
) -> Any:
    """A configuration with two layers, unless `changes` say otherwise. If the family supports it,
    there are four query heads and two key-value heads."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": max_model_len,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if not family.startswith("gpt"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    mixed = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    special: dict[str, Any] = {
        "llama": {"tie_word_embeddings": False},
        "mistral": {"sliding_window": 6},  # In every layer.
        "gemma2": mixed
        | {
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 5,
            "attn_implementation": "eager",
        },
        "gemma3": mixed,
    }
    settings = sizes | special.get(family, {}) | changes
    model_type = "gemma3_text" if family == "gemma3" else family
    return transformers.AutoConfig.for_model(model_type, **settings)


def tiny_module(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, _SPREAD)
    return module.requires_grad_(False)


def flat_module(vocab_size: int, max_model_len: int) -> Any:
    """A Llama in float64 with so flat logits that drafts of random heads are sometimes accepted."""
    module = tiny_module(tiny_config("llama", vocab_size, max_model_len), dtype=torch.float64)
    module.lm_head.weight.mul_(0.03)
    return module


def quick_linear(dtype: torch.dtype) -> type:
    """The replacements of linear layers on this machine's CPU, in float32 or bfloat16."""
    return type(fastest_linear(torch.zeros(1, 1, dtype=dtype), None))


def twin(module: Any) -> Any:
    other = copy.deepcopy(module)
    other.set_attn_implementation("sdpa" if module.config.model_type != "gemma2" else "eager")
    return other


def save_tiny_model(
    directory: Path,
    *,
    family: str = "llama",
    vocab_size: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    eos_token_id: int | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    num_layers: int = 2,
    tokenizer: transformers.PreTrainedTokenizerFast | None = None,
) -> Path:
    """Saves a random model as safetensors and returns `directory`. `vocab_size` is the width of the
    model's logits. If it is larger than the tokenizer's vocabulary, the rest is padding."""
    config = tiny_config(family, vocab_size, max_model_len)
    config.eos_token_id, config.num_hidden_layers = eos_token_id, num_layers
    module = tiny_module(config, seed, dtype)
    module.generation_config.eos_token_id = eos_token_id
    module.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


def depth_cut(source: Path, directory: Path, num_layers: int) -> Path:
    """Saves the first layers of a Llama-like model, and its tokenizer, and returns `directory`."""
    module = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    del module.model.layers[num_layers:]
    module.config.num_hidden_layers = num_layers
    if kinds := getattr(module.config, "layer_types", None):
        module.config.layer_types = kinds[:num_layers]
    module.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    return directory


def tiny_drafter(target: Any, token_ids: Sequence[int], seed: int = 1) -> Any:
    """A random drafter with the target's embeddings, and its head's rows for `token_ids`."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    module = tiny_module(config, seed)
    module.get_input_embeddings().weight = target.get_input_embeddings().weight
    head = torch.nn.Linear(config.hidden_size, len(token_ids), bias=False)
    head.weight = torch.nn.Parameter(target.lm_head.weight[list(token_ids)], requires_grad=False)
    module.set_output_embeddings(head)
    return module


def save_tiny_drafter(
    directory: Path, target: Path, token_ids: Sequence[int], drafter: Any = None
) -> Path:
    """Saves such a drafter, by default a new one, for the model in `target`."""
    module = transformers.AutoModelForCausalLM.from_pretrained(target)
    description = StudentDescription(target="tiny", target_fingerprint=tensors_fingerprint(target))
    directory.mkdir(parents=True, exist_ok=True)
    made = drafter or tiny_drafter(module, token_ids)
    save_student(directory, made, torch.tensor(token_ids), description)
    return directory


def tiny_eagle3(
    target: Any, token_ids: Sequence[int], layer_ids: Sequence[int] = (), width: int = 24
) -> LoadedEagle3:
    """A random EAGLE-3 head with logits for `token_ids` only. By default its width differs from the
    target's, and it reads the target's last two layers."""
    sizes = target.config
    layer = transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=width,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=40,
    )
    taps = tuple(layer_ids) or tuple(range(sizes.num_hidden_layers))[-2:]
    config = Eagle3Config(
        layer=layer, draft_vocab_size=len(token_ids), layer_ids=taps, target_width=sizes.hidden_size
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = Eagle3Head(config).to(target.dtype).requires_grad_(False).eval()
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, _SPREAD)
    return LoadedEagle3(head, tuple(token_ids))


def save_tiny_eagle3(directory: Path, target: Path, token_ids: Sequence[int]) -> Path:
    """Saves such a head in the format of speculators, and returns `directory`."""
    made = tiny_eagle3(transformers.AutoModelForCausalLM.from_pretrained(target), token_ids)
    save_speculators(
        directory,
        made.module,
        made.token_ids,
        target_name="tiny",
        architectures=["LlamaForCausalLM"],
        num_draft_tokens=3,
    )
    return directory


def save_tiny_raw_eagle3(directory: Path, target: Path, token_ids: Sequence[int]) -> Path:
    """Saves such a head in the format of EAGLE."""
    save_tiny_eagle3(directory, target, token_ids)
    stated = json.loads((directory / "config.json").read_text())
    layers = "eagle_aux_hidden_state_layer_ids"
    as_raw(directory, architectures=["LlamaForCausalLMEagle3"], **{layers: stated[layers]})
    return directory


def as_raw(directory: Path, **stated: Any) -> None:
    """Rewrites the files of a head in the format of EAGLE: a torch file, and a flat configuration
    that also has the `stated` values."""
    weights, file = directory / "model.safetensors", directory / "config.json"
    raw = {k.replace("layers.0.", "midlayer."): v for k, v in load_file(weights).items()}
    weights.unlink()
    torch.save(raw, directory / "pytorch_model.bin")
    config = json.loads(file.read_text())
    flat = {"draft_vocab_size": config["draft_vocab_size"]} | config["transformer_layer_config"]
    file.write_text(json.dumps(flat | stated))


CORPUS = (
    "The quick brown fox jumps over the lazy dog while the slow grey cat looks on.",
    "She said that the rain would not stop before the evening, and it did not.",
    "Numbers such as 12, 345 and 6789 appear; so do naïve café owners and 東京.",
    "def add(a, b):\n    return a + b\n",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def byte_level_tokenizer(vocab_size: int = 320) -> transformers.PreTrainedTokenizerFast:
    """A small byte-level BPE tokenizer with a chat template, like that of GPT-2 and Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    special = {"eos_token": "<|end|>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special
    )


def byte_fallback_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A small BPE tokenizer of the kind of Llama 2, Mistral and Gemma. It marks the beginnings of
    words, spells unknown characters as bytes, and drops the leading space of a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    letters = sorted({c for line in CORPUS[:2] for c in line.replace(" ", "▁")})
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *letters, "▁t", "▁th", "▁the"]:
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    unknown = {"unk_token": "<unk>"}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, **unknown))
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
