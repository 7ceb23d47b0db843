"""What a coordinator knows of its deployment: the registry's records and its own pools."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from memory_registry import MemoryRegistry

from coordinator.routing.discovery import Discovery, FleetView, SeenReplica
from coordinator.routing.replica_pool import ReplicaPool
from outrider.errors import StoreUnavailable
from outrider.messages import ReplicaDescription
from outrider.registry.registry import Figures, ReplicaRecord, Role

FIGURES = Figures(tokens_per_second=80.0)


class SilentLink:
    """A link to a replica that says nothing."""

    def listen(self, deliver: Any, lose: Any) -> None:
        pass

    async def close(self) -> None:
        pass


def description(model: str) -> ReplicaDescription:
    return ReplicaDescription(model, "w", "", 8, "float32", 64, (), 4)


def record(role: Role, name: str, **fields: Any) -> ReplicaRecord:
    given = {"address": "h:1", "host": f"node-of-{name}", "pid": 1, "model": "m", **fields}
    return ReplicaRecord(role=role, name=name, **given)


@pytest.fixture
def pools() -> tuple[ReplicaPool, ReplicaPool]:
    targets = ReplicaPool("target")
    targets.admit("t1", SilentLink(), description("big"))  # type: ignore[arg-type]
    targets.admit("t2", SilentLink(), description("big"))  # type: ignore[arg-type]
    return targets, ReplicaPool("draft")


def by_name(view: FleetView) -> dict[str, SeenReplica]:
    return {one.name: one for one in view.replicas("served", 5, FIGURES)}


async def test_without_a_registry_there_is_what_it_has_found_itself(pools: Any) -> None:
    targets, drafts = pools
    view = FleetView("alone", targets, drafts)
    assert view.heard_ms_ago is None
    own, first, second = view.replicas("served", 5, FIGURES)
    assert (own.role, own.name, own.model, own.load) == ("coordinator", "alone", "served", 5)
    assert own.here
    assert own.figures is FIGURES
    assert (first.name, first.model, first.node, first.state) == ("t1", "big", "", "serving")
    assert not second.here


async def test_records_say_where_a_replica_is_and_its_pool_how_it_is(pools: Any) -> None:
    """Away and leaving is what the pool has found; one that is no member yet is joining."""
    targets, drafts = pools
    view = FleetView("c1", targets, drafts)
    registry = MemoryRegistry()
    for one in (
        record("target", "t1", device="cpu", figures=Figures(busy=0.5)),
        record("target", "t9"),
        record("target", "t10", leaving=True),
        record("coordinator", "c1", load=99),
        record("coordinator", "c2", load=3),
    ):
        await registry.announce(one)
    roster = Discovery("target", view, registry, lambda address: SilentLink())  # type: ignore[arg-type, return-value]
    roster._not_before = {"t9": 1e12}
    await roster.look()
    await Discovery("coordinator", view, registry).look()
    targets.replicas["t2"].away = True
    seen = by_name(view)
    assert {name: one.state for name, one in seen.items()} == {
        "c1": "serving", "c2": "serving", "t1": "serving", "t2": "away", "t9": "joining",
        "t10": "leaving",
    }  # fmt: skip
    # Of itself it knows better than its last announcement.
    assert (seen["c1"].load, seen["c1"].here, seen["c2"].load, seen["c2"].here) == (
        5, True, 3, False,
    )  # fmt: skip
    assert (seen["t1"].node, seen["t1"].device) == ("node-of-t1", "cpu")
    assert seen["t1"].figures.busy == 0.5
    assert seen["t2"].node == ""
    targets.retire("t1")
    assert by_name(view)["t1"].state == "leaving"


async def test_sessions_are_counted_where_they_are(pools: Any) -> None:
    targets, drafts = pools
    view = FleetView("c", targets, drafts)
    targets.replicas["t2"].routes = dict.fromkeys(("a", "b"))
    assert (by_name(view)["t1"].load, by_name(view)["t2"].load) == (0, 2)


async def test_while_the_registry_is_away_what_was_heard_grows_old(pools: Any) -> None:
    targets, drafts = pools
    view = FleetView("c", targets, drafts)
    registry = MemoryRegistry()
    await registry.announce(replace(record("target", "t1"), host="here"))
    roster = Discovery("target", view, registry, lambda address: SilentLink())  # type: ignore[arg-type, return-value]
    await roster.look()
    first = view.heard_ms_ago
    assert first is not None
    assert first < 1000
    registry.failure = StoreUnavailable("away")
    await asyncio.sleep(0.05)
    await roster.look()
    later = view.heard_ms_ago
    assert later is not None
    assert later >= 50
    assert by_name(view)["t1"].node == "here"
