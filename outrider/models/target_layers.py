"""Access to the layers of a causal language model, and to their inputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from outrider.errors import ConfigError


def layers_of(module: Any) -> nn.ModuleList:
    """Returns the decoder's layers. Raises `ConfigError` unless they are at `base_model.layers`."""
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"a {type(module).__name__} has no list of layers")
    return layers


def last_norm(module: Any) -> nn.Module:
    """Returns the norm between the decoder's last layer and the LM head. Raises `ConfigError`
    unless the norm is at `base_model.norm`, as in Llama, Qwen and Gemma."""
    norm = getattr(module.base_model, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ConfigError(f"a {type(module).__name__} has no norm after its layers")
    return norm


class TappedLayer(nn.Module):
    """Wraps a module and keeps the first argument of the last call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.read: Any = None
        self.train(inner.training)

    def __getattr__(self, name: str) -> Any:
        """Also finds attributes of `inner`, because base models may read attributes of layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        output = self.inner(*arguments, **options)
        self.read = arguments[0] if arguments else None
        return output

    def rows_read(self) -> Tensor:
        """Returns the input [T, D] of the last call, which must have run one sequence [1, T, D].
        Raises `ConfigError` if there was no call with a positional argument."""
        if self.read is None:
            kind = type(self.inner).__name__
            raise ConfigError(f"the model calls its {kind} without a positional argument")
        rows: Tensor = self.read[0]
        return rows


def tap_layers(module: Any, indices: Sequence[int]) -> list[TappedLayer]:
    """Wraps the layers with these indices. An index equal to the number of layers means the norm
    after the last layer. Raises `ConfigError` if the model lacks a layer, or this norm."""
    taps = []
    for parent, name in [_place_of(module, index) for index in indices]:
        taps.append(TappedLayer(getattr(parent, name)))
        setattr(parent, name, taps[-1])
    return taps


def _place_of(module: Any, index: int) -> tuple[nn.Module, str]:
    layers = layers_of(module)
    if index == len(layers):
        last_norm(module)
        return module.base_model, "norm"
    if not 0 <= index < len(layers):
        raise ConfigError(f"the model has no layer {index}, only layers 0 to {len(layers) - 1}")
    return layers, str(index)


@contextmanager
def tapped_layers(module: Any, indices: Sequence[int]) -> Iterator[list[TappedLayer]]:
    """Like `tap_layers`, but the layers are wrapped only in this context."""
    taps = tap_layers(module, indices)
    try:
        yield taps
    finally:
        for index, layer in zip(indices, taps, strict=True):
            setattr(*_place_of(module, index), layer.inner)
