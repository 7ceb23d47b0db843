"""How long a store lets a session be owned and be read."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.limits import FINISHED_TTL_S, SESSION_LEASE_MS, SESSION_TTL_S


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """All in milliseconds of the store's own clock."""

    lease_ms: int = SESSION_LEASE_MS
    """How long an owner that says nothing keeps its sessions."""
    session_ttl_ms: int = SESSION_TTL_S * 1000
    """How long at least a session that is not finished stays readable after its last write."""
    finished_ttl_ms: int = FINISHED_TTL_S * 1000
    """How long a finished session stays readable."""


DEFAULT_LIFETIMES = Lifetimes()
