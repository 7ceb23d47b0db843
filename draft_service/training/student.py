"""The student: a few of the target's layers, its embeddings, and its head's rows for the tokens
that the target gives most of its probability to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AttentionInterface

from outrider.errors import SettingError, check
from outrider.models.compatibility import dense_logits
from outrider.models.early_exit import layers_of
from outrider.models.loading import parameters_on_meta
from outrider.models.student import narrow_head, save_drafter

from .dataset import Batch, Depth, Learner, Start, next_tokens

_LAYERS_TO_COPY = 4
"""A student of fewer has the first layers and the last alone."""


def kept_layers(
    num_wanted: int, num_layers: int, copying: tuple[int, int] | None = None
) -> list[int]:
    """Of so many layers those that a student starts from: the last, two that copy where the target
    has them and there is room for four, and the first ones. (Acceptance after 80,000 tokens of the
    demo target, of four layers: the first ones and the last 0.235; spread evenly 0.230, two at each
    end 0.231.)"""
    if num_wanted > num_layers:
        raise SettingError("layers", f"{num_wanted} is more than the target's {num_layers}")
    if num_wanted == 1:
        return [0]
    kept = {num_layers - 1}
    if copying is not None and num_wanted >= _LAYERS_TO_COPY:
        kept |= set(copying)
    for layer in range(num_layers):
        if len(kept) < num_wanted:
            kept.add(layer)
    return sorted(kept)


class Student(Learner):
    """A small model: it reads a text as the target does."""

    def __init__(self, module: Any) -> None:
        shared = [module.get_input_embeddings().weight, module.get_output_embeddings().weight]
        shape = f"{module.config.get_text_config().num_hidden_layers} layers"
        super().__init__(module, module, shared, shape, save_drafter)
        use_dense_attention(module)

    def draft(self, batch: Batch) -> list[Depth]:
        hidden = self.module.base_model(
            input_ids=batch.token_ids, use_cache=False
        ).last_hidden_state
        return next_tokens(hidden.reshape(-1, hidden.shape[-1])[batch.rows])


def make_student(target: Any, layers: Sequence[int], token_ids: npt.NDArray[np.int64]) -> Start:
    """A module of the target's architecture with its embeddings, its head's rows for `token_ids`,
    and copies of these layers of it. Embeddings and head stay as they are: so students need less
    data, and nothing of both has to be kept. It learns as it is served, without dropout."""
    found = layers_of(target)
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = len(layers)
    kinds = getattr(text_config, "layer_types", None)
    if kinds:
        text_config.layer_types = [kinds[index] for index in layers]
    config.tie_word_embeddings = text_config.tie_word_embeddings = False
    embedding = target.get_input_embeddings().weight
    with parameters_on_meta():
        # In this way rotations keep float32, which a `to(dtype)` would take from them.
        student: Any = type(target)._from_config(config, dtype=embedding.dtype)
    before = target.get_output_embeddings().weight.detach()
    shared = {embedding.data_ptr(), before.data_ptr()}
    kept = {
        name: values.clone()
        for name, values in target.state_dict().items()
        if ".layers." not in name and values.data_ptr() not in shared
    }
    student.load_state_dict(kept, strict=False, assign=True)
    for mine, index in zip(layers_of(student), layers, strict=True):
        copies = {name: values.clone() for name, values in found[index].state_dict().items()}
        mine.load_state_dict(copies, assign=True)
    student.get_input_embeddings().weight = embedding
    rows = torch.from_numpy(token_ids).to(embedding.device)
    narrow_head(student, len(token_ids)).weight = nn.Parameter(before[rows])
    student = student.to(embedding.device).eval()
    name = f"the target's layers {', '.join(map(str, layers))}"
    key = f"{layers}, {len(token_ids)}"
    return Start(Student(student), token_ids, name, key, is_trained=False)


_NUM_TEXTS: Final = 8
_NUM_TOKENS: Final = 64
"""Of a text, before it is written again."""
_SCORE_MIN: Final = 0.2
"""Part of a head's attention that must lie there."""


def copying_layers(target: Any) -> tuple[int, int] | None:
    """The layer with the head that most looks at the token before, and, of those behind it, the
    one with the head that most looks at what followed an earlier occurrence; None where heads do
    neither, as in a model that was not trained, or where the library does not tell."""
    before, after = _scores(target)
    pairs = [
        (first, max(range(first + 1, len(after)), key=lambda layer: after[layer]))
        for first in range(len(before) - 1)
    ]
    copying = [(a, b) for a, b in pairs if before[a] >= _SCORE_MIN and after[b] >= _SCORE_MIN]
    return max(copying, key=lambda pair: before[pair[0]], default=None)


def _scores(target: Any) -> tuple[list[float], list[float]]:
    """Of each layer, the largest part of a head's attention to the token before, and to the one
    behind the earlier occurrence; means over random texts."""
    embeddings = target.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(embeddings.shape[0], (_NUM_TEXTS, _NUM_TOKENS), generator=generator)
    ids = torch.cat([texts, texts], dim=1).to(embeddings.device)
    implementation = target.config._attn_implementation
    target.set_attn_implementation("eager")  # The others do not tell what they looked at.
    try:
        with torch.inference_mode():
            attentions = (
                target.base_model(input_ids=ids, use_cache=False, output_attentions=True).attentions
                or ()
            )
    finally:
        target.set_attn_implementation(implementation)
    places = torch.arange(1, ids.shape[1])
    again = torch.arange(_NUM_TOKENS, ids.shape[1])
    before = [_most(weights, places, places - 1) for weights in attentions]
    after = [_most(weights, again, again - _NUM_TOKENS + 1) for weights in attentions]
    return before, after


def _most(weights: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> float:
    """The largest mean over texts and places, of all heads; `weights` [B, heads, T, T]."""
    return float(weights[:, :, rows, columns].float().mean(dim=(0, 2)).max())


NAME: Final = "outrider_dense"
_NUM_TRIAL_TOKENS: Final = 12
_TOLERANCE: Final = 0.05
"""Of the norm of the logits of the trial: what rounding in half precision may change."""


def use_dense_attention(module: Any) -> None:
    embeddings = module.get_input_embeddings().weight
    if embeddings.device.type != "cpu":
        return
    before = module.config._attn_implementation
    ids = [(7 * i + 1) % embeddings.shape[0] for i in range(_NUM_TRIAL_TOKENS)]
    expected = dense_logits(module, ids).double()
    module.set_attn_implementation(NAME)
    with torch.inference_mode():
        found = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    if not (found - expected).norm() <= _TOLERANCE * expected.norm():
        module.set_attn_implementation(before)


def _attend(
    block: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Output [B, T, heads, width] of query [B, heads, T, width], key and value [B, key heads, T,
    width]; a token looks at itself and at those before it, within its window."""
    check(attention_mask is None, "no mask is made for this attention")
    num_texts, num_heads, length, width = query.shape
    num_keys = key.shape[1]
    scaling = width**-0.5 if scaling is None else scaling
    # Heads that share a key stand below each other: one product for all of them.
    rows = query.reshape(num_texts, num_keys, -1, width)
    scores = (rows @ key.transpose(2, 3)).view(num_texts, num_keys, -1, length, length)
    weights = (scores * scaling + _mask(length, sliding_window, query.dtype)).softmax(dim=-1)
    output = weights.view(num_texts, num_keys, -1, length) @ value
    return output.view(num_texts, num_heads, length, -1).transpose(1, 2), None


def _mask(length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[T, T]: -inf where a token must not look, else 0."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (back < 0) if window is None else (back < 0) | (back >= window)
    return torch.zeros(length, length, dtype=dtype).masked_fill_(hidden, -torch.inf)


AttentionInterface.register(NAME, _attend)
# No mask function has this name: then the library makes no mask at all.
