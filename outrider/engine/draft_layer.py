"""A drafting head that keeps its state in the pages of the model for which it drafts.

The head reads pairs. Pair j consists of token j and the feature g_{j-1}, which the head makes from
the model's hidden states at token j - 1. Slot j of a sequence holds the model's keys and values of
token j, the feature g_j, and the head's key and value of pair j. So the head's state is shared,
copied and freed together with the slots.

A step of the model also writes g and the pair of each new token. The head's attention runs only
when the head drafts. Pair j then attends to slots 1..j, because slot 0 has no pair. The rotary
position of pair j is j - 1."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.batch import HeldStep, plan_step, shipped, slots_at
from outrider.engine.gathered_attention import attend
from outrider.kv_cache.attention import LayerPages
from outrider.kv_cache.storage import KeysAndValues, LayerShape
from outrider.models.draft_head import DraftHead, Pairs

_Ints = npt.NDArray[np.int64]


def pair_shape(head: DraftHead, dtype: torch.dtype, device: torch.device) -> LayerShape:
    """The shape of a pair's key and value."""
    return LayerShape(head.num_kv_heads, head.key_width, head.value_width, dtype, device)


def draft_shapes(
    head: DraftHead, dtype: torch.dtype, device: torch.device, drafts_apart: bool = False
) -> list[LayerShape]:
    """Returns the shapes of a `DraftLayer`'s `layers`: one for g, stored as a key without a value,
    and one for pairs. With `drafts_apart`, returns only the shape for g."""
    feature = LayerShape(1, head.width, 0, dtype, device)
    return [feature] if drafts_apart else [feature, pair_shape(head, dtype, device)]


class PairLayer:
    """A head's own layer. Keeps the key and value of each pair in the slot of the pair's token."""

    def __init__(self, head: DraftHead, pairs: KeysAndValues) -> None:
        self._head = head
        self._pairs = LayerPages(pairs, window=None, scaling=head.scaling)

    def write(self, step: HeldStep, features: Tensor) -> None:
        """Writes the pairs of a step's T new tokens. Row j of `features` [T, D] is g of the token
        before new token j. The row of a sequence's first token may have any values."""
        rows = step.rows
        arrays = [rows.token_ids, _places(rows.positions), rows.slots]
        token_ids, places, slots = shipped(arrays, features.device)
        self.put(token_ids, places, slots, features)

    def put(self, token_ids: Tensor, places: Tensor, slots: Tensor, features: Tensor) -> None:
        """Writes the pairs of `token_ids` [T] and `features` [T, D] to `slots` [T]. `places` [T]
        are the pairs' rotary positions."""
        self._put(slots, *self._head.keys_and_values(Pairs(features, token_ids, places)))

    def draft(self, step: HeldStep, features: Sequence[Tensor]) -> Tensor:
        """Runs one pair for each of N sequences: a feature [D] and the sequence's only new token.
        Returns the head's output [N, D]."""
        cache = self._pairs.cache
        plan = plan_step(step, (None,), cache.keys.device, cache.keys.dtype, first_slot=1)

        def attend_pairs(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._put(plan.slots, keys, values)
            return attend(queries.transpose(0, 1)[None], self._pairs, plan.groups[None])[0]

        places = plan.position_ids[0] - 1
        pairs = Pairs(torch.stack([*features]), plan.token_ids[0], places)
        return self._head.step(pairs, attend_pairs)

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._pairs.cache.write(slots, keys.transpose(0, 1), values.transpose(0, 1))


class DraftLayer:
    """A head that keeps its state in an engine's pages. It makes g from inputs of model layers."""

    def __init__(self, head: DraftHead, layers: Sequence[KeysAndValues]) -> None:
        """`layers` are caches with the shapes of `draft_shapes`."""
        features, *pairs = layers
        self._head = head
        self._features = features.keys[0]  # [slots, D]
        self.pairs = PairLayer(head, pairs[0]) if pairs else None

    def write(self, step: HeldStep, tapped: Sequence[Tensor]) -> Tensor:
        """Writes g and the pairs of a step's T new tokens, and returns g [T, D]. Each tensor in
        `tapped` is the input of one layer of the model. Rows after the first T are padding."""
        rows = step.rows
        arrays = [rows.slots]
        if self.pairs is not None:
            arrays += [rows.token_ids, _places(rows.positions), _slots_before(step)]
        slots, *others = shipped(arrays, self._features.device)
        fused = self._head.fuse(torch.cat([read[: len(slots)] for read in tapped], -1))
        self._features.index_copy_(0, slots, fused)
        if self.pairs is not None:
            token_ids, places, before = others
            self.pairs.put(token_ids, places, slots, self.features_at(before))
        return fused

    def features_at(self, slots: Tensor) -> Tensor:
        """Returns g [n, D] of slots [n]."""
        return self._features.index_select(0, slots)


def _places(positions: _Ints) -> _Ints:
    return np.maximum(positions - 1, 0)


def _slots_before(step: HeldStep) -> _Ints:
    """Returns [T]: the slot of the token before each new token. For a sequence's first token,
    whose pair is never read, this is the token's own slot."""
    slots = []
    for held in step.sequences:
        positions = np.arange(held.length, held.length + len(held.step.token_ids))
        slots.append(slots_at(held.pages, _places(positions), step.page_size))
    return np.concatenate(slots)
