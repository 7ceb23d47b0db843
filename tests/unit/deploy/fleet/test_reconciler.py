"""What a reconciler keeps, and for how long, without Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fleet_world import SavedInMemory, World, play

from deploy.fleet import reconciler as module
from deploy.fleet.reconciler import Reconciler
from deploy.fleet.replica_set import Fleet
from outrider.clock import run_virtually
from outrider.errors import SettingError, Unavailable
from outrider.registry.registry import MemoryRegistry


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ray, "get_runtime_context",
        lambda: SimpleNamespace(was_current_actor_reconstructed=False),
    )  # fmt: skip
    monkeypatch.setattr(module, "log_to", lambda *_: None)


async def test_what_an_earlier_deployment_kept_is_gone_before_anything_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray may restart it while it places. In the end nothing is kept."""
    kept = SavedInMemory()
    kept.texts |= {"changes": "of an earlier one", "policy": "of an earlier one"}
    seen: list[dict[Any, str]] = []

    async def place(self: Fleet) -> None:
        seen.append(dict(kept.texts))

    monkeypatch.setattr(module, "RaySavedState", lambda namespace: kept)
    monkeypatch.setattr(module, "RedisRegistry", lambda *_: MemoryRegistry())
    monkeypatch.setattr(Fleet, "place", place)
    for failure in (None, Unavailable("the Ray head does not answer")):
        found = Reconciler(World().spec, "outrider-d")
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
    spec = World(redis_url="redis://h:1").spec
    config = spec.config
    asking = replace(config.coordinator.redis, asks_for_password=True)
    config = replace(config, coordinator=config.coordinator.reaching(asking))
    spec = replace(spec, config=config)
    found = Reconciler(spec, "outrider-d")
    with pytest.raises(SettingError, match="redis_password: is not known on"):
        await found.place()


def reconciler_of(world: World, monkeypatch: pytest.MonkeyPatch) -> Reconciler:
    monkeypatch.setattr(module, "Cluster", lambda *_, **__: world.machines)
    monkeypatch.setattr(module, "RaySavedState", lambda namespace: SavedInMemory())
    monkeypatch.setattr(module, "RedisRegistry", lambda *_: world.registry)
    return Reconciler(world.spec, "outrider-d")


def test_an_upgrade_is_over_once_the_fleet_was_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `scale` starts later, or what comes for a replica that has died, is none of it."""

    async def main() -> None:
        world = World()
        found = reconciler_of(world, monkeypatch)
        await found.place()
        await found.begin("target", "draft", "coordinator")
        await found.keep()
        await asyncio.sleep(1)
        found._use(world._plan(max_num_seqs=5))
        world.machines.loading.clear()
        for replaced in (False, True):
            overview = await found.overview("")
            assert (overview.upgrades, overview.num_stale > 0) == (not replaced, not replaced)
            world.machines.loading.set()
            await asyncio.sleep(60)
        world.machines.loading.clear()
        await found.want({"target": 2})
        await asyncio.sleep(60)
        overview = await found.overview("")
        assert (overview.is_whole, overview.num_stale) == (False, 0)
        world.machines.loading.set()
        await found.close()

    run_virtually(main())


def test_a_reconciler_that_returns_calls_no_upgrade_over_before_it_has_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = SimpleNamespace(was_current_actor_reconstructed=True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    async def scene(world: World) -> None:
        await world.die()
        found = reconciler_of(world, monkeypatch)
        overview = await found.overview("")
        assert (overview.adopted, overview.num_stale > 0) == (False, True)
        await asyncio.sleep(1)
        overview = await found.overview("")
        assert (overview.adopted, overview.is_whole, overview.num_stale) == (True, True, 0)
        await found.close()

    play(scene)
