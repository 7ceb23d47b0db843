"""A drafting head as one more layer on the pages of the model that it drafts for.

The head reads pairs: of g, what it makes of the model's layers at a token, and the token behind it.

    slot j of a sequence    the model's keys and values of token j
                            g_j
                            the head's key and value of pair j = (g_{j-1}, token j)

Whatever is known of a sequence's slots, by prefix, after a fork or a cut, or of a path of a tree,
so holds what the head needs of them. Every step of the model writes the pairs of its tokens, for
which no attention is needed. A drafted pair attends to slots 1..j; slot 0 has none. Its rotary
position is that of its feature, j - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.attention import LayerPages
from outrider.engine.batch import HeldSequence, plan_step, rows_of, shipped
from outrider.engine.gathered_attention import attend
from outrider.kv_cache.storage import KeysAndValues, LayerShape
from outrider.models.draft_head import DraftHead

_Ints = npt.NDArray[np.int64]


def pair_shape(head: DraftHead, dtype: torch.dtype, device: torch.device) -> LayerShape:
    """What a slot holds of its pair: a key and a value."""
    return LayerShape(head.num_kv_heads, head.key_width, head.value_width, dtype, device)


def feature_shape(head: DraftHead, dtype: torch.dtype, device: torch.device) -> LayerShape:
    """What a slot holds of its token: g, as a key of its own."""
    return LayerShape(1, head.width, 0, dtype, device)


def draft_shapes(head: DraftHead, dtype: torch.dtype, device: torch.device) -> list[LayerShape]:
    """What a slot holds for a `DraftLayer`."""
    return [pair_shape(head, dtype, device), feature_shape(head, dtype, device)]


class FeatureLayer:
    """The part of a head that reads the model's layers: g of every token, in its slot."""

    def __init__(self, head: DraftHead, features: KeysAndValues, page_size: int) -> None:
        """`features` is of `feature_shape`."""
        self._head, self._page_size = head, page_size
        self._features = features.keys[0]
        """[slots, D]."""

    def write(self, sequences: Sequence[HeldSequence], tapped: Sequence[Tensor]) -> Tensor:
        """g [T, D] of a step's T new tokens, of which the tapped layers read the first T rows of
        `tapped`. Puts it into their slots."""
        [slots] = shipped([rows_of(sequences, self._page_size)[2]], self._features.device)
        return self.put(slots, tapped)

    def put(self, slots: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """As `write`, of tokens that have these slots [T]."""
        found = self._head.fuse(torch.cat([rows[: len(slots)] for rows in tapped], -1))
        self._features.index_copy_(0, slots, found)
        return found

    def at(self, slots: Tensor) -> Tensor:
        """g [n, D] of slots [n]."""
        return self._features.index_select(0, slots)


class PairLayer:
    """The part of a head that drafts: the key and value of every pair, in the slot of its token."""

    def __init__(self, head: DraftHead, pairs: KeysAndValues, page_size: int) -> None:
        """`pairs` is of `pair_shape`."""
        self._head, self._page_size = head, page_size
        self._pairs = LayerPages(pairs, window=None, scaling=head.scaling)

    def write(self, sequences: Sequence[HeldSequence], features: Tensor) -> None:
        """Puts the pairs of a step's T new tokens into their slots, of g [T, D] of the tokens
        before them; that of a sequence's first token is never read."""
        ids, positions, slots, _ = rows_of(sequences, self._page_size)
        places = np.maximum(positions - 1, 0)
        token_ids, places_, slots_ = shipped([ids, places, slots], features.device)
        self.put(token_ids, places_, slots_, features)

    def put(self, token_ids: Tensor, places: Tensor, slots: Tensor, features: Tensor) -> None:
        """As `write`, of tokens [T] with these rotary positions and slots."""
        self._put(slots, *self._head.keys_and_values(features, token_ids, places))

    def draft(self, sequences: Sequence[HeldSequence], features: Sequence[Tensor]) -> Tensor:
        """What the head puts out [N, D] for a pair of each of N sequences: of its feature [D] and
        its only new token."""
        cache = self._pairs.cache
        plan = plan_step(
            sequences, (None,), self._page_size, cache.keys.device, cache.keys.dtype, first_slot=1
        )

        def attend_pairs(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._put(plan.slots, keys, values)
            return attend(queries.transpose(0, 1)[None], self._pairs, plan.groups[None])[0]

        places = plan.position_ids[0] - 1
        return self._head.step(torch.stack([*features]), plan.token_ids[0], places, attend_pairs)

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """[T, heads, width] each."""
        self._pairs.cache.write(slots, keys.transpose(0, 1), values.transpose(0, 1))


class DraftLayer:
    """A whole head on the pages of an engine."""

    def __init__(self, head: DraftHead, layers: Sequence[KeysAndValues], page_size: int) -> None:
        """`layers` are of `draft_shapes`."""
        pairs, features = layers
        self._pairs = PairLayer(head, pairs, page_size)
        self._features = FeatureLayer(head, features, page_size)
        self._device, self._page_size = features.keys.device, page_size
        self.draft = self._pairs.draft

    def write(self, sequences: Sequence[HeldSequence], tapped: Sequence[Tensor]) -> Tensor:
        """As `FeatureLayer.write`; puts the tokens' pairs into their slots, too."""
        ids, positions, slots, _ = rows_of(sequences, self._page_size)
        before = _slots_before(sequences, slots, self._page_size)
        places = np.maximum(positions - 1, 0)
        sent = shipped([ids, places, slots, before], self._device)
        token_ids, places_, slots_, before_ = sent
        found = self._features.put(slots_, tapped)
        self._pairs.put(token_ids, places_, slots_, self._features.at(before_))
        return found


def _slots_before(sequences: Sequence[HeldSequence], slots: _Ints, page_size: int) -> _Ints:
    """[T]: for each new token, which has one of `slots`, the slot of the one that it follows; its
    own for the first token of a sequence, whose pair is never read."""
    found = []
    row = 0
    for held in sequences:
        num = len(held.step.token_ids)
        own, last = slots[row : row + num], held.length - 1
        index, place = divmod(last, page_size)
        newest = held.pages[index] * page_size + place if held.length else own[0]
        parents = held.step.parents or range(-1, num - 1)
        found.append(np.append(own, newest)[np.array(parents)])  # -1 is the newest one
        row += num
    return np.concatenate(found)
