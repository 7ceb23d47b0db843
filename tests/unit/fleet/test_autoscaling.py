"""The numbers of replicas that the autoscaler wants."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.config.deployment import AutoscaleConfig
from outrider.errors import StoreUnavailable
from outrider.fleet.autoscaling import Autoscaler
from outrider.registry.redis_registry import Contents
from outrider.registry.registry import Figures, ReplicaRecord, Role
from tests.support.memory_registry import MemoryRegistry

CONFIG = AutoscaleConfig(
    autoscale_targets="1:8",
    autoscale_drafts="0:6",
    autoscale_coordinators="1:4",
    autoscale_queue_steps=1.0,
    autoscale_draft_waits=0.2,
    autoscale_calm_s=60.0,
)


def record(role: Role, load: int = 0, leaving: bool = False, **figures: float) -> ReplicaRecord:
    return ReplicaRecord(
        role=role,
        name=f"{role}-0",
        address="h:1",
        host="h",
        pid=1,
        load=load,
        leaving=leaving,
        figures=Figures(**figures),
    )


class Fleet:
    """Replicas with scripted load."""

    def __init__(self, config: AutoscaleConfig = CONFIG, **counts: int) -> None:
        self.scaler = Autoscaler(MemoryRegistry(), config)
        self.wanted: dict[Role, int] = {"coordinator": 1, "target": 1, "draft": 1}
        self.wanted |= counts  # type: ignore[typeddict-item]
        self.there: dict[Role, int] = {}
        """Numbers of existing replicas, where they differ from the wanted ones."""
        self.says: dict[Role, dict[str, Any]] = {
            "coordinator": {"load": 10},
            "target": {"busy": 1.0, "fill": 0.8},
            "draft": {"busy": 0.8},
        }

    def look(self, now: float) -> dict[Role, int]:
        records: dict[Role, list[ReplicaRecord]] = {
            role: [record(role, **self.says[role]) for _ in range(count)]
            for role, count in (self.wanted | self.there).items()
        }
        found = self.scaler.decide(now, self.wanted, records)
        changes = {role: count for role, count, _ in found}
        self.wanted |= changes
        return changes


def test_targets_follow_how_long_items_wait() -> None:
    fleet = Fleet(target=2)
    fleet.says["target"]["queue_steps"] = 0.9
    assert fleet.look(0) == {}
    fleet.says["target"]["queue_steps"] = 1.4
    assert fleet.look(1) == {"target": 3}
    fleet.says["target"]["queue_steps"] = 9.0
    assert fleet.look(5) == {}, "the last change has not shown yet"
    assert fleet.look(16) == {"target": 6}
    assert fleet.look(31) == {"target": 8}
    assert fleet.look(46) == {}


def test_drafts_and_coordinators_follow_waits_and_sessions() -> None:
    fleet = Fleet(coordinator=2)
    fleet.says["coordinator"]["draft_waits"] = 0.19
    assert fleet.look(0) == {}
    fleet.says["coordinator"] |= {"draft_waits": 0.5, "load": 1_400}
    assert fleet.look(1) == {"draft": 2, "coordinator": 3}


@pytest.mark.parametrize("figure", [{"busy": 0.9}, {"loop_lag_ms": 110.0}])
def test_coordinators_that_compute_a_lot_or_are_late_are_joined_by_another(
    figure: dict[str, float],
) -> None:
    fleet = Fleet(coordinator=2)
    fleet.says["coordinator"] |= {"busy": 0.7, "loop_lag_ms": 90.0}
    assert fleet.look(0) == {}
    fleet.says["coordinator"] |= figure
    assert fleet.look(1) == {"coordinator": 3}


def test_one_goes_after_it_would_long_not_have_been_missed() -> None:
    fleet = Fleet(target=3)
    fleet.says["target"] = {"busy": 0.8, "fill": 0.45, "queue_steps": 0.1}
    assert fleet.look(0) == {}
    assert fleet.look(59) == {}
    fleet.says["target"]["fill"] = 0.55
    assert fleet.look(60) == {}, "0.44 of 3 would be 0.66 of 2"
    fleet.says["target"]["fill"] = 0.45
    assert fleet.look(61) == {}
    assert fleet.look(122) == {"target": 2}
    assert fleet.look(130) == {}
    assert fleet.look(250) == {}, "0.36 of 2 would be 0.72 of one"


def test_no_draft_is_kept_for_nobody_and_one_comes_for_anybody() -> None:
    fleet = Fleet()
    fleet.says["draft"]["busy"], fleet.says["coordinator"]["load"] = 0.0, 0
    assert fleet.look(0) == {}
    assert fleet.look(61) == {"draft": 0}
    assert fleet.look(80) == {}
    fleet.says["coordinator"]["load"] = 1
    assert fleet.look(81) == {"draft": 1}


def test_an_idle_draft_stays_while_sessions_run_that_may_need_one() -> None:
    """Otherwise it would come and go without end."""
    fleet = Fleet(draft=0)
    fleet.says["draft"]["busy"] = 0.0
    changes = [fleet.look(now) for now in range(1800)]
    assert [one for one in changes if one] == [{"draft": 1}]


@pytest.mark.parametrize(
    ("role", "too_few"),
    [("target", {"queue_steps": 2.0}), ("draft", {}), ("coordinator", {"loop_lag_ms": 150.0})],
)
def test_a_number_that_was_too_few_is_not_tried_again_soon(
    role: Role, too_few: dict[str, float]
) -> None:
    """A single replica is too few, but two replicas are hardly busy. At the same load, one replica
    is tried again after an hour. At a lower load, one goes as usual."""
    fleet = Fleet(AutoscaleConfig(**{f"autoscale_{role}s": "1:4"}))

    def changes(start: int, end: int, load: float = 1.0) -> list[dict[Role, int]]:
        found = []
        for now in range(start, end):
            is_one = fleet.wanted[role] == 1
            busy = {"busy": load * (0.2 if is_one else 0.1), "fill": 1.0}
            fleet.says[role] = busy | (too_few if is_one else {})
            waits = 0.4 if is_one and role == "draft" else 0.0
            fleet.says["coordinator"] |= {"load": 10, "draft_waits": waits}
            found.append(fleet.look(now))
        return [one for one in found if one]

    assert changes(0, 3600) == [{role: 2}]
    assert changes(3600, 3800) == [{role: 1}, {role: 2}]
    assert changes(3800, 3922, load=0.5) == [{role: 1}]


def test_bounds_hold_at_once_and_roles_without_are_left_alone() -> None:
    fleet = Fleet(AutoscaleConfig(autoscale_targets="2:3"), target=1, draft=50)
    assert fleet.look(0) == {"target": 2}
    fleet.there["target"], fleet.says["target"]["queue_steps"] = 1, 5.0
    assert fleet.look(100) == {}
    fleet.wanted["target"] = 5
    assert fleet.look(101) == {"target": 3}


def test_fewer_are_wanted_where_those_that_are_there_have_long_been_enough() -> None:
    fleet = Fleet(target=8)
    fleet.there["target"] = 4
    fleet.says["target"] = {"busy": 0.5, "fill": 1.0}
    assert fleet.look(0) == {}
    fleet.says["target"]["busy"] = 0.61
    assert fleet.look(50) == {}
    fleet.says["target"]["busy"] = 0.5
    assert fleet.look(60) == {}
    assert fleet.look(119) == {}
    for now, count in ((120, 7), (200, 6), (280, 5), (360, 4)):
        assert fleet.look(now) == {"target": count}
        assert fleet.look(now + 15) == {}
    assert fleet.look(500) == {}, "0.5 of 4 would be 0.67 of 3"


def test_nothing_changes_while_one_leaves_for_another() -> None:
    scaler = Autoscaler(MemoryRegistry(), CONFIG)
    targets = [record("target"), record("target", leaving=True)]
    records: dict[Role, list[ReplicaRecord]] = {"target": targets, "coordinator": [], "draft": []}
    for now in (0, 100, 200):
        assert scaler.decide(now, {"target": 3}, records) == []


async def test_what_is_wanted_follows_what_replicas_say() -> None:
    registry = MemoryRegistry()
    scaling = Autoscaler(registry, AutoscaleConfig())
    await registry.want({"target": 1, "draft": 1, "coordinator": 1})
    await registry.announce(record("target", queue_steps=3.0))
    for bounds, count in (("", 1), ("1:4", 2)):
        scaling.config = AutoscaleConfig(autoscale_targets=bounds)
        await scaling.adjust()
        assert (await registry.wanted())["target"] == count
    registry.failure = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await scaling.adjust()


async def test_a_number_that_an_operator_wants_is_not_overwritten() -> None:
    class Busy(MemoryRegistry):
        async def contents(self) -> Contents:
            found = await super().contents()
            await self.want({"target": 7})  # `outrider scale`, while the autoscaler decides.
            return found

    registry = Busy()
    scaling = Autoscaler(registry, AutoscaleConfig(autoscale_targets="1:8"))
    await registry.want({"target": 2})
    for name in ("target-0", "target-1"):
        await registry.announce(replace(record("target", queue_steps=3.0), name=name))
    await scaling.adjust()
    assert await registry.wanted() == {"target": 7}


async def test_drafts_stay_as_many_while_one_is_on_trial() -> None:
    """The rounds of the trial's replica are in the coordinators' averages. Bounds still apply."""
    registry = MemoryRegistry()
    scaling = Autoscaler(registry, AutoscaleConfig())
    await registry.want({"target": 1, "draft": 1, "coordinator": 1})
    await registry.announce(record("coordinator", 9, draft_waits=0.9))
    await registry.announce(record("draft", busy=0.9))
    await registry.announce(replace(record("draft", busy=0.9), name="draft-1", trial_share=0.5))
    for bounds, count in (("1:4", 1), ("2:4", 2)):
        scaling.config = AutoscaleConfig(autoscale_drafts=bounds)
        await scaling.adjust()
        assert (await registry.wanted())["draft"] == count
