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
class Endpoints:
    """Where the replicas answer: each HOST:PORT, the oldest replica's first."""

    coordinators: tuple[str, ...]
    targets: tuple[str, ...]
    drafts: tuple[str, ...]
    """None where the target drafts for itself."""
    http: tuple[str, ...] = ()
    """Of the coordinators; none where they do not answer by HTTP."""

    @property
    def coordinator(self) -> str:
        """All coordinators, with commas between them: what a `Client` takes."""
        return ",".join(self.coordinators)


@dataclass(frozen=True, slots=True)
class Overview:
    """All replicas, the oldest first, and how many there should be."""

    version: str
    """Another one wherever anything else has changed."""
    wanted: Mapping[Role, int]
    replicas: tuple[ReplicaView, ...]
    hopeless: Role | None
    """A role of which there is none, and none can be started."""
    adopted: bool = True
    """False while a restarted reconciler does not know yet which replicas there are."""
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

    @property
    def endpoints(self) -> Endpoints:
        """Where those answer that stay."""
        staying = [one for one in self.replicas if one.address and not one.leaves]
        # Two coordinators have one address while one is replaced by the other.
        coordinators, targets, drafts = (
            tuple(dict.fromkeys(one.address for one in staying if one.role == role))
            for role in ("coordinator", "target", "draft")
        )
        http = tuple(dict.fromkeys(one.http_address for one in staying if one.http_address))
        return Endpoints(coordinators, targets, drafts, http)
