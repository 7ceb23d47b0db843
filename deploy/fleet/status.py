"""The replicas of a deployment, as the reconciler tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import Unavailable
from outrider.registry.registry import ROLES, Role
from outrider.replica.process_setup import Place


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica."""

    name: str
    role: Role
    address: str
    """HOST:PORT; empty while it does not serve."""
    leaves: bool = False
    """Whether it gets no more work, and will end."""
    stale: bool = False
    """Whether it was started by another spec than the one that holds."""
    places: tuple[Place, ...] = ()
    """Of its ranks, the one that serves first; empty while it does not serve."""
    http_address: str = ""
    """HOST:PORT where a coordinator answers by HTTP; empty where it does not."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All replicas, the oldest first, and how many there should be."""

    wanted: Mapping[Role, int]
    replicas: tuple[ReplicaView, ...]
    hopeless: Role | None
    """A role of which there is none, and none can be started."""
    upgrades: bool = False
    """Whether the spec has changed, and there has not been a whole fleet made by it yet."""
    failures: tuple[str, ...] = ()
    """Why replicas did not start that are still missing."""

    def of(self, role: Role) -> list[ReplicaView]:
        """The replicas of a role."""
        return [one for one in self.replicas if one.role == role]

    def num_serving(self, role: Role) -> int:
        """How many of a role serve, those that leave among them."""
        return sum(bool(one.address) for one in self.of(role))

    def late(self, what: str, after_s: float) -> Unavailable:
        """That something has not come about in this time, and why, as far as that is known."""
        reasons = "; ".join(self.failures) or "see `outrider status` and the logs that it names"
        return Unavailable(f"not {what} after {after_s:g} s: {reasons}")

    @property
    def is_whole(self) -> bool:
        """Whether as many serve as should."""
        return all(self.num_serving(role) >= count for role, count in self.wanted.items())

    @property
    def num_stale(self) -> int:
        """Replicas that an upgrade has still to replace. One counts until it has ended and another
        one, made by the spec that holds, serves in its place."""
        if not self.upgrades:
            return 0
        total = 0
        for role in ROLES:
            num_old = sum(one.stale for one in self.of(role))
            num_new = sum(bool(one.address) and not one.stale for one in self.of(role))
            total += max(num_old, self.wanted.get(role, 0) - num_new)
        return total

    def addresses(self, role: Role, *, http: bool = False) -> tuple[str, ...]:
        """Where those of a role answer that stay, by gRPC or by HTTP: each HOST:PORT, the oldest
        replica's first."""
        found = [
            one.http_address if http else one.address for one in self.of(role) if not one.leaves
        ]
        # Two coordinators have one address while one is replaced by the other.
        return tuple(dict.fromkeys(filter(None, found)))
