"""What `outrider autoscale` tells a deployment, and what comes of it in there."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from deploy.autoscaling import Autoscaling
from deploy.cli.autoscale import parsed_bounds
from deploy.cli.main import main
from deploy.state import DeploymentRecord, process_start, publish, state_directory
from outrider.config import load_config
from outrider.errors import ConfigError, StoreUnavailable
from outrider.fleet.autoscaling import Policy
from outrider.fleet.figures import Figures
from outrider.fleet.registry import MemoryRegistry, ReplicaRecord


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    """Of a deployment that runs."""
    made = MemoryRegistry(lambda: 0.0)
    monkeypatch.setattr("outrider.fleet.redis_registry.RedisRegistry", lambda *_: made)
    record = DeploymentRecord(
        pid=os.getpid(), process_start=process_start(os.getpid()) or 0, started_at="", model="m",
        draft_model="ngram", served_model_name="m", grpc_address="h:1", target_addresses=["h:2"],
        draft_addresses=[], target_directory="", tokenizer_directory="", deployment="d",
        redis_url="unix:///own.sock", settings={"redis_key_prefix": "ours:"},
    )  # fmt: skip
    publish(state_directory(os.environ), record)
    return made


async def told(registry: MemoryRegistry) -> dict[str, tuple[int, int]]:
    return dict(Policy.from_json(await registry.noted("policy")).bounds)


def test_bounds_are_told_role_by_role(
    registry: MemoryRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    registry._notes["policy"] = Policy(calm_s=7.0).to_json()
    assert main(["autoscale", "target=1:4", "draft=0:2"]) == 0
    assert capsys.readouterr().out == "coordinator: off\ntarget: 1 to 4\ndraft: 0 to 2\n"
    assert main(["autoscale", "draft=off", "--json"]) == 0
    kept = Policy.from_json(registry._notes["policy"])
    assert (kept.bounds, kept.calm_s) == ({"target": (1, 4)}, 7.0)
    assert Policy.from_json(capsys.readouterr().out) == kept
    assert main(["autoscale"]) == 0
    assert Policy.from_json(registry._notes["policy"]) == kept


def test_a_redis_that_does_not_know_the_deployment_is_not_told(
    registry: MemoryRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autoscale", "target=1:4"]) == 1
    assert "this Redis knows nothing of the deployment" in capsys.readouterr().err
    assert registry._notes == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["target=0:2"], "target=0:2: it must be within 1:1024, or off"),
        (["draft=2"], "draft=2: it must be LEAST:MOST, the lesser first, or off"),
        (["draft=3:2"], "it must be LEAST:MOST"),
        (["nobody=1:2"], "it must be ROLE=LEAST:MOST, and ROLE coordinator, target or draft"),
        (["draft=1:2", "draft=off"], "draft is given twice"),
    ],
)
def test_wrong_bounds_are_named(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed_bounds(words)
    assert said in str(caught.value)


def test_settings_are_the_policy_at_first() -> None:
    config = load_config({"autoscale_targets": "2:5", "autoscale_calm_s": 9}, {})
    assert config.autoscale.policy == Policy(bounds={"target": (2, 5)}, calm_s=9.0)
    with pytest.raises(ConfigError, match=r"autoscale_drafts.*it must be LEAST:MOST"):
        load_config({"autoscale_drafts": "many"}, {})


async def test_what_is_wanted_follows_what_replicas_say() -> None:
    """A registry that has lost the policy is told the last one that it knew."""
    registry = MemoryRegistry()
    scaling = Autoscaling(registry, Policy())
    await scaling.begin()
    await registry.want({"target": 1, "draft": 1, "coordinator": 1})
    busy: Any = {"role": "target", "name": "t", "address": "h:1", "host": "h", "pid": 1}
    await registry.announce(ReplicaRecord(**busy, figures=Figures(queue_steps=3.0)))
    await scaling.look()
    assert (await registry.wanted())["target"] == 1
    policy = Policy(bounds={"target": (1, 4)})
    await registry.note("policy", policy.to_json())
    await scaling.look()
    assert (await registry.wanted())["target"] == 2
    scaling.go_by(Policy(bounds={"draft": (1, 2)}, calm_s=5.0))
    await scaling.look()
    policy = replace(policy, calm_s=5.0)
    assert Policy.from_json(await registry.noted("policy")) == policy
    registry.forget()
    await scaling.look()
    assert Policy.from_json(await registry.noted("policy")) == policy
    registry.failure = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await scaling.look()
