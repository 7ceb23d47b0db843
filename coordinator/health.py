"""Whether a coordinator can serve, and why it cannot."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from coordinator.decoding.committer import Committer
from coordinator.routing.replica_pool import ReplicaPool
from outrider.errors import NotFound, OutriderError
from outrider.sessions.store import SessionStore

HEALTH_TIMEOUT_S: Final = 2.0
"""How long a target may take to describe itself."""
TROUBLE_S: Final = 3.0
"""Trouble that passes sooner is none: while a replica is loaded on cores that others share, a
target or the store may be silent for some seconds, and running requests outlast that."""
TROUBLE_RETRY_S: Final = 0.2
"""Between two questions within that time."""
NO_SESSION: Final = "0" * 32
"""An id that no session has; asking for it shows whether the store answers."""


async def trouble(committer: Committer, store: SessionStore, targets: ReplicaPool[Any, Any]) -> str:
    """Why a request that comes now cannot make progress; empty where commits go on, and the store
    and a target answer within `TROUBLE_S`. The draft is not asked, because requests do without
    it."""
    loop = asyncio.get_running_loop()
    until = loop.time() + TROUBLE_S
    while True:
        if committer.closing:
            return "the coordinator is shutting down"
        found = await _trouble_now(store, targets)
        if not found or loop.time() >= until:
            return found
        await asyncio.sleep(TROUBLE_RETRY_S)


async def _trouble_now(store: SessionStore, targets: ReplicaPool[Any, Any]) -> str:
    found = await store_trouble(store)
    if found:
        return f"the session store does not answer: {found}"
    return "" if await targets.healthy(HEALTH_TIMEOUT_S) else "no target answers"


async def store_trouble(store: SessionStore) -> str:
    """Why the store does not answer; empty where it does."""
    try:
        await store.load(NO_SESSION)
    except NotFound:
        return ""
    except OutriderError as error:
        return error.message
    return ""
