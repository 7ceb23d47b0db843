"""Published EAGLE-3 heads (arXiv 2503.01840). A head is one more layer of a target:

    g_i    = fc [t_a, t_b, ..]           t_a is the input of the target's layer a at position i
    pair j = (g_{j-1}, token j) for j >= 1; its rotary position is j - 1
    x_j    = [norm(embedding of token j), norm(g_{j-1})];  q, k and v are linear in x
    y_j    = r_j + O attention(q_j, keys and values of the pairs 1 .. j)
    h_j    = y_j + MLP(norm(y_j))
    logits of the token after token j = lm_head(norm(h_j))

r_j is g_{j-1}, or norm(g_{j-1}) with `norm_before_residual`. At positions that the target has not
run yet, h of the previous pair (norm(h) with `norm_output`) replaces g. With `fc_norm`, each t is
normed before `fc`. With `norm_before_fc`, the concatenation of all t is normed before `fc`.

form         sizes in config.json         the layer ids name             tensors
speculators  `transformer_layer_config`   inputs of layers               `layers.0.*`
raw          at the top, as for a Llama   inputs or outputs of layers    `midlayer.*`, `layers.0.*`

Both forms have `fc`, `norm`, `lm_head` and `embed_tokens`. If a file lacks `lm_head` or
`embed_tokens`, those of the target are used. If the draft vocabulary is a part of the target's
vocabulary, the files also have `d2t`: row i of `lm_head` is for the target's token i + d2t[i]."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from outrider.models.draft_head import ATTENTION, Attend, DraftHead, LoadedDraftHead, Pairs
from outrider.models.loading import WEIGHTS_FILE, parameters_on_meta, put_weights, refusing
from outrider.models.published_drafters import read_config, read_tensors
from outrider.models.sources import CONFIG_FILE

_LAYER = "transformer_layer_config"
_LAYER_FIELDS = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)
_LAYER_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
_NEUTRAL_AT_ONE = ("logit_scale", "partial_rotary_factor")  # The formulas above lack these factors.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # Their angles depend only on the position.
_OUTPUT_BIAS = "layers.0.self_attn.o_proj.bias"
"""Zero if the files lack it. Some files have biases only for queries, keys and values."""
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_NOT_WEIGHTS = ("inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
"""Suffixes of tensors that some checkpoints have, but no head uses."""
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A head's configuration, from files of either form."""

    layer: LlamaConfig
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    target_width: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False  # whether queries and keys are normed before their rotation, as in Qwen3


class Eagle3LayerConfig(LlamaConfig):  # type: ignore[misc]
    """The configuration of a layer whose width need not be a multiple of the number of heads."""

    def validate_architecture(self) -> None:
        """Does nothing. The base class would refuse such a width."""


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, qk_norm: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        config._attn_implementation = ATTENTION
        self.input_layernorm = llama.LlamaRMSNorm(width, eps)
        self.hidden_norm = llama.LlamaRMSNorm(width, eps)
        self.self_attn = (Qwen3Attention if qk_norm else llama.LlamaAttention)(config, layer_idx=0)
        self.post_attention_layernorm = llama.LlamaRMSNorm(width, eps)
        self.mlp = llama.LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):  # They read x, which has twice the width.
            rows, bias = getattr(self.self_attn, name).out_features, config.attention_bias
            setattr(self.self_attn, name, nn.Linear(2 * width, rows, bias=bias))


class Eagle3Head(DraftHead):
    """An EAGLE-3 head of width D. The names of its parameters are those of the speculators form."""

    def __init__(self, config: Eagle3Config, embeddings: Tensor | None = None) -> None:
        """The head uses `embeddings` [V, D] without a copy. None = random embeddings."""
        super().__init__()
        layer, num_taps = config.layer, len(config.layer_ids)
        width, eps = layer.hidden_size, layer.rms_norm_eps
        taps_width = num_taps * config.target_width
        self.config = config
        self.layer_ids, self.carries_normed = config.layer_ids, config.norm_output
        self.width = width
        self.num_kv_heads: int = layer.num_key_value_heads
        self.key_width = self.value_width = layer.head_dim
        self.scaling = self.key_width**-0.5
        self.embed_tokens = nn.Embedding(layer.vocab_size, width, _weight=embeddings)
        self.input_norm = self.fc_norm = None
        if config.norm_before_fc:
            self.input_norm = llama.LlamaRMSNorm(taps_width, eps)
        if config.fc_norm:
            norms = (llama.LlamaRMSNorm(config.target_width, eps) for _ in range(num_taps))
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(taps_width, width, bias=False)
        self.layers = nn.ModuleList([_Layer(layer, config.qk_norm)])
        self.norm = llama.LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary_emb = llama.LlamaRotaryEmbedding(layer)

    def ways(self, num_layers: int) -> dict[str, Any]:
        shifted = [tuple(index + by for index in self.layer_ids) for by in (0, 1, -1)]
        return {
            f"layers {', '.join(map(str, layer_ids))}": layer_ids
            for layer_ids in shifted
            if min(layer_ids) >= 0 and max(layer_ids) < num_layers
        }

    def read_as(self, way: tuple[int, ...]) -> None:
        self.layer_ids = way

    def drop_pairs(self) -> None:
        """Frees all weights that `fuse` does not use. Afterwards call only `fuse`."""
        del self.embed_tokens, self.layers, self.norm, self.lm_head

    def drop_fuse(self) -> None:
        """Frees the weights that only `fuse` uses. Afterwards do not call `fuse`."""
        del self.fc, self.input_norm, self.fc_norm

    def fuse(self, hidden: Tensor) -> Tensor:
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            taps = hidden.chunk(len(self.fc_norm), -1)
            hidden = torch.cat([norm(t) for norm, t in zip(self.fc_norm, taps, strict=True)], -1)
        fused: Tensor = self.fc(hidden)
        return fused

    def step(self, pairs: Pairs, attend: Attend) -> Tensor:
        layer: Any = self.layers[0]
        y = self._attended(pairs, attend)
        hidden: Tensor = y + layer.mlp(layer.post_attention_layernorm(y))
        return hidden

    def _attended(self, pairs: Pairs, attend: Attend) -> Tensor:
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(pairs.features)
        x = torch.cat([layer.input_layernorm(self.embed_tokens(pairs.token_ids)), normed], -1)
        residual = normed if self.config.norm_before_residual else pairs.features
        return residual + self._call(layer.self_attn, x, pairs.positions, attend)


@dataclass(frozen=True)
class LoadedEagle3(LoadedDraftHead):
    """An EAGLE-3 head for one target."""

    module: Eagle3Head


def load_eagle3(path: Path, target: Any, *, name: str, target_name: str) -> LoadedEagle3:
    """Loads the head in `path` for the module `target`, in the dtype and on the device of the
    target's embeddings. Raises `ConfigError` if the files are broken or do not fit the target."""
    like = target.get_input_embeddings().weight
    with refusing(f"drafter {name}:"):
        tensors = {
            key.replace("midlayer.", "layers.0."): values
            for key, values in read_tensors(path).items()
            if not key.endswith(_NOT_WEIGHTS)
        }
        token_ids, tensors = _draft_vocabulary(tensors, target, target_name)
        config = _head_config(read_config(path), tensors, target, target_name)
        if config.layer.attention_bias:
            tensors.setdefault(_OUTPUT_BIAS, torch.zeros(config.layer.hidden_size))
        with parameters_on_meta():
            module = Eagle3Head(config)
        put_weights(module, tensors, like.device, like.dtype)
    module = module.to(like.device).requires_grad_(False).eval()
    return LoadedEagle3(module, tuple(token_ids.tolist()))


def _require(fits: bool, field: str, given: Any, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{field} is {given!r}; {allowed}")


def _draft_vocabulary(
    tensors: Mapping[str, Tensor], target: Any, target_name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the token ids [N] of the head's logits, in ascending order, and the weights. If the
    files lack `lm_head` or `embed_tokens`, takes those of the target."""
    weights = {key: values for key, values in tensors.items() if key not in ("d2t", "t2d")}
    weights.setdefault(_EMBEDDINGS, target.get_input_embeddings().weight)
    rows = target.get_output_embeddings().weight
    num_all, d2t = len(rows), tensors.get("d2t")
    if d2t is None:
        token_ids = torch.arange(num_all)
    else:
        token_ids = torch.arange(len(d2t)) + d2t.long()
        bounds = (int(token_ids.min()), int(token_ids.max()))
        allowed = f"the target {target_name} has the tokens 0 to {num_all - 1}"
        _require(bounds[0] >= 0 and bounds[1] < num_all, "d2t: token range", bounds, allowed)
        num, allowed = len({*token_ids.tolist()}), f"the {len(d2t)} rows must name different tokens"
        _require(num == len(d2t), "d2t: number of distinct tokens", num, allowed)
    own = weights.get(_HEAD)
    if own is None:
        own, order = rows, token_ids.sort().values
    else:
        _require(len(own) >= len(token_ids), _HEAD, [*own.shape], f"it needs {len(token_ids)} rows")
        order = token_ids.argsort()
    if not torch.equal(order, torch.arange(len(own))):
        own = own[order.to(own.device)]
    return token_ids.sort().values, weights | {_HEAD: own}


def _head_config(
    stated: dict[str, Any], tensors: Mapping[str, Tensor], target: Any, target_name: str
) -> Eagle3Config:
    places = (stated, stated.get("eagle_config") or {})

    def find(*keys: str) -> Any:
        values = (place.get(key) for key in keys for place in places)
        return next((value for value in values if value not in (None, [])), None)

    sizes = target.config.get_text_config()
    stated_layer = stated.get(_LAYER, stated)
    layer = _layer_config(stated_layer, tensors)
    for key in _NEUTRAL_AT_ONE:
        for factor in (find(key), stated_layer.get(key), layer.rope_parameters.get(key)):
            _require(factor in (None, 1), key, factor, "only 1 is supported")
    num_rows, num_tokens = len(tensors[_HEAD]), len(target.get_output_embeddings().weight)
    of_target, size = f"the target {target_name} has", stated_layer.get("vocab_size")
    has_size, shape = size in (None, sizes.vocab_size, num_tokens), [*tensors[_EMBEDDINGS].shape]
    _require(has_size, "vocab_size", size, f"{of_target} {sizes.vocab_size}")
    _require(shape[0] >= num_tokens, _EMBEDDINGS, shape, f"{of_target} {num_tokens} tokens")
    if find("use_aux_hidden_state") is False:
        raise ValueError(
            "use_aux_hidden_state is False; only heads that read several layers of the target are "
            "supported"
        )
    num_layers = sizes.num_hidden_layers
    ids_key = next((key for key in _LAYER_IDS if find(key)), _LAYER_IDS[0])
    taps = find(ids_key) or [2, num_layers // 2, num_layers - 3]
    allowed = f"it must list different layers of {target_name}, from 0 to {num_layers - 1}"
    _require(len({*taps} & {*range(num_layers)}) == len(taps), ids_key, taps, allowed)
    # In the raw form, if the first id is 1, the ids mean outputs of layers, not inputs.
    if _LAYER not in stated and taps[0] == 1 and max(taps) + 1 < num_layers:
        taps = [index + 1 for index in taps]
    flags = {flag: bool(find(flag)) for flag in _FLAGS}
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=num_rows,
        layer_ids=tuple(taps),
        target_width=sizes.hidden_size,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        **flags,
    )


def _layer_config(stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LlamaConfig:
    values = {key: stated[key] for key in _LAYER_FIELDS if stated.get(key) is not None}
    heads = stated.get("num_attention_heads", 0)
    kv_heads = values.get("num_key_value_heads", heads)
    at_least_1 = isinstance(heads, int) and heads > 0
    _require(at_least_1, "num_attention_heads", heads, "at least 1 is needed")
    divides = isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads == 0
    _require(divides, "num_key_value_heads", kv_heads, f"only divisors of {heads} are supported")
    kinds = stated.get("layer_types") or []
    is_full = "sliding_attention" not in kinds
    _require(is_full, "layer_types", kinds, "only full_attention is supported")
    window = None if kinds else stated.get("sliding_window")
    is_full = window is None or stated.get("use_sliding_window") is False
    _require(is_full, "sliding_window", window, "only attention without a window is supported")
    for name, key, per in (
        ("hidden_size", "fc.weight", 1),
        ("intermediate_size", "layers.0.mlp.gate_proj.weight", 1),
        ("head_dim", "layers.0.self_attn.q_proj.weight", heads),
    ):
        if key not in tensors:
            raise ValueError(f"its files lack the weights {key}")
        values.setdefault(name, len(tensors[key]) // per)
    values["vocab_size"] = len(tensors[_EMBEDDINGS])
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    is_one = not any(isinstance(value, dict) for value in rope.values())
    allowed = f"it must be one entry for all layers, of a type among {', '.join(_ROPE_TYPES)}"
    _require(kind in _ROPE_TYPES and is_one, "rope_scaling", rope, allowed)
    return Eagle3LayerConfig(**values)


def save_speculators(
    directory: Path,
    head: Eagle3Head,
    token_ids: Sequence[int],
    *,
    target_name: str,
    architectures: Sequence[str],
    num_draft_tokens: int,
) -> None:
    """Writes a head in the form of speculators 0.9. `architectures` are those of the target, and
    `token_ids` are the tokens of the head's logits. The files recommend K = `num_draft_tokens`.
    The files have embeddings even if these are the target's, because speculators would leave
    missing embeddings unset."""
    config, layer = head.config, head.config.layer
    method = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    stated = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": [*architectures]},
        },
        _LAYER: {
            "model_type": "qwen3" if config.qk_norm else "llama",
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            **{key: getattr(layer, key) for key in _LAYER_FIELDS if hasattr(layer, key)},
            "rope_theta": layer.rope_parameters["rope_theta"],
        },
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [*head.layer_ids],
        "target_hidden_size": config.target_width,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        **{flag: getattr(config, flag) for flag in _FLAGS},
    }
    tensors = {key: values.detach().cpu().contiguous() for key, values in head.named_parameters()}
    if len(token_ids) < layer.vocab_size:
        ids = torch.tensor(token_ids)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / WEIGHTS_FILE), metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # safetensors lets only the owner read its files.
    (directory / CONFIG_FILE).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
