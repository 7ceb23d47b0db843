"""The interface of a drafting head that runs as one more layer on a target's pages
(`outrider/engine/draft_layer.py`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of N pairs, each to the pairs up to its own: queries [N, heads, key width], keys [N, kv
heads, key width] and values [N, kv heads, value width] to [N, heads, value width]."""


OUTPUT = -1
"""See `DraftHead.layer_ids`."""


class DraftHead(nn.Module):
    """A head of width D that reads pairs. A pair is a feature g, made from the target's layers at a
    token, and the next token. `..` stands for any leading sizes."""

    width: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scaling: float
    """Factor of attention scores."""
    layer_ids: tuple[int, ...]
    """The taps are the inputs of these layers of the target, counted from 0. The number of layers
    stands for the input of the norm after them; `OUTPUT`, alone, for the norm's output."""
    norm: Any
    """The norm between h and `lm_head`."""
    lm_head: Any
    carries_normed = True
    """Whether a drafted pair has the norm of h for its feature, or h itself."""

    def ways(self, num_layers: int) -> dict[str, Any]:
        """The ways to read a target of `num_layers` layers that it may have been trained for, by a
        name for messages; the stated way first."""
        raise NotImplementedError

    def read_as(self, way: Any) -> None:
        """From now on reads the target in one of the `ways`."""
        raise NotImplementedError

    def fuse(self, hidden: Tensor) -> Tensor:
        """g [.., D] of the taps [.., taps * D_t], side by side in the order of `layer_ids`."""
        raise NotImplementedError

    def keys_and_values(
        self, features: Tensor, token_ids: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[.., kv heads, width] each, keys rotated, of pairs of features [.., D] and tokens [..] at
        rotary positions [..]."""
        raise NotImplementedError

    def step(
        self, features: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """h [.., D] of pairs as for `keys_and_values`."""
        raise NotImplementedError

    def carry(self, hidden: Tensor) -> Tensor:
        """[.., D]: the feature of the pair that follows h [.., D]."""
        carried: Tensor = self.norm(hidden) if self.carries_normed else hidden
        return carried

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., draft vocabulary], float32, of h [.., D]."""
        logits: Tensor = self.lm_head(self.norm(hidden)).float()
        return logits

    def unroll(self, features: Tensor, token_ids: Tensor, num_depths: int) -> Iterator[Tensor]:
        """Drafts a chain of `num_depths` pairs after each of L places of B texts, with gradients,
        and yields h [B, L, D] of each depth. Takes the features [B, L, D] and the tokens [B, L +
        num_depths - 1] after them. A chain's tokens are the text's; it sees the text's pairs up to
        its start, and then its own."""
        num_pairs = features.shape[1]
        pairs: list[tuple[Tensor, Tensor]] = []

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            pairs.append((keys, values))
            return _attend_in_chains(queries * self.scaling, pairs)

        for depth in range(num_depths):
            behind = token_ids[:, depth : depth + num_pairs]
            positions = torch.arange(depth, depth + num_pairs, device=features.device)
            hidden = self.step(features, behind, positions.expand_as(behind), attend)
            yield hidden
            features = self.carry(hidden)


@dataclass(frozen=True)
class LoadedDraftHead:
    """A head for one target."""

    module: DraftHead
    token_ids: tuple[int, ...]
    """[draft vocabulary], ascending: the target's token of each logit."""
    note: str = ""
    """A warning about how it reads its target; empty if there is none."""


def _attend_in_chains(queries: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention [B, L, heads, E] of each chain's newest query, scaled. It sees the text's keys and
    values, the first of `pairs` [B, L, kv heads, E], up to the chain's start, and the chain's own,
    the others."""

    def by_head(vectors: Tensor) -> Tensor:
        """[B, heads, L, E]"""
        heads = queries.shape[2] // vectors.shape[2]
        return vectors.repeat_interleave(heads, 2).transpose(1, 2)

    asked = by_head(queries)
    (text_keys, text_values), *own = [(by_head(keys), by_head(values)) for keys, values in pairs]
    later = torch.ones(asked.shape[2], asked.shape[2], device=asked.device).triu(1).bool()
    scores = (asked @ text_keys.transpose(-1, -2)).masked_fill(later, -torch.inf)
    chains = [(asked * keys).sum(-1, keepdim=True) for keys, _ in own]
    inside = torch.promote_types(asked.dtype, torch.float32)
    weights = torch.cat([scores, *chains], -1).softmax(-1, dtype=inside).to(asked.dtype)
    mixed = weights[..., : asked.shape[2]] @ text_values
    for index, (_, values) in enumerate(own, asked.shape[2]):
        mixed = mixed + weights[..., index : index + 1] * values
    return mixed.transpose(1, 2)
