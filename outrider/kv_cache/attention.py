"""Replaces a model's attention by attention on a paged cache.

A module with the attention `PAGED` builds no mask, and passes each layer's queries, keys and values
to the attention function of the current step. The function is in a context variable, because not
every model passes extra arguments down to its layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.errors import ConfigError, check
from outrider.kv_cache.storage import KeysAndValues, LayerShape

PAGED = "outrider_paged"
_FINDING = "outrider_finding"
"""With this attention, a module builds masks, from which `find_layers` learns the windows."""
_UNKNOWN_ARGUMENTS = ("s_aux", "position_bias")
"""Arguments of transformers' attention functions that paged attention does not support."""
_Allows = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A mask function of transformers: the indices of batch, head, query and key -> whether the query
sees the key."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention block of a module."""

    block: nn.Module
    shape: LayerShape
    query_heads: int
    window: int | None  # how many tokens a token sees, including itself; None = no limit
    scaling: float  # the factor of attention scores
    softcap: float | None  # a score s becomes softcap * tanh(s / softcap); None = no cap


@dataclass(frozen=True, slots=True)
class LayerPages:
    """A layer's keys and values, and the parameters of its attention (see `AttentionLayer`)."""

    cache: KeysAndValues
    window: int | None
    scaling: float
    softcap: float | None = None


Attend = Callable[[Tensor, LayerPages], Tensor]
"""Attends to a layer's pages: queries [1, query heads, T, key width], layer -> output [1, T, query
heads, value width]."""
_CURRENT: ContextVar[Callable[..., Tensor]] = ContextVar("outrider_attention")
"""The current attention function. It takes what transformers passes: queries [1, heads, T, width],
keys and values [1, key heads, T, width], and more. Returns the output [1, T, heads, width]."""


@contextmanager
def running(layers: dict[nn.Module, LayerPages], slots: Tensor, attend: Attend) -> Iterator[None]:
    """In this context, each block in `layers` writes the keys and values of the first n tokens to
    `slots` [n] of its pages, and then calls `attend`. All later tokens are padding."""

    def attention(
        block: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: Any
    ) -> Tensor:
        layer, num_slots = layers[block], len(slots)
        layer.cache.write(slots, key[0, :, :num_slots], value[0, :, :num_slots])
        return attend(query, layer)

    with _attention(attention):
        yield


@contextmanager
def _attention(function: Callable[..., Tensor]) -> Iterator[None]:
    token = _CURRENT.set(function)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def find_layers(module: Any, max_model_len: int) -> list[AttentionLayer]:
    """Runs one token through the module, and returns the attention layers in the order in which
    they ran. Afterwards the module's attention is `PAGED`. Raises `ConfigError` if the attention
    cannot be replaced, or if the model has attention sinks, a mask that is neither causal nor a
    sliding window, or a layer that runs twice."""
    set_attention(module, _FINDING)
    layers: list[AttentionLayer] = []

    def note(
        block: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any
    ) -> Tensor:
        if any(layer.block is block for layer in layers):
            raise ConfigError("one of its layers runs twice for each token")
        for name in _UNKNOWN_ARGUMENTS:
            if named.get(name) is not None:
                raise ConfigError(f"its attention takes {name}, which is not supported")
        if not hasattr(mask, "allows"):
            raise ConfigError("its masks do not use the mask interface of transformers")
        num_heads, scaling = query.shape[1], named.get("scaling")
        check(num_heads % key.shape[1] == 0, "query heads are no multiple of key heads")
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        window = _window(mask.allows, max_model_len)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        softcap = named.get("softcap")
        layers.append(AttentionLayer(block, shape, num_heads, window, scaling, softcap))
        return query.new_zeros((1, query.shape[2], num_heads, value.shape[3]))

    with torch.inference_mode(), _attention(note):
        ids = torch.zeros((1, 1), dtype=torch.int64, device=next(module.parameters()).device)
        module(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
    if not layers:
        raise ConfigError("its attention does not use the attention interface of transformers")
    set_attention(module, PAGED)
    return layers


def set_attention(module: Any, name: str) -> None:
    """Selects the module's attention by name. Raises `ConfigError` if this is impossible."""
    try:
        module.set_attn_implementation(name)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"its attention cannot be replaced: {error}") from error
    if module.config.get_text_config()._attn_implementation != name:
        raise ConfigError("its attention cannot be replaced")


def _noted_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: _Allows, **_: Any
) -> Tensor:
    mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)
    mask.allows = mask_function  # type: ignore[attr-defined]
    return mask


def _window(allows: _Allows, length: int) -> int | None:
    """Returns the window of a causal mask over `length` tokens, or None if there is no window. The
    last row gives the window. Of the other rows, checks only a few against this window."""
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(length)

    def row(query: int) -> Tensor:
        return allows(zero, zero, torch.tensor(query), keys).expand(length)

    window = int(row(length - 1).sum())
    queries = {0, 1, length // 2, length - 1, window - 1, window, window + 1, 2 * window}
    for query in sorted(queries):
        if 0 <= query < length:
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(row(query), expected):
                raise ConfigError(
                    "one of its layers has a mask that is neither causal nor a sliding window"
                )
    return None if window == length else window


for _name in (PAGED, _FINDING):
    ALL_ATTENTION_FUNCTIONS.register(
        _name, lambda *arguments, **named: (_CURRENT.get()(*arguments, **named), None)
    )
# No mask function is registered for PAGED, so transformers makes no mask at all.
ALL_MASK_ATTENTION_FUNCTIONS.register(_FINDING, _noted_mask)
