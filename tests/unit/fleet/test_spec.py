"""Settings, resources and numbers of the replicas of a deployment."""

from typing import Any

import pytest

from outrider.config.deployment import load_config
from outrider.errors import ConfigError, SettingError
from outrider.fleet.ray_cluster import Demand, beyond, strategy
from outrider.fleet.spec import FleetSpec, are_apart, plan_fleet
from outrider.limits import LOOK_AHEAD_DEFAULT, REPLICAS_MAX
from outrider.registry.registry import ROLES, Role

PORTS = {"grpc_port": 5000, "port": 8000, "target_port": 6000, "draft_port": 7000}


def spec(*, local: bool = True, **settings: Any) -> FleetSpec:
    config = load_config({"engine": "emulated:", "draft_model": "emulated"} | settings, {})
    return plan_fleet(config, config, 0.0, "d", local=local)


def replica(plan: FleetSpec, role: Role, index: int, **others: Any) -> Any:
    return plan.replica_config(role, plan.member(role, f"{role}-9", index), **others)


def port(plan: FleetSpec, role: Role, index: int) -> int:
    config = replica(plan, role, index)
    return int(config.grpc_port if role == "coordinator" else config.port)


def test_replicas_of_one_machine_count_up_from_the_first_ones_port() -> None:
    """On a cluster, each replica has the ports that are set, on its own machine."""
    plan, elsewhere = spec(**PORTS), spec(local=False, **PORTS)
    open_ports = spec(grpc_port=0, target_port=0, draft_port=0)
    assert [port(plan, role, 3) for role in ROLES] == [5003, 6003, 7003]
    assert [port(elsewhere, role, 3) for role in ROLES] == [5000, 6000, 7000]
    assert [port(open_ports, role, 3) for role in ROLES] == [0, 0, 0]
    assert replica(plan, "coordinator", 3).port == 8003
    assert replica(spec(health_port=9000), "coordinator", 3).health_port == 9003
    assert replica(plan, "coordinator", 3).health_port is None
    with pytest.raises(SettingError, match="port: 65536 is wrong"):
        replica(spec(port=65535), "coordinator", 1)


@pytest.mark.parametrize(
    ("telemetry", "in_place"),
    [("otlp=http://h:1", False), ("prometheus=0", False), ("prometheus=9464", True)],
)
def test_coordinators_of_one_machine_share_ports_with_those_that_they_replace(
    telemetry: str, in_place: bool
) -> None:
    """With a port for metrics, one coordinator ends before the other starts."""
    plan, elsewhere = spec(telemetry=telemetry), spec(local=False, telemetry=telemetry)
    assert [plan.replaced_in_place(role) for role in ROLES] == [in_place, False, False]
    assert not any(map(elsewhere.replaced_in_place, ROLES))
    for found in (plan, elsewhere):
        for takes_over in (False, True):
            told = replica(found, "coordinator", 0, takes_over=takes_over)
            assert told.shares_ports is found.local
            assert told.takes_over_ports is (found.local and takes_over)


def test_counts_are_held_within_what_is_possible() -> None:
    plan = spec(num_coordinators=2, num_targets=3, num_drafts=4)
    most = dict.fromkeys(ROLES, REPLICAS_MAX)
    assert plan.counts == {"coordinator": 2, "target": 3, "draft": 4}
    assert plan.bounded(dict.fromkeys(ROLES, -1)) == {"coordinator": 1, "target": 1, "draft": 0}
    assert plan.bounded(dict.fromkeys(ROLES, REPLICAS_MAX + 1)) == most
    plan = spec(engine="transformers", model="m", draft_model="eagle3:heads", num_drafts=2)
    assert plan.counts == {"coordinator": 1, "target": 1, "draft": 0}
    assert plan.bounded(dict.fromkeys(ROLES, 2)) == {"coordinator": 2, "target": 2, "draft": 0}


@pytest.mark.parametrize(
    ("drafter", "role", "count", "said"),
    [
        ("emulated", "target", 0, "target=0: it must be 1 to 1024"),
        ("emulated", "coordinator", 1025, "coordinator=1025: it must be 1 to 1024"),
        ("eagle3:heads", "draft", 1, "draft=1: with draft_model eagle3:heads, the target drafts"),
        ("suffix", "draft", 2, "draft=2: with draft_model suffix, the coordinators draft"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_role(
    drafter: str, role: Role, count: int, said: str
) -> None:
    engine = "transformers" if drafter == "eagle3:heads" else "emulated:"
    with pytest.raises(ConfigError, match=said):
        spec(draft_model=drafter, engine=engine).check_count(role, count)


def test_a_refused_number_of_drafts_says_where_a_look_up_drafts() -> None:
    found = spec(draft_model="suffix", engine="emulated:", lookup_on="target")
    with pytest.raises(ConfigError, match="with draft_model suffix, the target drafts"):
        found.check_count("draft", 1)


def plan(gpus: float, **settings: object) -> FleetSpec:
    """The plan for a cluster with `gpus` GPUs."""
    config = load_config({"draft_model": "small"} | settings, {})
    return plan_fleet(config, config, gpus, local=False)


@pytest.mark.parametrize(
    ("gpus", "settings", "target", "draft"),
    [
        (0, "small", 0, 0),
        (1, "", 1, 0),
        (1, "hybrid:suffix,small", 0.5, 0.5),
        (2, "small device=cpu", 0, 0),
        (2, "small draft_num_gpus=0", 1, 0),
        (1, "small target_num_gpus=0.75", 0.75, 0.5),
        (4, "small tensor_parallel_size=2 draft_tensor_parallel_size=2", 1, 1),
        (3, " tensor_parallel_size=4", 0.5, 0),
        (4, "small engine=emulated:", 0, 0),
        # Every replica of a model counts, with each of its ranks; those of a look-up do not.
        (4, "small num_targets=3", 1, 1),
        (3, " num_targets=2 tensor_parallel_size=4", 1 / 3, 0),
        (2, "eagle3:heads num_targets=2 num_drafts=8", 1, 0),
    ],
)
def test_gpus_are_shared_out(gpus: float, settings: str, target: float, draft: float) -> None:
    drafter, *more = settings.split(" ")
    given = dict(one.split("=", 1) for one in more)
    found = plan(gpus, model="small", draft_model=drafter or "suffix", **given)
    for role, share in (("target", target), ("draft", draft)):
        demand = found.demands.get(role)
        assert (demand.num_gpus if demand else 0) == share
        assert getattr(found.config, role).device == ("cuda" if share else "cpu")


def test_coordinators_are_replaced_where_what_drafts_is_of_another_kind() -> None:
    """Coordinators learn how drafting works from the first replicas that they find."""

    def of(one: str, **settings: Any) -> object:
        return spec(engine="transformers", draft_model=one, **settings).plans["coordinator"]

    a, b = ([of(one), of(f"eagle3:{one}"), of(f"eagle3:{one}", eagle3_on="draft")] for one in "ab")
    assert a == b
    assert len({*a, of("suffix")}) == 4


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
        (2, {"num_targets": 2, "num_drafts": 2}, False),
        # A look-up takes a core of each coordinator.
        (0, {"draft_model": "suffix", "target_num_threads": 6, "num_coordinators": 2}, True),
        (0, {"draft_model": "suffix", "target_num_threads": 6, "num_coordinators": 3}, False),
    ],
)
def test_models_are_apart_where_neither_waits_for_the_other(
    gpus: float, settings: dict[str, object], expected: bool
) -> None:
    placed = plan(gpus, **settings).config
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
        ({"draft_model": "eagle3:head", "eagle3_on": "draft"}, True, 0),
    ],
)
def test_a_draft_looks_ahead_where_it_takes_nothing_from_the_target(
    settings: dict[str, object], apart: bool, expected: int
) -> None:
    placed = plan(2.0 if apart else 0.0, **settings)
    for _ in range(2):
        placed = placed.settled([("target", "a"), ("draft", "a")])
        assert placed.config.coordinator.look_ahead == expected
        assert placed.config.coordinator.drafting_delays is not apart


def test_ranks_ask_for_as_much_each_beside_other_roles() -> None:
    settings = {
        "tensor_parallel_size": 2,
        "target_num_cpus": 1.5,
        "target_num_gpus": 0.25,
        "target_resources": "rack=1, disk=0.5",
        "draft_num_cpus": 0,
        "draft_num_gpus": 0.5,
        "draft_resources": "small=2,",
    }
    demands = plan(4.0, **settings).demands
    assert str(demands["target"]) == "2 times 1.5 CPUs and 0.25 GPUs and 1 rack and 0.5 disk"
    assert demands["draft"].each == {"GPU": 0.5, "small": 2.0}
    both = [demands["target"], demands["draft"]]
    enough = {"CPU": 3.0, "GPU": 1.0, "rack": 2.0, "disk": 1.0, "small": 2.0}
    assert not beyond(both, enough)
    assert beyond(both, enough | {"rack": 1.0}) == both[:1]
    assert beyond(both, enough | {"GPU": 0.75}) == both[1:]


@pytest.mark.parametrize(
    ("key", "gpus", "preloads"),
    [
        ("engine", 0, ["tcmalloc_minimal", "tcmalloc_minimal", ""]),
        ("draft_engine", 0, ["", "tcmalloc_minimal", ""]),
        ("engine", 1, ["", "", ""]),
    ],
)
def test_vllm_on_cpus_gets_another_allocator(key: str, gpus: int, preloads: list[str]) -> None:
    demands = plan(gpus, **{key: "vllm"}).demands
    assert [demands[role].preload for role in ("target", "draft", "coordinator")] == preloads


def test_ranks_stand_on_one_machine_where_one_is_large_enough() -> None:
    ranks = Demand("target", 1.0, 1.0, 4)
    small, large = {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 4.0}
    assert strategy(ranks, [small, large]) == "STRICT_PACK"
    assert strategy(ranks, [small, small]) == "PACK"


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [
        ({"device": "cuda"}, 0, "device: cuda needs a GPU, but the target gets none"),
        ({"device": "cuda", "draft_model": "m", "draft_num_gpus": 0}, 1, "the draft gets none"),
        ({"device": "cpu", "target_num_gpus": 1}, 1, "target_num_gpus: 1 cannot go with"),
        ({"engine": "emulated:", "tensor_parallel_size": 2}, 4, "^tensor_.*: 2 given, but there"),
        ({"draft_tensor_parallel_size": 2, "draft_model": "ngram"}, 4, "^draft_tensor_.*no model"),
        ({"target_resources": "rack"}, 0, "target_resources: 'rack' is wrong; it must be NAME="),
        ({"draft_resources": "rack=nan"}, 0, "draft_resources: 'rack=nan' is wrong"),
        ({"coordinator_resources": "GPU=1"}, 0, "coordinator_resources: 'GPU=1' is wrong"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_its_setting(
    settings: dict[str, object], gpus: float, said: str
) -> None:
    with pytest.raises(SettingError, match=said):
        plan(gpus, **settings)


@pytest.mark.parametrize(
    ("settings", "num_threads"),
    [
        ({"num_targets": 3}, 2),
        ({"num_targets": 9}, 1),
        ({"num_targets": 1}, 0),
        ({"num_targets": 3, "target_num_threads": 5}, 5),
        ({"num_targets": 3, "engine": "emulated:"}, 0),
    ],
)
def test_targets_of_one_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], num_threads: int
) -> None:
    monkeypatch.setattr("outrider.fleet.spec.available_cores", lambda: 8)
    config = load_config(settings, {})
    for local, expected in ((True, num_threads), (False, config.target.num_threads)):
        assert plan_fleet(config, config, 0.0, local=local).config.target.num_threads == expected
