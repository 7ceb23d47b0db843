"""What the linear layers of a drafter begin with that nobody has trained."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import torch
from torch import nn

_QUIET_DEVIATION: Final = 1e-3
"""Of the weights that a change goes through: at first a drafter passes on what it is given."""


def fill_linears(module: nn.Module, seed: int, quiet: Collection[str], like: torch.Tensor) -> None:
    """Gives linear layers of a module that have no values their first weights, in the form of
    `like`: next to nothing where its own name is in `quiet`, else as the library begins such a
    layer. They depend on the seed and on the layers' shapes and order alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and linear.weight.is_meta:
            values = torch.empty(linear.weight.shape)
            if name.rpartition(".")[2] in quiet:
                values.normal_(std=_QUIET_DEVIATION, generator=generator)
            else:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
            linear.weight = nn.Parameter(values.to(like))
