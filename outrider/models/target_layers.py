"""Access to the layers of a causal language model, and to what they read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from outrider.errors import ConfigError


def layers_of(module: Any) -> nn.ModuleList:
    """The decoder's layers. Raises `ConfigError` for an architecture that keeps them elsewhere."""
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"a {type(module).__name__} has no list of layers")
    return layers


def last_norm(module: Any) -> nn.Module:
    """The norm between the decoder's last layer and the head. Raises `ConfigError` unless it has
    the name that it has in Llama, Qwen and Gemma."""
    norm = getattr(module.base_model, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ConfigError(f"a {type(module).__name__} has no norm behind its layers")
    return norm


class Watched(nn.Module):
    """Wraps a module and keeps its last input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.read: Any = None
        """The first argument of the last call."""
        self.train(inner.training)

    def __getattr__(self, name: str) -> Any:
        """The inner module's: a base model may read a layer's kind, or its head's weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Like the inner module's."""
        found = self.inner(*arguments, **options)
        self.read = arguments[0] if arguments else None
        return found

    def rows_read(self) -> Tensor:
        """[T, D] of the single sequence [1, T, D] that it read last. Raises `ConfigError` if it was
        not called with one."""
        if self.read is None:
            kind = type(self.inner).__name__
            raise ConfigError(f"a {kind} is not called as a module: what it reads is not known")
        rows: Tensor = self.read[0]
        return rows


def watch_layers(module: Any, indices: Sequence[int]) -> list[Watched]:
    """Wraps these layers of a model, counted from 0; the number of layers stands for the norm after
    them. Raises `ConfigError` for a model that has no such layers."""
    num_layers = len(layers_of(module))
    wrong = [index for index in indices if not 0 <= index <= num_layers]
    if wrong:
        raise ConfigError(f"it has no layer {wrong[0]}, only {num_layers} counted from 0")
    watched = []
    for index in indices:
        parent, name = _place_of(module, index)
        watched.append(Watched(getattr(parent, name)))
        setattr(parent, name, watched[-1])
    return watched


def _place_of(module: Any, index: int) -> tuple[nn.Module, str]:
    """The parent module of a layer, or of the norm after the layers, and its name there."""
    layers = layers_of(module)
    if index < len(layers):
        return layers, str(index)
    last_norm(module)
    return module.base_model, "norm"


@contextmanager
def watched_layers(module: Any, indices: Sequence[int]) -> Iterator[list[Watched]]:
    """`watch_layers` for the time of the context."""
    watched = watch_layers(module, indices)
    try:
        yield watched
    finally:
        for index, one in zip(indices, watched, strict=True):
            setattr(*_place_of(module, index), one.inner)
