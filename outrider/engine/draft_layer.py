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
from outrider.models.eagle3 import Eagle3Head

_Ints = npt.NDArray[np.int64]


def draft_shapes(head: Eagle3Head, dtype: torch.dtype, device: torch.device) -> list[LayerShape]:
    """What a slot holds for the head: the key and value of a pair, and g as a key of its own."""
    width = head.head_dim
    return [
        LayerShape(head.num_kv_heads, width, width, dtype, device),
        LayerShape(1, head.width, 0, dtype, device),
    ]


class DraftLayer:
    """A head on the pages of an engine."""

    def __init__(self, head: Eagle3Head, layers: Sequence[KeysAndValues], page_size: int) -> None:
        """`layers` are of `draft_shapes`."""
        self._head = head
        pairs, features = layers
        self._pairs = LayerPages(pairs, window=None, scaling=head.head_dim**-0.5)
        self._features = features.keys[0]
        """[slots, D]."""
        self._page_size = page_size

    def write(self, sequences: Sequence[HeldSequence], tapped: Sequence[Tensor]) -> Tensor:
        """g [T, D] of a step's T new tokens, of which the tapped layers read the first T rows of
        `tapped`. Puts it, and the tokens' pairs, into their slots."""
        ids, positions, slots, _ = rows_of(sequences, self._page_size)
        before = _slots_before(sequences, slots, self._page_size)
        places = np.maximum(positions - 1, 0)
        sent = shipped([ids, places, slots, before], self._features.device)
        token_ids, positions_, slots_, before_ = sent
        found = self._head.fuse(torch.cat([rows[: len(slots)] for rows in tapped], -1))
        self._features.index_copy_(0, slots_, found)
        features = self._features.index_select(0, before_)
        self._write_pairs(slots_, *self._head.keys_and_values(features, token_ids, positions_))
        return found

    def draft(self, sequences: Sequence[HeldSequence], features: Sequence[Tensor]) -> Tensor:
        """What the head puts out [N, D] for a pair of each of N sequences: of its feature [D] and
        its only new token."""
        cache = self._pairs.cache
        plan = plan_step(
            sequences, (None,), self._page_size, cache.keys.device, cache.keys.dtype, first_slot=1
        )

        def attend_pairs(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._write_pairs(plan.slots, keys, values)
            return attend(queries.transpose(0, 1)[None], self._pairs, plan.groups[None])[0]

        places = plan.position_ids[0] - 1
        return self._head.step(torch.stack([*features]), plan.token_ids[0], places, attend_pairs)

    def _write_pairs(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """[T, heads, width] each."""
        self._pairs.cache.write(slots, keys.transpose(0, 1), values.transpose(0, 1))


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
