"""What a service knows of the thing that runs its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is, for `Describe` and for limits."""

    name: str
    vocab_size: int
    """Width of the logits, padding included."""
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    tokenizer_fingerprint: str
    """Empty for a model without a tokenizer."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """New tokens of one sequence in one step."""

    sequence_id: str
    token_ids: tuple[int, ...]
    """Run after the slots the sequence holds; at least one."""
    num_logits: int
    """Logits are wanted for the last so many of `token_ids`; 0..len(token_ids)."""


class Engine(Protocol):
    """Runs one causal language model over many sequences, and keeps their keys and values.

    A sequence comes into being with its first step. One slot holds one token. Calls are made from
    one thread at a time; none of them waits on anything but the model.
    """

    @property
    def info(self) -> ModelInfo:
        """What runs here; constant."""
        ...

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        """Appends each step's tokens to its sequence, and returns per step its logits
        [num_logits, V], float32, on the model's device: row j follows the j-th of the last
        `num_logits` tokens. At most one step a sequence. Raises `BadRequest` for a token id
        outside the vocabulary or a sequence longer than `max_model_len`; then no sequence of the
        call has changed."""
        ...

    def length(self, sequence_id: str) -> int:
        """Slots the sequence holds; 0 for an unknown one."""
        ...

    def keep(self, sequence_id: str, length: int, path: Sequence[int] = ()) -> None:
        """Keeps the first `length` slots, then those slots that `path` names (ascending indices
        >= `length`), in that order; frees the others. Other sequences are unchanged."""
        ...

    def release(self, sequence_id: str) -> None:
        """Forgets the sequence; unknown ones are ignored."""
        ...

    def take_step_seconds(self) -> float:
        """Time that the steps since the last call must appear to have taken, and resets it.
        0 for an engine whose steps take their own time; emulated engines state theirs."""
        ...
