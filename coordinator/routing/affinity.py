"""Which replica a session begins on. Pure.

By rendezvous hashing (Thaler and Ravishankar 1998) of what its prompt begins with: sessions that
begin alike find the pages that others have left, coordinators agree without talking, and where a
replica comes or goes only its own sessions move. A bound on loads (Mirrokni, Thorup and
Zadimoghaddam 2018) sends on what would be too much for one; each coordinator keeps it for its own
sessions, so it is kept for those of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

from outrider.limits import PAGE_SIZE

LOAD_SLACK: Final = 0.25
"""A replica is given a quarter more sessions than all have on average, at most, or one more where
these cannot be shared out evenly; but not for it more than share a step."""
_KEY_PAGES: Final = 2
"""Pages that sessions on one replica share at least, where their prompts are as long as that."""


def affinity(tenant: str, prompt_ids: Sequence[int]) -> bytes:
    """What sessions that may share pages have in common: whose they are, and their first pages."""
    first = prompt_ids[: _KEY_PAGES * PAGE_SIZE]
    ids = b"".join(token_id.to_bytes(4, "little") for token_id in first)
    return blake2b(ids, key=blake2b(tenant.encode(), digest_size=16).digest()).digest()


def ranked(key: bytes, names: Sequence[str]) -> list[str]:
    """The names in the order in which a key prefers them; the order of two does not depend on the
    others."""
    return sorted(names, key=lambda name: blake2b(name.encode(), key=key).digest(), reverse=True)


def choose(key: bytes, loads: Mapping[str, int], seats: int) -> str | None:
    """The one that a key prefers among those with room for a session more, by how many sessions
    each has, of which `seats` share a step; None where there is none at all. Beyond the seats all
    have the same: there whoever has more keeps its sessions waiting."""
    if not loads:
        return None
    mean = (sum(loads.values()) + 1) / len(loads)
    slack = min(math.floor((1 + LOAD_SLACK) * mean), seats)
    bound = max(math.ceil(mean), slack)
    roomy = [name for name, load in loads.items() if load < bound]
    return ranked(key, roomy)[0]
