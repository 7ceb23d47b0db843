"""What sessions of a tenant were answered, for as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from outrider.drafters.text_index import TextIndex
from outrider.errors import check

END: Final = -1
"""Stands after every output; no token has this id, so that no match and no draft crosses it."""


class _TenantHistory:
    __slots__ = ("lengths", "text")

    def __init__(self, gram_length: int) -> None:
        self.text = TextIndex(gram_length)
        self.lengths: OrderedDict[int, int] = OrderedDict()
        """Of each output in `text`, its `END` included, by its seed; the oldest first."""

    def forget_oldest(self) -> int:
        _, length = self.lengths.popitem(last=False)
        self.text.cut(length)
        return length


class History:
    """Outputs by tenant: whoever asks for one tenant sees nothing of another's.

    Adding an output costs O(1) for each of its tokens, and for each that makes room for it.
    """

    def __init__(self, gram_length: int, tokens_per_tenant: int, tokens_total: int) -> None:
        self._gram_length = gram_length
        self._tokens_per_tenant = min(tokens_per_tenant, tokens_total)
        self._tokens_total = tokens_total
        self._tenants: OrderedDict[str, _TenantHistory] = OrderedDict()
        """The one that has longest got no output first."""
        self._num_tokens = 0

    def __len__(self) -> int:
        """Tokens of all tenants, one for the end of each output included."""
        return self._num_tokens

    def of(self, tenant: str) -> TextIndex | None:
        """The tenant's outputs one after another, an `END` after each; None where there are none.
        Valid until the next `add`."""
        found = self._tenants.get(tenant)
        return None if found is None else found.text

    def add(self, tenant: str, seed: int, token_ids: Sequence[int]) -> None:
        """Adds an output, or its last part if it alone is longer than a tenant's share. Older ones
        of the tenant make room, and then those of others. There is none of its seed yet."""
        room = self._tokens_per_tenant - 1
        if room < 1:
            return
        added = [*token_ids[-room:], END]
        history = self._tenants.setdefault(tenant, _TenantHistory(self._gram_length))
        self._tenants.move_to_end(tenant)
        check(seed not in history.lengths, f"tenant {tenant!r} has an output of seed {seed}")
        history.text.extend(added)
        history.lengths[seed] = len(added)
        self._num_tokens += len(added)
        while len(history.text) > self._tokens_per_tenant:
            self._num_tokens -= history.forget_oldest()
        while self._num_tokens > self._tokens_total:
            self._forget_oldest(next(iter(self._tenants)))

    def forget(self, tenant: str, seed: int) -> None:
        """Forgets the tenant's output of this seed, if it is there, and all before it: what is left
        depends on no token of it, and not on how many there were."""
        while tenant in self._tenants and seed in self._tenants[tenant].lengths:
            self._forget_oldest(tenant)

    def _forget_oldest(self, tenant: str) -> None:
        history = self._tenants[tenant]
        self._num_tokens -= history.forget_oldest()
        if not history.lengths:
            del self._tenants[tenant]
