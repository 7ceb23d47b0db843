"""A head after a target's first layers: the target drafts for itself.

    h  output of the target's layer N at a token, [R, D]
    x = h / rms(h) * w
    f = x + M x + down (silu(gate x) * up x)
    logits of the token after it = H f

w [D], M [D, D], gate and up [M', D], down [D, M'] are trained; H [N', D] has the rows of the
target's head for a part of its vocabulary. With w of the target's last norm and all other weights
zero, this is that norm and head, applied to layer N. Related: LayerSkip (arXiv 2404.16710) trains
the layers for it; Kangaroo (2404.18911), as here, trains only what reads them.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.models.drafter_checkpoint import (
    LoadedHead,
    TargetHead,
    TrainedKind,
    Whose,
    load_head,
)


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


def norm_weight(norm: nn.Module, width: int) -> Tensor:
    """[D]: the factors of an RMS or layer norm. They are measured, as model families store them in
    different ways."""
    like = next(norm.parameters(), torch.empty(0))
    ones = torch.ones(width, dtype=like.dtype, device=like.device)
    ones[1::2] = -1
    with torch.no_grad():
        weight: Tensor = (norm(ones[None]) - norm(-ones[None]))[0] / 2 * ones
    return weight


def check_exit(module: Any, num_layers: int) -> None:
    """Raises `ConfigError` unless a model can exit after its first `num_layers` layers."""
    last_norm(module)
    most = len(layers_of(module)) - 1
    if not 1 <= num_layers <= most:
        raise ConfigError(
            f"it cannot exit after {num_layers} of its {most + 1} layers; 1 to {most} are possible"
        )


def first_layers(module: Any, num_layers: int) -> Any:
    """The base of a causal language model with its first layers alone, so that `last_hidden_state`
    is the output of layer `num_layers`. It shares layers and embeddings with the model. Raises what
    `check_exit` raises."""
    check_exit(module, num_layers)
    base = module.base_model
    shallow = copy.copy(base)
    shallow.__dict__["_modules"] = dict(base._modules)
    shallow.layers = nn.ModuleList(list(layers_of(module))[:num_layers])
    shallow.norm = nn.Identity()
    return shallow.eval()


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


_EPS = 1e-6
"""Added to the mean square."""


class ExitHead(TargetHead):
    """A head of width D and inner width M', with rows of the target's head [N', D]."""

    def __init__(self, head: nn.Parameter, inner: int, _: int = 1) -> None:
        """All weights but the head's have no values yet."""
        super().__init__(head)
        width, dtype = head.shape[1], head.dtype
        with torch.device("meta"):
            self.scale = nn.Parameter(torch.empty(width, dtype=dtype))
            self.mix = nn.Linear(width, width, bias=False, dtype=dtype)
            self.gate_up = nn.Linear(width, 2 * inner, bias=False, dtype=dtype)
            self.down = nn.Linear(inner, width, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """f [..., D] of h [..., D]."""
        x = nn.functional.rms_norm(hidden, hidden.shape[-1:], self.scale, eps=_EPS)
        gate, up = self.gate_up(x).chunk(2, -1)
        changed: Tensor = self.mix(x) + self.down(nn.functional.silu(gate) * up)
        return x + changed

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, N'], float32, of h [R, D]."""
        return super().logits(self(hidden))


LoadedExit = LoadedHead[ExitHead]


def load_exit(path: Path, target: Any, **whose: Unpack[Whose]) -> LoadedExit:
    """The exit head in `path` on a target's module, of its dtype and on its device. Raises
    `ConfigError`, also if it was made for another target."""
    rows = target.get_output_embeddings().weight
    loaded = load_head(path, TrainedKind.EARLY_EXIT, rows, ExitHead, **whose)
    try:
        check_exit(target, loaded.num_layers)
    except ConfigError as error:
        raise ConfigError(
            f"drafter {whose['name']}: of the target {whose['target_name']}: {error}"
        ) from error
    return loaded
