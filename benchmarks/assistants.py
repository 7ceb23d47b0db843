"""The draft of a deployment as the assistant of the library's own assisted generation.

That wants logits over the target's whole vocabulary; a drafter that was made for its target has a
head for a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.engine.interface import ModelInfo
from outrider.errors import ConfigError, check
from outrider.models.drafter_checkpoint import is_trained_drafter
from outrider.models.loading import load_model
from outrider.models.student import load_drafter


class WidenedHead(nn.Module):
    """A head with a row for some tokens, whose logits are over all of them: those without a row
    have minus infinity, which is a probability of exactly 0."""

    token_ids: torch.Tensor

    def __init__(self, head: nn.Module, token_ids: Sequence[int], vocab_size: int) -> None:
        """`token_ids` [N] are the tokens of the rows of `head`, each below `vocab_size`."""
        super().__init__()
        check(max(token_ids) < vocab_size, "the tokens of a head are the target's")
        self.head = head
        self.vocab_size = vocab_size
        self.register_buffer("token_ids", torch.tensor(token_ids), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [.., V] of hidden states [.., H]."""
        narrow: torch.Tensor = self.head(hidden)
        wide = narrow.new_full((*narrow.shape[:-1], self.vocab_size), -torch.inf)
        wide[..., self.token_ids] = narrow
        return wide


def load_assistant(setup: Mapping[str, Any], target: ModelInfo) -> nn.Module:
    """The drafter that the `setup` of a reference names (`references.ReferenceModel`), with logits
    [.., V] over the vocabulary of `target`. Raises `ConfigError`, also where it has more tokens
    than that."""
    drafter = setup["drafter"]
    path, name = Path(drafter["directory"]), drafter["name"]
    options: dict[str, Any] = {
        "name": name,
        "dtype": drafter["dtype"],
        "device": setup["device"],
        "trust_remote_code": setup["trust_remote_code"],
    }
    if is_trained_drafter(path):
        module, info = load_drafter(path, Path(setup["directory"]), target=target.name, **options)
    else:
        module, info = load_model(path, **options)
    return widened(module, info.logit_token_ids or range(info.vocab_size), target.vocab_size, name)


def widened(module: Any, token_ids: Sequence[int], vocab_size: int, name: str) -> nn.Module:
    """The module, whose logits have a column for each of `token_ids`, with logits [.., vocab_size].
    Raises `ConfigError` for one with tokens beyond that, called `name`."""
    if token_ids[-1] >= vocab_size:
        raise ConfigError(
            f"draft model {name} has logits for {token_ids[-1] + 1} tokens, the target for "
            f"{vocab_size}; the library takes no wider assistant than its target"
        )
    if len(token_ids) < vocab_size:
        head = WidenedHead(module.get_output_embeddings(), token_ids, vocab_size)
        module.set_output_embeddings(head.to(module.device))
        module.config.get_text_config().vocab_size = vocab_size  # which the library compares
    found: nn.Module = module
    return found
