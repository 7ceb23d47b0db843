"""Runs steps whose attention gathers the slots of each sequence: on any device, in any dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from outrider.engine.attention import LayerPages, running
from outrider.engine.batch import HeldSequence, plan_step
from outrider.engine.gathered_attention import attend
from outrider.engine.split_attention import attend_in_splits

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A module's logits [L, V] of token and position ids [1, T] and logit rows [L]."""


class Steps(Protocol):
    """How an engine's steps are run on its pages."""

    def run(self, sequences: Sequence[HeldSequence]) -> torch.Tensor:
        """Logits [at least L, V] of a step of at least one sequence: the first L are those that it
        wants. Valid until the next step."""
        ...


class GatheredSteps:
    """Implements `Steps`."""

    def __init__(
        self,
        forward: Forward,
        layers: dict[torch.nn.Module, LayerPages],
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        fixed_shapes: bool,
    ) -> None:
        self._forward = forward
        self._layers = layers
        self._windows = tuple(dict.fromkeys(layer.window for layer in layers.values()))
        self._page_size = page_size
        self._device = device
        self._dtype = dtype
        self._fixed_shapes = fixed_shapes

    def run(self, sequences: Sequence[HeldSequence]) -> torch.Tensor:
        """See `Steps.run`."""
        plan = plan_step(
            sequences, self._windows, self._page_size, self._device, self._dtype, self._fixed_shapes
        )
        attention = attend_in_splits if self._fixed_shapes else attend

        def attend_layer(
            query: torch.Tensor, layer: LayerPages, scaling: float, softcap: float | None
        ) -> torch.Tensor:
            return attention(query, layer.cache, plan.groups[layer.window], scaling, softcap)

        with running(self._layers, plan.slots, attend_layer):
            return self._forward(plan.token_ids, plan.position_ids, plan.logit_rows)
