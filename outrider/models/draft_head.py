"""The interface of draft heads (EAGLE-3 heads and MTP layers), which run as one more layer on a
target's KV-cache pages (`outrider/engine/draft_layer.py`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the attention of N pairs (see `DraftHead`), each to itself and to all earlier pairs.
Takes queries [N, heads, key width], keys [N, kv heads, key width] and values [N, kv heads, value
width]. Returns [N, heads, value width]."""
ATTENTION = "outrider_head"
"""Transformers finds `_attention` under this name. The argument `attend` of `_attention` is an
`Attend` whose shapes have two axes [B, L] in place of N."""
OUTPUT = -1  # in `DraftHead.layer_ids`: the output of the norm after the target's last layer


class Pairs(NamedTuple):
    """The input of a draft head. In shapes, `..` means any sizes."""

    features: Tensor  # [.., D]
    token_ids: Tensor  # [..]: the token after each feature's token
    positions: Tensor  # [..]: the rotary positions


class DraftHead(nn.Module):
    """A draft head of width D. Its input is a *pair*: the feature g of one token, and the id of the
    next token. The feature of a token is computed from the *taps*, which are the inputs of some of
    the target's layers at this token. The output for a pair is the hidden state h."""

    width: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scaling: float  # the factor of attention scores
    layer_ids: tuple[int, ...]
    """The target's layers whose inputs are the taps, counted from 0. An id equal to the number of
    layers means the input of the norm after the last layer. No other id may accompany `OUTPUT`."""
    rotary_emb: Any
    norm: Any  # the norm of h before `lm_head`
    lm_head: Any
    carries_normed = True
    """If the target has not run the first token of a pair yet, norm(h) of the previous pair is used
    in place of the feature. If `carries_normed` is False, h itself is used."""

    def ways(self, num_layers: int) -> dict[str, Any]:
        """Returns the ways in which this head may have been trained to read a target of
        `num_layers` layers. Keys name the ways in messages. Values are arguments of `read_as`.
        The first way is the one that the head's files state."""
        raise NotImplementedError

    def read_as(self, way: Any) -> None:
        """Makes the head read the target in the way `way`, which is a value of `ways`."""
        raise NotImplementedError

    def fuse(self, hidden: Tensor) -> Tensor:
        """Returns the feature g [.., D]. `hidden` [.., taps * target's width] has the taps, one
        after the other in the order of `layer_ids`."""
        raise NotImplementedError

    def keys_and_values(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Returns the rotated keys [.., kv heads, key width] and the values [.., kv heads, value
        width]."""
        keys_and_values: list[Tensor] = []

        def note(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys_and_values.extend((keys, values))
            return queries.new_zeros(*queries.shape[:-1], values.shape[-1])

        self._attended(pairs, note)
        keys, values = keys_and_values
        return keys, values

    def step(self, pairs: Pairs, attend: Attend) -> Tensor:
        """Returns the hidden states h [.., D]."""
        raise NotImplementedError

    def _attended(self, pairs: Pairs, attend: Attend) -> Tensor:
        """Runs the layer up to and including its attention."""
        raise NotImplementedError

    def _call(self, block: Any, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the output [.., D] for rows [.., W] at rotary positions [..]. `block` is an
        attention or decoder layer of transformers with the attention function `ATTENTION`."""

        def attend_rows(*heads: Tensor) -> Tensor:
            return attend(*(each.view(*positions.shape, *each.shape[-2:]) for each in heads))

        flat = rows.view(-1, *rows.shape[-2:])
        returned = block(
            hidden_states=flat,
            attention_mask=None,
            attend=attend_rows,
            position_embeddings=self.rotary_emb(flat, positions.view(-1, positions.shape[-1])),
        )
        output: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return output.view(*positions.shape, -1)

    def carry(self, hidden: Tensor) -> Tensor:
        """Returns the feature [.., D] of the next pair, computed from h [.., D] of this pair."""
        carried: Tensor = self.norm(hidden) if self.carries_normed else hidden
        return carried

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [.., draft vocabulary] in float32."""
        logits: Tensor = self.lm_head(self.norm(hidden)).float()
        return logits

    def unroll(self, features: Tensor, token_ids: Tensor, num_depths: int) -> Iterator[Tensor]:
        """Runs a chain of `num_depths` pairs from each of L places in each of B texts. For each
        depth, yields h [B, L, D], with gradients. `features` [B, L, D] are those at the places, and
        `token_ids` [B, L + num_depths - 1] the tokens after the places. A pair attends to the
        text's pairs up to the chain's start, and to the chain's pairs up to itself."""
        num_pairs = features.shape[1]
        read: list[tuple[Tensor, Tensor]] = []

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            read.append((keys, values))
            return _attend_in_chains(queries * self.scaling, read)

        for depth in range(num_depths):
            behind = token_ids[:, depth : depth + num_pairs]
            positions = torch.arange(depth, depth + num_pairs, device=features.device)
            hidden = self.step(Pairs(features, behind, positions.expand_as(behind)), attend)
            yield hidden
            features = self.carry(hidden)


@dataclass(frozen=True)
class LoadedDraftHead:
    """A draft head for one target."""

    module: DraftHead
    token_ids: tuple[int, ...]
    """The target's token id of each logit [draft vocabulary], in ascending order."""
    note: str = ""  # a warning about how the head reads its target; empty if there is no warning


def _attention(
    block: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: None, attend: Attend, **__: Any
) -> tuple[Tensor, None]:
    """Calls `attend` with [B, L, heads, width] in place of [B, heads, L, width]."""
    heads = (rows.transpose(1, 2).contiguous() for rows in (query, key, value))
    return attend(*heads), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def _attend_in_chains(queries: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the attention output [B, L, heads, E] of the newest query of each chain. The
    `queries` are already scaled. The first of `pairs` has the keys and values [B, L, kv heads, E]
    of the text, which a chain sees up to its start. Each further entry has one key and one value of
    every chain."""

    def by_head(vectors: Tensor) -> Tensor:
        heads = queries.shape[2] // vectors.shape[2]
        return vectors.repeat_interleave(heads, 2).transpose(1, 2)

    per_head = by_head(queries)
    (text_keys, text_values), *own = [(by_head(keys), by_head(values)) for keys, values in pairs]
    later = torch.ones(per_head.shape[2], per_head.shape[2], device=per_head.device).triu(1).bool()
    scores = (per_head @ text_keys.transpose(-1, -2)).masked_fill(later, -torch.inf)
    chains = [(per_head * keys).sum(-1, keepdim=True) for keys, _ in own]
    inside = torch.promote_types(per_head.dtype, torch.float32)
    weights = torch.cat([scores, *chains], -1).softmax(-1, dtype=inside).to(per_head.dtype)
    mixed = weights[..., : per_head.shape[2]] @ text_values
    for index, (_, values) in enumerate(own, per_head.shape[2]):
        mixed = mixed + weights[..., index : index + 1] * values
    return mixed.transpose(1, 2)
