"""What sessions of a tenant were answered, for as long as there is room."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from outrider.drafting.text_index import TextIndex

END: Final = -1
"""Stands after every output; no token has this id, so that no match and no draft crosses it."""


class _TenantHistory:
    __slots__ = ("lengths", "text")

    def __init__(self, gram_length: int) -> None:
        self.text = TextIndex(gram_length)
        self.lengths: deque[int] = deque()
        """Of each output in `text`, its `END` included."""

    def forget_oldest(self) -> int:
        length = self.lengths.popleft()
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

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Adds an output, or its last part if it alone is longer than a tenant's share. Older ones
        of the tenant make room, and then those of others."""
        room = self._tokens_per_tenant - 1
        if room < 1:
            return
        added = [*token_ids[-room:], END]
        history = self._tenants.setdefault(tenant, _TenantHistory(self._gram_length))
        self._tenants.move_to_end(tenant)
        history.text.extend(added)
        history.lengths.append(len(added))
        self._num_tokens += len(added)
        while len(history.text) > self._tokens_per_tenant:
            self._num_tokens -= history.forget_oldest()
        while self._num_tokens > self._tokens_total:
            longest_quiet, other = next(iter(self._tenants.items()))
            self._num_tokens -= other.forget_oldest()
            if not other.lengths:
                del self._tenants[longest_quiet]
