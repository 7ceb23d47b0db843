"""Makes tiny checkpoints with MTP layers, and computes their outputs from the definition."""

import json
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.models.draft_head import LoadedDraftHead
from outrider.models.mtp import load_mtp
from tests.support.models import tiny_config, tiny_module

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next")
_NEXT_NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
}


def mtp_target(
    family: str,
    vocab_size: int = 32,
    max_model_len: int = 128,
    dtype: torch.dtype = torch.float32,
    **changes: int,
) -> Any:
    """A random target with experts, of a family that has MTP layers, but without its MTP layer."""
    shared = {"tie_word_embeddings": False, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    routed = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    special: dict[str, Any] = {
        "deepseek_v3": routed
        | {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        "glm4_moe": routed | {"use_qk_norm": True},
        "qwen3_next": {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    }
    settings = shared | changes | special[family]
    return tiny_module(tiny_config(family, vocab_size, max_model_len, **settings), dtype=dtype)


class MtpReference:
    """An MTP layer of the target's family, which runs over whole sequences of pairs."""

    def __init__(self, target: Any, seed: int = 1) -> None:
        """Gives the layer random weights. `target` is a model of the library."""
        config = deepcopy(target.config)
        config._attn_implementation = "eager"
        num_layers, norm = config.num_hidden_layers, type(target.model.norm)
        kinds = getattr(config, "layer_types", None)
        index = kinds.index("full_attention") if kinds else num_layers
        self.target, self.family = target, config.model_type
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = type(target.model.layers[-1])(config, index).to(target.dtype).eval()
            width = config.hidden_size
            self.norms = [norm(width).to(target.dtype) for _ in range(3)]
            self.project = torch.nn.Linear(2 * width, width, bias=False, dtype=target.dtype)
            for module in (self.layer, *self.norms, self.project):
                for tensor in module.requires_grad_(False).state_dict().values():
                    noise = torch.randn_like(tensor)
                    tensor.copy_(0.2 * noise if tensor.dim() > 1 else tensor + 0.1 * noise)
        self.prefix = "mtp." if kinds else f"model.layers.{num_layers}."

    def tensors(self) -> dict[str, Tensor]:
        names = ("enorm", "hnorm", "shared_head.norm")
        own = {f"{name}.weight": norm.weight for name, norm in zip(names, self.norms, strict=True)}
        own["eh_proj.weight"] = self.project.weight
        for name, tensor in self.layer.state_dict().items():
            if ".experts." not in name:
                own[name] = tensor
                continue
            for index, expert in enumerate(tensor):
                place = f"mlp.experts.{index}."
                if name.endswith("gate_up_proj"):
                    own[f"{place}gate_proj.weight"], own[f"{place}up_proj.weight"] = expert.chunk(2)
                else:
                    own[f"{place}down_proj.weight"] = expert
        if self.prefix != "mtp.":
            return {self.prefix + name: tensor.clone() for name, tensor in own.items()}
        renamed = {}
        for name, tensor in own.items():
            [new] = [
                name.replace(old, new) for old, new in _NEXT_NAMES.items() if name.startswith(old)
            ] or [f"layers.0.{name}"]
            renamed[f"mtp.{new}"] = tensor.clone()
        return renamed

    def save(self, directory: Path) -> Path:
        self.target.save_pretrained(directory)
        stated = json.loads((directory / "config.json").read_text())
        if self.prefix != "mtp.":
            stated["num_nextn_predict_layers"] = 1
        (directory / "config.json").write_text(json.dumps(stated))
        weights = directory / "model.safetensors"
        save_file(load_file(weights) | self.tensors(), weights, metadata={"format": "pt"})
        return directory

    def features(self, text: Tensor) -> Tensor:
        """g [T, D] of a text [T]."""
        return self.target.model(text[None]).last_hidden_state[0]

    def chain(
        self, text: Tensor, num_depths: int, *, carries_normed: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        """norm(h) [D] of each pair of a greedy chain behind a text [T], the last of whose tokens
        ends the first drafted pair; and the tokens that are drafted. It goes on with norm(h), or
        with h."""
        features, tokens = self.features(text[:-1]), text[1:]
        hidden, drafted = [], []
        for _ in range(num_depths):
            found = self._last(features, tokens)
            hidden.append(self.norms[2](found))
            drafted.append(int(self.target.lm_head(hidden[-1]).argmax()))
            features = torch.cat([features, (hidden[-1] if carries_normed else found)[None]])
            tokens = torch.cat([tokens, torch.tensor(drafted[-1:])])
        return hidden, drafted

    def _last(self, features: Tensor, tokens: Tensor) -> Tensor:
        embedding_norm, hidden_norm, _ = self.norms
        embedded = embedding_norm(self.target.model.embed_tokens(tokens))
        rows = self.project(torch.cat([embedded, hidden_norm(features)], -1))[None]
        num = len(tokens)
        angles = self.target.model.rotary_emb(rows, torch.arange(num)[None])
        mask = torch.full((num, num), -torch.inf, dtype=rows.dtype).triu(1)[None, None]
        return self.layer(rows, attention_mask=mask, position_embeddings=angles)[0, -1]


def tiny_mtp(target: Any) -> LoadedDraftHead:
    """A random MTP layer for a target's module, read from files."""
    with TemporaryDirectory() as directory:
        return load_mtp(MtpReference(target).save(Path(directory)), target, target_name="tiny")
