"""A model cut off behind its first layers, which are the model's own; and what a layer puts out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outrider.errors import ConfigError


def layers_of(module: Any) -> nn.ModuleList:
    """The decoder's layers. Raises `ConfigError` for an architecture that keeps them elsewhere."""
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"a {type(module).__name__} has no list of layers")
    return layers


def last_norm(module: Any) -> nn.Module:
    """What stands between the decoder's last layer and the head. Raises `ConfigError` where that
    is not called as in Llama, Qwen and Gemma."""
    norm = getattr(module.base_model, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ConfigError(f"a {type(module).__name__} has no norm behind its layers")
    return norm


def norm_weight(norm: nn.Module, width: int) -> torch.Tensor:
    """[D]: what a norm, of the root mean square or of the deviation, multiplies by; found by asking
    it, as families store it in their own ways."""
    like = next(norm.parameters(), torch.empty(0))
    ones = torch.ones(width, dtype=like.dtype, device=like.device)
    ones[1::2] = -1
    with torch.no_grad():
        weight: torch.Tensor = (norm(ones[None]) - norm(-ones[None]))[0] / 2 * ones
    return weight


def check_exit(module: Any, num_layers: int) -> None:
    """Raises `ConfigError` for a model that cannot be left behind so many of its layers."""
    last_norm(module)
    most = len(layers_of(module)) - 1
    if not 1 <= num_layers <= most:
        raise ConfigError(
            f"it cannot be left behind {num_layers} of its {most + 1} layers; 1 to {most} are "
            "possible"
        )


def first_layers(module: Any, num_layers: int) -> Any:
    """The base of a causal language model with its first layers alone, and nothing behind them:
    `last_hidden_state` is what layer `num_layers` puts out. Its layers and embeddings are the
    model's. Raises `ConfigError` as `check_exit`."""
    check_exit(module, num_layers)
    base = module.base_model
    shallow = copy.copy(base)
    shallow.__dict__["_modules"] = dict(base._modules)
    shallow.layers = nn.ModuleList(list(layers_of(module))[:num_layers])
    shallow.norm = nn.Identity()
    return shallow.eval()


class _Watched(nn.Module):
    """A layer, and what it put out last."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.output: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """A base model may ask its layers what kind they are."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        found = self.layer(*arguments, **options)
        self.output = found[0] if isinstance(found, tuple) else found
        return found


@contextmanager
def watched_layer(module: Any, num_layers: int) -> Iterator[_Watched]:
    """Within, the `output` [..., D] of the model's layer `num_layers`, counted from 1, is kept."""
    layers = layers_of(module)
    watched = _Watched(layers[num_layers - 1]).eval()
    layers[num_layers - 1] = watched
    try:
        yield watched
    finally:
        layers[num_layers - 1] = watched.layer
