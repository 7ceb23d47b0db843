"""Which deployment a replica is of."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.sessions.redis_address import RedisAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Where a replica is announced, and as what."""

    redis: RedisAddress
    deployment: str
    """Name of the deployment in Redis."""
    name: str
    """Of the replica, unique in the deployment, for ever."""
    slot: int = 0
    """Its place among the replicas of its role that share a machine: ports count up from it."""
