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
    plan: str = ""
    """Names what it was started by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engagement:
    """What a replica has come to, for whoever takes over its care."""

    address: str
    """HOST:PORT that it serves at; empty where it does not serve."""
    slot: int = 0
    """See `Membership.slot`."""
    plan: str = ""
    """See `Membership.plan`."""
    leaving: bool = False
    """Whether it was told that it is to be left."""
    num_ranks: int = 1
    """Processes that share its model."""
    http_address: str = ""
    """HOST:PORT where a coordinator answers by HTTP; empty where it does not."""
