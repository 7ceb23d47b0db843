"""What each replica is told, and how many of them there can be."""

from __future__ import annotations

from typing import Any, cast

import pytest

from deploy.fleet.spec import FleetSpec, plan_fleet
from outrider.config import load_config
from outrider.errors import ConfigError, SettingError
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import ROLES, Role

PORTS = {"grpc_port": 5000, "port": 8000, "target_port": 6000, "draft_port": 7000}


def spec(*, local: bool = True, **settings: Any) -> FleetSpec:
    config = load_config({"engine": "emulated:", "draft_model": "emulated"} | settings, {})
    return plan_fleet(config, config, {"CPU": 8.0}, "d", local=local)


def port(plan: FleetSpec, role: Role, slot: int) -> int:
    config: Any = plan.replica_config(role, f"{role}-9", slot)
    return int(config.grpc_port if role == "coordinator" else config.port)


def test_replicas_of_one_machine_count_up_from_the_first_ones_port() -> None:
    plan = spec(**PORTS)
    assert [port(plan, role, 0) for role in ROLES] == [5000, 6000, 7000]
    assert [port(plan, role, 3) for role in ROLES] == [5003, 6003, 7003]
    coordinator: Any = plan.replica_config("coordinator", "coordinator-9", 3)
    assert coordinator.port == 8003


def test_a_port_that_is_left_open_stays_so() -> None:
    plan = spec(grpc_port=0, target_port=0, draft_port=0)
    assert [port(plan, role, 3) for role in ROLES] == [0, 0, 0]


def test_on_a_cluster_each_replica_has_the_ports_that_are_set() -> None:
    """They are on machines of their own, and their slots say nothing of ports there."""
    plan = spec(local=False, **PORTS)
    assert [port(plan, role, 3) for role in ROLES] == [5000, 6000, 7000]
    for role in ROLES:
        assert plan.replica_config(role, "x", 3).slot == 0


@pytest.mark.parametrize("role", ROLES)
def test_a_replica_is_told_where_it_is_announced_and_as_what(role: Role) -> None:
    plan = spec(redis_url="redis://elsewhere", redis_username="me", redis_key_prefix="ours:")
    member = plan.replica_config(role, "x-7", 2).membership
    assert member is not None
    assert (member.deployment, member.name, member.slot) == ("d", "x-7", 2)
    assert member.redis == plan.config.coordinator.redis
    assert (member.redis.url, member.redis.key_prefix) == ("redis://elsewhere", "ours:")


def test_nothing_else_of_a_replicas_configuration_differs() -> None:
    plan = spec(**PORTS, max_num_seqs=7)
    config = plan.config
    for role, whole in (
        ("coordinator", config.coordinator), ("target", config.target), ("draft", config.draft)
    ):  # fmt: skip
        told = plan.replica_config(cast(Role, role), "x", 1)
        assert type(told) is type(whole)
        differ = {
            name
            for name in type(whole).__dataclass_fields__
            if getattr(told, name) != getattr(whole, name)
        }
        of_coordinators = ("grpc_port", "shares_ports") if role == "coordinator" else ()
        assert differ == {"membership", "port", *of_coordinators}


def test_coordinators_of_one_machine_share_ports_with_those_that_they_replace() -> None:
    """But for a port of metrics: then one ends before the other starts."""
    for settings, in_place in (
        ({}, ()), ({"telemetry": "otlp=http://h:1"}, ()), ({"telemetry": "prometheus=0"}, ()),
        ({"telemetry": "prometheus=9464"}, ("coordinator",)),
    ):  # fmt: skip
        plan, elsewhere = spec(**settings), spec(local=False, **settings)
        assert (plan.in_place, plan.keeps_ports) == (in_place, ("coordinator",))
        assert (elsewhere.in_place, elsewhere.keeps_ports) == ((), ())
        for found in (plan, elsewhere):
            told: Any = found.replica_config("coordinator", "coordinator-9", 0)
            assert (told.shares_ports, told.takes_over_ports) == (found.local, False)
            told = found.replica_config("coordinator", "coordinator-9", 0, takes_over=True)
            assert told.takes_over_ports is found.local


def test_what_a_replica_asks_for_bears_its_name() -> None:
    plan = spec(target_num_cpus=3, target_resources="rack=1")
    demand, leader, _ = plan.demand("target", "target-4")
    assert (demand.name, demand.num_cpus, demand.resources) == ("target-4", 3.0, {"rack": 1.0})
    leaders = {role: plan.demand(role, role)[1].__name__ for role in ROLES}
    assert leaders == {
        "coordinator": "CoordinatorActor", "target": "TargetActor", "draft": "DraftActor"
    }  # fmt: skip
    assert leader.__name__ == "TargetActor"


def test_at_first_there_are_as_many_as_the_configuration_says() -> None:
    plan = spec(num_coordinators=2, num_targets=3, num_drafts=4)
    assert plan.counts == {"coordinator": 2, "target": 3, "draft": 4}
    assert spec(num_drafts=0).counts["draft"] == 0


def test_counts_are_held_within_what_is_possible() -> None:
    """Nothing can be done without a target and a coordinator; without a draft it can."""
    plan = spec()
    within: dict[Role, int] = {"coordinator": 2, "target": REPLICAS_MAX, "draft": 3}
    assert plan.bounded(within) == within
    assert plan.bounded(dict.fromkeys(ROLES, 0)) == {"coordinator": 1, "target": 1, "draft": 0}
    assert plan.bounded(dict.fromkeys(ROLES, -1)) == {"coordinator": 1, "target": 1, "draft": 0}
    assert plan.bounded(dict.fromkeys(ROLES, REPLICAS_MAX + 1)) == dict.fromkeys(
        ROLES, REPLICAS_MAX
    )


@pytest.mark.parametrize("drafter", ["medusa:heads", "ngram"])
def test_without_a_draft_of_its_own_there_are_no_replicas_of_one(drafter: str) -> None:
    plan = spec(engine="transformers", model="m", draft_model=drafter, num_drafts=2)
    assert plan.counts == {"coordinator": 1, "target": 1, "draft": 0}
    assert plan.bounded(dict.fromkeys(ROLES, 2)) == {"coordinator": 2, "target": 2, "draft": 0}
    with pytest.raises(SettingError, match="there are no draft replicas"):
        plan.demand("draft", "draft-0")


def test_a_number_that_cannot_be_is_refused_by_its_role() -> None:
    """Where somebody asks for it, rather than held within what is possible."""
    drafts_itself = spec(engine="transformers", model="m", draft_model="medusa:heads")
    looks_up = spec(draft_model="suffix")
    plan = spec()
    for role, count in (("target", 1), ("draft", 0), ("coordinator", REPLICAS_MAX)):
        plan.check_count(cast("Role", role), count)
    drafts_itself.check_count("draft", 0)
    for one, role, count, said in (
        (plan, "target", 0, "target=0: it must be 1 to 1024"),
        (plan, "draft", -1, "draft=-1: it must be 0 to 1024"),
        (plan, "coordinator", REPLICAS_MAX + 1, "coordinator=1025: it must be 1 to 1024"),
        (drafts_itself, "draft", 1, "draft=1: with draft_model medusa:heads the target drafts"),
        (looks_up, "draft", 2, "draft=2: with draft_model suffix the coordinators draft"),
    ):
        with pytest.raises(ConfigError, match=said):
            one.check_count(cast("Role", role), count)
