"""What `outrider autoscale` tells a deployment, and what comes of it in there."""

from __future__ import annotations

from typing import Any

import pytest
from asked_here import deployed_here
from fleet_world import SavedInMemory

from deploy.cli.main import main
from deploy.cli.scale import parsed_bounds
from deploy.fleet.autoscaling import Autoscaling
from outrider.config import AutoscalePolicy as Policy
from outrider.config import load_config
from outrider.errors import ConfigError, StoreUnavailable, Unavailable
from outrider.registry.registry import Figures, MemoryRegistry, ReplicaRecord


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Autoscaling:
    """Of a deployment that runs."""
    made = Autoscaling(SavedInMemory(), MemoryRegistry(lambda: 0.0), Policy(calm_s=7.0))
    deployed_here(monkeypatch, {"bound": made.bound})
    return made


def test_bounds_are_told_role_by_role(
    scaling: Autoscaling, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autoscale", "target=1:4", "draft=0:2"]) == 0
    assert capsys.readouterr().out == "coordinator: off\ntarget: 1 to 4\ndraft: 0 to 2\n"
    assert main(["autoscale", "draft=off", "--json"]) == 0
    assert scaling.policy == Policy(bounds={"target": (1, 4)}, calm_s=7.0)
    assert Policy.from_json(capsys.readouterr().out) == scaling.policy
    assert main(["autoscale"]) == 0
    assert capsys.readouterr().out == "coordinator: off\ntarget: 1 to 4\ndraft: off\n"


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
    registry = MemoryRegistry()
    scaling = Autoscaling(SavedInMemory(), registry, Policy())
    await registry.want({"target": 1, "draft": 1, "coordinator": 1})
    busy: Any = {"role": "target", "name": "t", "address": "h:1", "host": "h", "pid": 1}
    await registry.announce(ReplicaRecord(**busy, figures=Figures(queue_steps=3.0)))
    await scaling.look()
    assert (await registry.wanted())["target"] == 1
    await scaling.bound({"target": (1, 4)})
    await scaling.look()
    assert (await registry.wanted())["target"] == 2
    registry.failure = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await scaling.look()


async def test_bounds_hold_also_for_a_reconciler_that_returns() -> None:
    """Thresholds are settings, and bounds are not. What cannot be kept does not hold."""
    kept, registry = SavedInMemory(), MemoryRegistry()
    scaling = Autoscaling(kept, registry, Policy())
    await scaling.begin()
    await scaling.bound({"target": (1, 4)})
    scaling.use(Policy(bounds={"draft": (1, 2)}, calm_s=5.0))
    assert scaling.policy == Policy(bounds={"target": (1, 4)}, calm_s=5.0)
    kept.failure = Unavailable("away")
    with pytest.raises(Unavailable):
        await scaling.bound({"target": None})
    kept.failure = None
    again = Autoscaling(kept, registry, Policy(calm_s=6.0))
    await again.restore()
    assert again.policy == Policy(bounds={"target": (1, 4)}, calm_s=6.0)
    await again.begin()
    third = Autoscaling(kept, registry, Policy(bounds={"draft": (1, 2)}))
    await third.begin()
    await third.restore()
    assert third.policy.bounds == {"draft": (1, 2)}
