"""What a reconciler keeps, and for how long, without Ray."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fleet_world import World
from kept_in_memory import KeptInMemory

from deploy import reconciler as module
from deploy.fleet import Fleet
from deploy.reconciler import Reconciler
from outrider.errors import SettingError, Unavailable
from outrider.fleet.registry import MemoryRegistry


async def test_what_an_earlier_deployment_kept_is_gone_before_anything_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray may restart it while it places. In the end nothing is kept."""
    kept = KeptInMemory()
    kept.texts |= {"changes": "of an earlier one", "policy": "of an earlier one"}
    seen: list[dict[Any, str]] = []

    async def place(self: Fleet) -> None:
        seen.append(dict(kept.texts))

    monkeypatch.setattr(
        ray, "get_runtime_context",
        lambda: SimpleNamespace(was_current_actor_reconstructed=False),
    )  # fmt: skip
    monkeypatch.setattr(module, "log_to", lambda *_: None)
    monkeypatch.setattr(module, "KeptByRay", lambda namespace: kept)
    monkeypatch.setattr(module, "RedisRegistry", lambda *_: MemoryRegistry())
    monkeypatch.setattr(Fleet, "place", place)
    for failure in (None, Unavailable("the Ray head does not answer")):
        found = Reconciler(World().blueprint, "outrider-d")
        await found.place()
        [texts] = seen
        assert texts == {"changes": "", "policy": found._autoscaling.policy.to_json()}
        kept.failure = failure
        await found.close()
        assert kept.texts["policy"] == ("" if failure is None else texts["policy"])
        assert kept.texts["changes"] == ""
        seen.clear()


async def test_a_machine_without_the_password_of_redis_is_told_by_a_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the constructor would come as Ray's text of a traceback."""
    monkeypatch.delenv("OUTRIDER_REDIS_PASSWORD", raising=False)
    monkeypatch.setattr(
        ray, "get_runtime_context",
        lambda: SimpleNamespace(was_current_actor_reconstructed=False),
    )  # fmt: skip
    monkeypatch.setattr(module, "log_to", lambda *_: None)
    blueprint = World(redis_url="redis://h:1").blueprint
    config = blueprint.placement.config
    asking = replace(config.coordinator.redis, asks_for_password=True)
    config = replace(config, coordinator=config.coordinator.reaching(asking))
    blueprint = replace(blueprint, placement=replace(blueprint.placement, config=config))
    found = Reconciler(blueprint, "outrider-d")
    with pytest.raises(SettingError, match="redis_password: is not known on"):
        await found.place()
