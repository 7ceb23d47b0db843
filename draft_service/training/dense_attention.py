"""Attention over whole texts for training on a CPU: a few matrix products instead of the library's
flash kernel, whose backward pass takes two to four times as long at some hundred tokens (27 against
14 us a token and layer at 256 tokens, 24 against 6 at 128; 9 heads of 64, one core, bfloat16)."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AttentionInterface

from outrider.errors import check
from outrider.models.compatibility import dense_logits

NAME: Final = "outrider_dense"
_NUM_TRIAL_TOKENS: Final = 12
_TOLERANCE: Final = 0.05
"""Of the norm of the logits of the trial: what rounding in half precision may change."""


def use_dense_attention(module: Any) -> None:
    """Lets a module on a CPU attend this way, unless that gives other logits than its own way."""
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
