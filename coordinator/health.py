"""Whether a coordinator can serve, and why it cannot."""

from __future__ import annotations

from typing import Any, Final

from outrider.errors import NotFound, OutriderError
from outrider.sessions.store import SessionStore

from .commits import Committer
from .replicas import ReplicaPool

HEALTH_TIMEOUT_S: Final = 2.0
NO_SESSION: Final = "0" * 32
"""An id that no session has; asking for it shows whether the store answers."""


async def trouble(committer: Committer, store: SessionStore, targets: ReplicaPool[Any, Any]) -> str:
    """Why a request that comes now cannot make progress; empty where commits go on, and the store
    and a target answer. The draft is not asked, because requests do without it."""
    if committer.closing:
        return "the coordinator is shutting down"
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
