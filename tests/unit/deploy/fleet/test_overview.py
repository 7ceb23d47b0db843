"""What is told of a fleet whose replicas are replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.fleet.replica import Overview, ReplicaView
from outrider.registry.registry import Role


def view(
    name: str, *, serves: bool = True, leaves: bool = False, stale: bool = False
) -> ReplicaView:
    role: Role = "target" if name.startswith("target") else "draft"
    return ReplicaView(name, role, "h:1" if serves else "", leaves, stale, ())


STALE = view("target-0", stale=True)
LEAVING = view("target-0", leaves=True, stale=True)
STARTING = view("target-1", serves=False)


@pytest.mark.parametrize(
    ("replicas", "num_stale"),
    [
        ((STALE, STARTING), 1),
        ((LEAVING, view("target-1")), 1),
        ((), 1),
        ((view("target-1"),), 0),
        ((view("target-1"), view("target-2", serves=False, leaves=True)), 0),
        ((STALE, STARTING, view("draft-0", stale=True)), 2),
    ],
)
def test_a_replica_that_is_replaced_counts_once(
    replicas: tuple[ReplicaView, ...], num_stale: int
) -> None:
    """From before another one is started until the old one has ended and the other serves."""
    overview = Overview({"target": 1}, replicas, None, upgrades=True)
    assert overview.num_stale == num_stale
    assert replace(overview, upgrades=False).num_stale == 0
