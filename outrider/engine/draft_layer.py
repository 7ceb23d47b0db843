"""A drafting head as one more layer on the pages of the model that it drafts for.

The head reads pairs. Pair j is g_{j-1}, what the head makes of the model's hidden states at token
j - 1, together with token j.

    slot j of a sequence    the model's keys and values of token j
                            g_j
                            the head's key and value of pair j

So prefixes, forks, roll-backs and kept paths of trees need no code of their own: the head's state
moves with the slot. Every step of the model also writes g and the pairs of its tokens, which takes
no attention. When pair j drafts, it attends to slots 1..j, as slot 0 has no pair. The rotary
position of pair j is j - 1.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.attention import LayerPages
from outrider.engine.batch import HeldStep, plan_step, shipped
from outrider.engine.gathered_attention import attend
from outrider.kv_cache.storage import KeysAndValues, LayerShape
from outrider.models.draft_head import DraftHead

_Ints = npt.NDArray[np.int64]


def pair_shape(head: DraftHead, dtype: torch.dtype, device: torch.device) -> LayerShape:
    """What a slot holds of its pair: a key and a value."""
    return LayerShape(head.num_kv_heads, head.key_width, head.value_width, dtype, device)


def draft_shapes(
    head: DraftHead, dtype: torch.dtype, device: torch.device, drafts_apart: bool = False
) -> list[LayerShape]:
    """What a slot holds for a `DraftLayer`: g, stored as a key without a value, and its pair unless
    the head drafts elsewhere."""
    feature = LayerShape(1, head.width, 0, dtype, device)
    return [feature] if drafts_apart else [feature, pair_shape(head, dtype, device)]


class PairLayer:
    """The part of a head that drafts: keeps the key and value of every pair in its token's slot."""

    def __init__(self, head: DraftHead, pairs: KeysAndValues) -> None:
        """`pairs` is of `pair_shape`."""
        self._head = head
        self._pairs = LayerPages(pairs, window=None, scaling=head.scaling)

    def write(self, step: HeldStep, features: Tensor) -> None:
        """Writes the pairs of a step's T new tokens, given g [T, D] of the token before each. The
        pair of a sequence's first token is never read."""
        rows = step.rows
        arrays = [rows.token_ids, _places(rows.positions), rows.slots]
        token_ids, places, slots = shipped(arrays, features.device)
        self.put(token_ids, places, slots, features)

    def put(self, token_ids: Tensor, places: Tensor, slots: Tensor, features: Tensor) -> None:
        """Like `write`, for tokens [T] with these rotary positions and slots."""
        self._put(slots, *self._head.keys_and_values(features, token_ids, places))

    def draft(self, step: HeldStep, features: Sequence[Tensor]) -> Tensor:
        """Runs one pair of each of N sequences: a feature [D], and the sequence's only new token.
        Returns what the head puts out, [N, D]."""
        cache = self._pairs.cache
        plan = plan_step(step, (None,), cache.keys.device, cache.keys.dtype, first_slot=1)

        def attend_pairs(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._put(plan.slots, keys, values)
            return attend(queries.transpose(0, 1)[None], self._pairs, plan.groups[None])[0]

        places = plan.position_ids[0] - 1
        return self._head.step(torch.stack([*features]), plan.token_ids[0], places, attend_pairs)

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """[T, heads, width] each."""
        self._pairs.cache.write(slots, keys.transpose(0, 1), values.transpose(0, 1))


class DraftLayer:
    """A head on the pages of an engine: reads the model's layers, and drafts unless it does so
    elsewhere."""

    def __init__(self, head: DraftHead, layers: Sequence[KeysAndValues]) -> None:
        """`layers` are of `draft_shapes`."""
        features, *pairs = layers
        self._head = head
        self._features = features.keys[0]
        """[slots, D]."""
        self.pairs = PairLayer(head, pairs[0]) if pairs else None

    def write(self, step: HeldStep, tapped: Sequence[Tensor]) -> Tensor:
        """Writes g and the pairs of a step's T new tokens, and returns g, [T, D]. Each of `tapped`
        is the input of one of the model's layers; only its first T rows count."""
        rows = step.rows
        arrays = [rows.slots]
        if self.pairs is not None:
            arrays += [rows.token_ids, _places(rows.positions), _slots_before(step)]
        slots, *others = shipped(arrays, self._features.device)
        found = self._head.fuse(torch.cat([read[: len(slots)] for read in tapped], -1))
        self._features.index_copy_(0, slots, found)
        if self.pairs is not None:
            token_ids, places, before = others
            self.pairs.put(token_ids, places, slots, self.features_at(before))
        return found

    def features_at(self, slots: Tensor) -> Tensor:
        """g [n, D] of slots [n]."""
        return self._features.index_select(0, slots)


def _places(positions: _Ints) -> _Ints:
    """Rotary positions of the pairs that end at these positions."""
    return np.maximum(positions - 1, 0)


def _slots_before(step: HeldStep) -> _Ints:
    """[T]: the slot of the token that each new token follows. The first token of a sequence gets
    its own slot, as its pair is never read."""
    found = []
    row = 0
    for held in step.sequences:
        num = len(held.step.token_ids)
        own = step.rows.slots[row : row + num]
        index, place = divmod(held.length - 1, step.page_size)
        newest = held.pages[index] * step.page_size + place if held.length else own[0]
        parents = held.step.parents or range(-1, num - 1)
        found.append(np.append(own, newest)[np.array(parents)])  # -1 is the newest slot held.
        row += num
    return np.concatenate(found)
