"""A target's own layer for multi-token prediction (MTP, arXiv 2412.19437), run as a draft head:

    g_i    = output of the target's last norm at position i
    pair j = (g_{j-1}, token j) for j >= 1; its rotary position is j - 1
    x_j    = eh_proj [enorm(embedding of token j), hnorm(g_{j-1})]
    h_j    = layer(x_j), a decoder layer like the target's, which sees the pairs 1 .. j
    logits of the token after token j = head(norm(h_j))

For a draft token, norm(h) of the previous pair takes the place of g, as in transformers and
`speculators`. For DeepSeek and GLM, vLLM uses h instead of norm(h); `MtpHead.ways` includes both.
In the first pair, vLLM uses zeros instead of the embedding. Outrider uses the embedding.

family                  tensors in the target's files (N is the target's number of layers)
deepseek_v3, glm4_moe   `model.layers.N.*`: `enorm`, `hnorm`, `eh_proj`, `shared_head.norm`, and the
                        tensors of a decoder layer. The copies of the target's embeddings and head
                        (`embed_tokens`, `shared_head.head`) are not read
qwen3_next              `mtp.*`: `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`, `norm`, and
                        the tensors of a decoder layer at `layers.0.*`

If a target has several MTP layers, the first layer drafts all tokens."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from outrider.errors import ConfigError
from outrider.models.draft_head import ATTENTION, OUTPUT, Attend, DraftHead, LoadedDraftHead, Pairs
from outrider.models.loading import DTYPES, check_finite, open_weights, refusing
from outrider.models.published_drafters import read_config
from outrider.models.target_layers import last_norm

_PREFIXES = {
    "deepseek_v3": "model.layers.{num_hidden_layers}.",
    "glm4_moe": "model.layers.{num_hidden_layers}.",
    "qwen3_next": "mtp.",
}
"""Maps the target's `model_type` to the name prefix of the first MTP layer's tensors."""
_NOT_SERVED = "qwen3_next"
"""The engines refuse this target, because the state of linear attention cannot be rolled back. Its
MTP layer can be loaded, so that a test can compare it with the code of `speculators`."""
_UNUSED = re.compile(r"^mtp\.layers\.[1-9]|\.(embed_tokens|shared_head\.head)\.weight$")
"""Matches tensors of later MTP layers, and copies of the target's embeddings and head."""
_SCALE, _BLOCK = "_scale_inv", (128, 128)
"""The name suffix of float8 scales, and the default size (rows, columns) of a block. Each block of
a float8 weight has one scale."""
_OWN = " (and the MTP layer's output before its norm)"
_WAYS = {
    f"hidden states {side} the target's last norm{own}": (side == "after", own != _OWN)
    for own in ("", _OWN)
    for side in ("after", "before")
}
"""Maps each way to read the target to an argument of `MtpHead.read_as`."""


class MtpHead(DraftHead):
    """The first layer of `model`, an `MtpModel` of transformers with loaded weights. Embeddings and
    LM head are those of the module `target`."""

    def __init__(self, model: Any, target: Any, reads_output: bool) -> None:
        """With `reads_output`, the head reads the output of the target's last norm. Otherwise it
        reads the norm's input and runs the norm itself."""
        super().__init__()
        [self.layer] = model.layers
        self.norm, self.rotary_emb = self.layer.post_norm, model.rotary_emb
        self.target_norm = None if reads_output else last_norm(target)
        num_layers = target.config.get_text_config().num_hidden_layers
        self.layer_ids = (OUTPUT if reads_output else num_layers,)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        attention, embeddings = self.layer.mtp_block.self_attn, self.embed_tokens.weight
        attention.config._attn_implementation = ATTENTION
        self.width = embeddings.shape[1]
        self._is_normed = True
        self.scaling = attention.scaling
        first = torch.zeros(1, dtype=torch.long, device=embeddings.device)
        pair = Pairs(embeddings.new_zeros(1, self.width), first, first)
        keys, values = self.keys_and_values(pair)
        self.num_kv_heads, self.key_width = keys.shape[1:]
        self.value_width = values.shape[-1]

    def ways(self, num_layers: int) -> dict[str, Any]:
        """See `DraftHead.ways`. Some training programs take g before the target's last norm, and
        some take h before the layer's own norm."""
        return {name: way for name, way in _WAYS.items() if way[0] or self.target_norm is not None}

    def read_as(self, way: tuple[bool, bool]) -> None:
        """`way` has a flag for the target's last norm, and a flag for the head's own norm. If a
        flag is true, the head reads that norm's output, otherwise its input."""
        self._is_normed, self.carries_normed = way

    def fuse(self, hidden: Tensor) -> Tensor:
        if self.target_norm is None or not self._is_normed:
            return hidden
        normed: Tensor = self.target_norm(hidden)
        return normed

    def step(self, pairs: Pairs, attend: Attend) -> Tensor:
        return self._call(self.layer.mtp_block, self._x(pairs), pairs.positions, attend)

    def _attended(self, pairs: Pairs, attend: Attend) -> Tensor:
        block = self.layer.mtp_block
        rows = block.input_layernorm(self._x(pairs))
        return self._call(block.self_attn, rows, pairs.positions, attend)

    def _x(self, pairs: Pairs) -> Tensor:
        layer = self.layer
        embedded = layer.enorm(self.embed_tokens(pairs.token_ids))
        x: Tensor = layer.eh_proj(torch.cat([embedded, layer.hnorm(pairs.features)], -1))
        return x


def check_mtp(path: Path, name: str) -> str:
    """Returns the name prefix of the first MTP layer's tensors in `path`. Raises `ConfigError` if
    the model has no MTP layer that can be used."""
    with refusing(f"model {name}:"):
        stated = read_config(path)
        with open_weights(path) as files:
            names = [*files]
    family = stated.get("model_type")
    if family not in _PREFIXES:
        allowed = ", ".join(sorted({*_PREFIXES} - {_NOT_SERVED}))
        raise ConfigError(
            f"model {name}: model_type is {family!r}; only MTP layers of {allowed} are served"
        )
    prefix = _PREFIXES[family].format(num_hidden_layers=stated.get("num_hidden_layers"))
    if not any(key.startswith(prefix) for key in names):
        num_stated = stated.get("num_nextn_predict_layers", 0)
        raise ConfigError(
            f"model {name}: this checkpoint has no MTP layers: num_nextn_predict_layers is "
            f"{num_stated}, and no tensor's name begins with {prefix}"
        )
    return prefix


def load_mtp(
    path: Path, target: Any, *, target_name: str, reads_output: bool = False
) -> LoadedDraftHead:
    """Loads the first MTP layer of the target in `path`, in the dtype and on the device of the
    module `target`. Raises `ConfigError` if there is no MTP layer, or its weights are broken."""
    prefix = check_mtp(path, target_name)
    with refusing(f"model {target_name}: its MTP layer"):
        with open_weights(path) as files:
            tensors = {
                key: file.get_tensor(key)
                for key, file in files.items()
                if key.startswith(prefix) and not _UNUSED.search(key)
            }
        model = _with_weights(target, _dequantized(tensors, read_config(path), target.dtype))
    head = MtpHead(model, target, reads_output).requires_grad_(False).eval()
    return LoadedDraftHead(head, tuple(range(len(head.lm_head.weight))))


def _dequantized(
    tensors: dict[str, Tensor], stated: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    quantization = stated.get("quantization_config") or {}
    rows, columns = quantization.get("weight_block_size") or _BLOCK
    dequantized = {}
    for key, values in tensors.items():
        if key.endswith(_SCALE):
            continue
        scales = tensors.get(key + _SCALE)
        if scales is not None:
            spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            values = (values.float() * spread[: values.shape[0], : values.shape[1]]).to(dtype)
        elif values.dtype not in DTYPES.values():
            raise ValueError(
                f"{key} is stored as {values.dtype}; it must be floating point of 16 bits or "
                f"more, or float8 with a {_SCALE.removeprefix('_')} for each block"
            )
        dequantized[key] = values
    return dequantized


def _with_weights(target: Any, tensors: dict[str, Tensor]) -> Any:
    like = copy(target)  # The code below changes the configuration of the copy.
    like.config = deepcopy(target.config)
    sizes = like.config.get_text_config()
    sizes.num_mtp_layers = 1
    if getattr(sizes, "layer_types", None):
        sizes.mtp_layer_types = ["full_attention"]
    with ExitStack() as stack:
        for context in MtpModel.get_init_context(target.dtype, False, False, None):
            stack.enter_context(context)
        model = MtpModel(like, 1)
    # `MtpModel.get_weight_conversions` returns this list, but only since transformers 5.23.
    first = f"layers.{sizes.num_hidden_layers}."
    conversions = [
        WeightRenaming(source_patterns=first, target_patterns="layers.0.mtp_block."),
        *get_model_conversion_mapping(model, add_legacy=False),
        *get_model_conversion_mapping(like),
    ]
    report, _ = convert_and_load_state_dict_in_model(
        model=model,
        state_dict=tensors,
        load_config=LoadStateDictConfig(
            weight_mapping=conversions,
            dtype=target.dtype,
            dtype_plan=target._get_dtype_plan(target.dtype),
            device_map={"": target.device},
        ),
    )
    # Embeddings and head may be missing, because they are the target's.
    if missing := [key for key in report.missing_keys if key.startswith("layers.")]:
        raise ValueError(f"its files lack the weights {min(missing)}")
    if report.unexpected_keys:
        unknown = min(report.unexpected_keys)
        raise ValueError(f"its files have the weights {unknown}, which an MTP layer does not have")
    if report.mismatched_keys:
        name, given, needed = min(report.mismatched_keys)
        raise ValueError(f"{name} has shape {[*given]}; {[*needed]} is needed")
    if report.conversion_errors:
        raise ValueError("; ".join(report.conversion_errors.values()))
    check_finite(model.layers.state_dict(prefix="layers."))
    return model
