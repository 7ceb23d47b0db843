"""What each replica is told, and how many of them there can be."""

from __future__ import annotations

from typing import Any, cast

import pytest

from deploy.fleet.ray_cluster import Demand, beyond, strategy
from deploy.fleet.spec import (
    FleetSpec,
    are_apart,
    plan_fleet,
)
from outrider.config import DeploymentConfig, load_config
from outrider.errors import ConfigError, SettingError
from outrider.limits import LOOK_AHEAD_DEFAULT, REPLICAS_MAX
from outrider.registry.registry import ROLES, Role

PORTS = {"grpc_port": 5000, "port": 8000, "target_port": 6000, "draft_port": 7000}


def spec(*, local: bool = True, **settings: Any) -> FleetSpec:
    config = load_config({"engine": "emulated:", "draft_model": "emulated"} | settings, {})
    return plan_fleet(config, config, {"CPU": 8.0}, "d", local=local)


def port(plan: FleetSpec, role: Role, slot: int) -> int:
    config: Any = plan.replica_config(role, f"{role}-9", slot)
    return int(config.grpc_port if role == "coordinator" else config.port)


def test_replicas_of_one_machine_count_up_from_the_first_ones_port() -> None:
    """On a cluster they are on machines of their own, and have the ports that are set."""
    plan, elsewhere = spec(**PORTS), spec(local=False, **PORTS)
    open_ports = spec(grpc_port=0, target_port=0, draft_port=0)
    assert [port(plan, role, 0) for role in ROLES] == [5000, 6000, 7000]
    assert [port(plan, role, 3) for role in ROLES] == [5003, 6003, 7003]
    assert [port(elsewhere, role, 3) for role in ROLES] == [5000, 6000, 7000]
    assert {elsewhere.replica_config(role, "x", 3).slot for role in ROLES} == {0}
    assert [port(open_ports, role, 3) for role in ROLES] == [0, 0, 0]
    coordinator: Any = plan.replica_config("coordinator", "coordinator-9", 3)
    assert coordinator.port == 8003


def test_a_port_beyond_the_last_one_is_refused_by_its_setting() -> None:
    plan = spec(**{**PORTS, "port": 65535, "target_port": 65535})
    for role, key in (("coordinator", "port"), ("target", "target_port")):
        with pytest.raises(SettingError, match="65536 is wrong; it must be a whole") as caught:
            plan.replica_config(cast(Role, role), "x", 1)
        assert caught.value.key == key


def test_a_replica_is_told_where_it_is_announced_and_its_ports_and_nothing_else() -> None:
    plan = spec(**PORTS, redis_url="redis://elsewhere", redis_key_prefix="ours:")
    config = plan.config
    for role, whole in (
        ("coordinator", config.coordinator), ("target", config.target), ("draft", config.draft)
    ):  # fmt: skip
        told = plan.replica_config(cast(Role, role), "x-7", 1)
        member = told.membership
        assert member is not None
        assert (member.deployment, member.name, member.slot) == ("d", "x-7", 1)
        assert member.redis == plan.config.coordinator.redis
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
        ({}, False), ({"telemetry": "otlp=http://h:1"}, False),
        ({"telemetry": "prometheus=0"}, False),
        ({"telemetry": "prometheus=9464"}, True),
    ):  # fmt: skip
        plan, elsewhere = spec(**settings), spec(local=False, **settings)
        assert [plan.replaced_in_place(role) for role in ROLES] == [in_place, False, False]
        assert [plan.keeps_ports(role) for role in ROLES] == [True, False, False]
        assert not any(map(elsewhere.keeps_ports, ROLES))
        assert not any(map(elsewhere.replaced_in_place, ROLES))
        for found in (plan, elsewhere):
            told: Any = found.replica_config("coordinator", "coordinator-9", 0)
            assert (told.shares_ports, told.takes_over_ports) == (found.local, False)
            told = found.replica_config("coordinator", "coordinator-9", 0, takes_over=True)
            assert told.takes_over_ports is found.local


def test_counts_are_held_within_what_is_possible() -> None:
    """At first there are as many as the configuration says. Nothing can be done without a target
    and a coordinator; without a draft it can, and where there is no model for one it is."""
    plan = spec(num_coordinators=2, num_targets=3, num_drafts=4)
    most = dict.fromkeys(ROLES, REPLICAS_MAX)
    assert plan.counts == {"coordinator": 2, "target": 3, "draft": 4}
    assert plan.bounded(dict.fromkeys(ROLES, -1)) == {"coordinator": 1, "target": 1, "draft": 0}
    assert plan.bounded(dict.fromkeys(ROLES, REPLICAS_MAX + 1)) == plan.bounded(most) == most
    for drafter in ("medusa:heads", "hybrid:suffix,early-exit:exit", "ngram"):
        plan = spec(engine="transformers", model="m", draft_model=drafter, num_drafts=2)
        assert plan.counts == {"coordinator": 1, "target": 1, "draft": 0}
        assert plan.bounded(dict.fromkeys(ROLES, 2)) == {"coordinator": 2, "target": 2, "draft": 0}


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


def plan(config: DeploymentConfig, amounts: dict[str, float]) -> FleetSpec:
    return plan_fleet(config, config, amounts, local=False)


def _shares(gpus: float, **settings: object) -> tuple[tuple[float, str], tuple[float, str]]:
    spec = plan(load_config(settings, {}), {"CPU": 8.0, "GPU": gpus})
    config, demands = spec.config, spec.demands
    return (
        (demands["target"].num_gpus, config.target.device),
        (demands["draft"].num_gpus if "draft" in demands else 0, config.draft.device),
    )


@pytest.mark.parametrize(
    ("gpus", "settings", "target", "draft"),
    [
        (0, "small", 0, 0),
        (1, "", 1, 0),
        (1, "small", 0.5, 0.5),
        (1, "hybrid:suffix,quantized:8", 0.5, 0.5),
        (2, "small device=cpu", 0, 0),
        (2, "small draft_num_gpus=0", 1, 0),
        (4, "small tensor_parallel_size=2 draft_tensor_parallel_size=2", 1, 1),
        (3, " tensor_parallel_size=4", 0.5, 0),
        (4, "small engine=emulated:", 0, 0),
        # Every replica of a model counts, with each of its ranks; those of a look-up do not.
        (4, "small num_targets=3", 1, 1),
        (4, "small num_drafts=0 num_targets=4", 1, 1),
        (3, " num_targets=2 tensor_parallel_size=4", 1 / 3, 0),
        (2, "medusa:heads num_targets=2 num_drafts=8", 1, 0),
    ],
)
def test_gpus_are_shared_out(gpus: float, settings: str, target: float, draft: float) -> None:
    """What the configuration states wins; else models share what there is."""
    drafter, *more = settings.split(" ")
    given: dict[str, object] = dict(one.split("=", 1) for one in more)
    given |= {"draft_model": drafter} if drafter else {}
    found = _shares(gpus, model="small", **given)
    assert found == tuple((share, "cuda" if share else "cpu") for share in (target, draft))


def test_a_device_and_a_share_that_are_stated_are_taken() -> None:
    shares = _shares(1, model="small", target_num_gpus="0.75", device="cuda:0")
    assert shares == ((0.75, "cuda:0"), (0, "cpu"))


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        (0, {}, False),
        (0, {"target_num_threads": 6, "draft_num_threads": 2}, True),
        (0, {"target_num_threads": 7, "draft_num_threads": 2}, False),
        (1, {}, False),
        (1, {"draft_num_gpus": "0"}, True),
        (2, {}, True),
        (0, {"engine": "emulated:"}, True),
        (0, {"target_num_threads": 3, "draft_num_threads": 3, "num_targets": 2}, False),
        (0, {"target_num_threads": 6, "draft_num_threads": 1, "num_drafts": 3}, False),
        (2, {"num_targets": 2, "num_drafts": 2}, False),
        # A look-up takes a core of each coordinator.
        (0, {"draft_model": "suffix"}, False),
        (0, {"draft_model": "suffix", "target_num_threads": 8}, False),
        (0, {"draft_model": "suffix", "target_num_threads": 6, "num_coordinators": 2}, True),
        (0, {"draft_model": "suffix", "target_num_threads": 6, "num_coordinators": 3}, False),
    ],
)
def test_models_are_apart_where_neither_waits_for_the_other(
    gpus: float, settings: dict[str, object], expected: bool
) -> None:
    """A device, a node or cores of their own."""
    config = load_config({"draft_model": "small", **settings}, {})
    placed = plan(config, {"CPU": 8.0, "GPU": gpus}).config
    assert are_apart(placed, same_node=True, num_cores=8) is expected
    assert are_apart(placed, same_node=False, num_cores=8)


@pytest.mark.parametrize(
    ("settings", "apart", "expected"),
    [
        ({}, True, LOOK_AHEAD_DEFAULT),
        ({}, False, 0),
        ({"look_ahead": 5}, False, 5),
        ({"look_ahead": 0}, True, 0),
        ({"draft_model": "suffix"}, True, 0),
        ({"draft_model": "eagle:head"}, True, 0),
    ],
)
def test_a_draft_looks_ahead_where_it_takes_nothing_from_the_target(
    settings: dict[str, object], apart: bool, expected: int
) -> None:
    gpus = 2.0 if apart else 0.0
    placed = plan(load_config({"draft_model": "small", **settings}, {}), {"GPU": gpus})
    for _ in range(2):
        placed = placed.settled([("target", "a"), ("draft", "a")])
        assert placed.config.coordinator.look_ahead == expected
        assert placed.config.coordinator.drafting_delays is not apart


def test_trees_are_refused_where_logits_must_not_depend_on_them() -> None:
    with pytest.raises(SettingError, match=r"^draft_siblings: .*deterministic"):
        load_config({"deterministic": True, "draft_siblings": 1}, {})


def test_a_device_that_nobody_gets_is_refused() -> None:
    """Instead of a model that silently runs elsewhere."""
    with pytest.raises(ConfigError, match="cuda needs a GPU, but the target gets none"):
        _shares(0, device="cuda")
    with pytest.raises(ConfigError, match="draft gets none"):
        _shares(1, device="cuda", draft_model="small", draft_num_gpus=0)
    with pytest.raises(ConfigError, match="target_num_gpus"):
        _shares(1, device="cpu", target_num_gpus=1)


def test_demands_beyond_a_cluster_are_those_that_do_not_fit_beside_the_others() -> None:
    small, large, gpu = Demand("a", 0.5, 0.0), Demand("b", 8.0, 0.0), Demand("c", 0.5, 1.0)
    assert beyond([small, large, gpu], {"CPU": 2.0}) == [large, gpu]
    assert beyond([small, small, small], {"CPU": 1.0}) == [small]
    assert not beyond([small, gpu], {"CPU": 1.0, "GPU": 1.0})


def test_each_rank_of_a_model_asks_for_as_much() -> None:
    """Target and draft have ranks of their own, and a fraction of a GPU is a fraction for each."""
    settings = {
        "tensor_parallel_size": 3, "target_num_cpus": 2, "target_num_gpus": 0.25,
        "draft_model": "small", "draft_tensor_parallel_size": 2, "draft_num_gpus": 0.5,
    }  # fmt: skip
    demands = plan(load_config(settings, {}), {"CPU": 8.0, "GPU": 4.0}).demands
    assert str(demands["target"]) == "3 times 2 CPUs and 0.25 GPUs"
    both = [demands["target"], demands["draft"]]
    assert not beyond(both, {"CPU": 6.5, "GPU": 1.75})
    assert beyond(both, {"CPU": 6.5, "GPU": 1.5}) == [demands["draft"]]
    assert beyond(both, {"CPU": 5.5, "GPU": 2.0}) == [demands["target"]]


def test_ranks_stand_on_one_machine_where_one_is_large_enough() -> None:
    """Else on as few as Ray finds."""
    ranks = Demand("target", 1.0, 1.0, 4)
    small, large = {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 4.0}
    assert strategy(ranks, [small, large]) == "STRICT_PACK"
    assert strategy(ranks, [small, small]) == "PACK"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"engine": "emulated:", "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"draft_model": "ngram", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ],
)
def test_what_runs_no_model_has_no_ranks(settings: dict[str, object], key: str) -> None:
    """An emulated engine and prompt lookup."""
    with pytest.raises(SettingError, match="no model runs") as caught:
        _shares(4, **settings)
    assert caught.value.key == key


def test_what_else_a_role_asks_for_says_where_it_may_be_placed() -> None:
    """Resources that Ray knows by name, for each rank, beside CPUs and GPUs."""
    settings = {
        "target_resources": "rack=1, disk=0.5", "draft_resources": "small=2,",
        "coordinator_resources": "edge=1", "target_num_cpus": 1.5, "draft_num_cpus": 0,
        "tensor_parallel_size": 2, "model": "m", "draft_model": "small",
    }  # fmt: skip
    demands = plan(load_config(settings, {}), {"CPU": 8.0}).demands
    assert demands["target"].each == {"CPU": 1.5, "rack": 1.0, "disk": 0.5}
    assert str(demands["target"]) == "2 times 1.5 CPUs and 0 GPUs and 1 rack and 0.5 disk"
    assert demands["draft"].each == {"small": 2.0}
    assert demands["coordinator"].resources == {"edge": 1.0}
    both = [demands["target"], demands["draft"]]
    assert not beyond(both, {"CPU": 4.0, "rack": 2.0, "disk": 1.0, "small": 2.0})
    assert beyond(both, {"CPU": 4.0, "rack": 1.0, "disk": 1.0, "small": 2.0}) == both[:1]
    assert beyond(both, {"CPU": 4.0, "rack": 2.0, "disk": 1.0}) == both[1:]


@pytest.mark.parametrize(
    "text",
    ["rack", "=1", "rack=0", "rack=nan", "rack=inf", "rack=1,rack=2", "GPU=1", "rack=1;disk=1"],
)  # fmt: skip
def test_resources_that_are_none_are_refused_by_name(text: str) -> None:
    for key in ("target_resources", "draft_resources", "coordinator_resources"):
        with pytest.raises(SettingError, match="it must be NAME=AMOUNT") as caught:
            plan(load_config({key: text}, {}), {"CPU": 8.0})
        assert caught.value.key == key
        assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "num_threads"),
    [
        ({"num_targets": 3}, 2),
        ({"num_targets": 9}, 1),
        ({"num_targets": 1}, 0),
        ({"num_targets": 3, "target_num_threads": 5}, 5),
        ({"num_targets": 3, "engine": "emulated:"}, 0),
        ({"num_targets": 1, "num_drafts": 3}, 0),
    ],
)
def test_targets_of_one_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], num_threads: int
) -> None:
    """Equally, unless the configuration says how many threads each has (0 = all cores)."""
    monkeypatch.setattr("deploy.fleet.spec.available_cores", lambda: 8)
    config = load_config(settings, {})
    for local, expected in ((True, num_threads), (False, config.target.num_threads)):
        found = plan_fleet(config, config, {}, local=local).config
        assert found.target.num_threads == expected
        assert found.draft.num_threads == config.draft.num_threads
