"""A deployment whose process was killed while it stopped everything is not taken over."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import ray
from fleet_world import SavedInMemory

from deploy.fleet import launcher
from deploy.fleet.launcher import Deployment
from deploy.fleet.reconciler import Reconciler
from deploy.fleet.spec import plan_fleet
from outrider.config import DeploymentConfig, load_config
from outrider.errors import ConfigError
from outrider.replica.process_setup import log_at


@pytest.fixture
def config() -> DeploymentConfig:
    return load_config(
        {
            "engine": "emulated:vocab_size=10", "draft_model": "emulated", "deployment_name": "d",
            "address": "elsewhere", "redis_url": "redis://127.0.0.1:1/0",
        },
        {},
    )  # fmt: skip


class Told:
    """A reconciler elsewhere."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.calls: list[str] = []

    async def call(self, method: str, *_: object, timeout_s: float | None = None) -> object:
        self.calls.append(method)
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def kill(self) -> None:
        self.calls.append("kill")


@pytest.mark.asyncio
async def test_what_is_being_stopped_has_its_end_and_another_one_begins(
    config: DeploymentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reconciler has no replicas any more, and would never have any again."""
    old, new = Told(ends=True), Told(place=ConfigError("it has begun"))
    deployment = Deployment(config, tmp_path)
    monkeypatch.setattr(deployment, "_prepare", AsyncMock(return_value=config))
    monkeypatch.setattr(launcher, "resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(launcher, "find_reconciler", AsyncMock(return_value=old))
    monkeypatch.setattr(launcher, "start_reconciler", lambda *_: new)
    monkeypatch.setattr(launcher, "Cluster", Mock(return_value=AsyncMock()))
    with pytest.raises(ConfigError, match="it has begun"):
        await deployment.start()
    assert old.calls == ["ends", "close", "kill"]
    assert new.calls == ["place", "close", "kill"]


@pytest.mark.asyncio
async def test_a_reconciler_logs_at_the_level_of_its_plan(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once that is another one."""
    is_first = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: is_first)
    monkeypatch.setattr("deploy.fleet.reconciler.RaySavedState", lambda namespace: SavedInMemory())
    quiet = replace(config, coordinator=replace(config.coordinator, log_level="warning"))
    plans = [
        plan_fleet(one, one, {}, "d", local=False)
        for one in (quiet, config)
    ]  # fmt: skip
    logger = logging.getLogger("deploy")
    before = logger.level
    try:
        reconciler = Reconciler(plans[0], "namespace")
        assert logger.level == logging.WARNING
        reconciler._use(plans[1])
        assert logger.level == logging.INFO
        await reconciler.close()
    finally:
        log_at(logging.getLevelName(before))


@pytest.mark.asyncio
async def test_a_reconciler_that_was_told_to_close_says_so_and_closes_once(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where whoever told it so has gone."""
    is_first = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: is_first)
    monkeypatch.setattr("deploy.fleet.reconciler.RaySavedState", lambda namespace: SavedInMemory())
    plan = plan_fleet(config, config, {}, "d", local=False)
    reconciler = Reconciler(plan, "namespace")
    assert not await reconciler.ends()
    may_end = asyncio.Event()
    closing = AsyncMock(side_effect=may_end.wait)
    monkeypatch.setattr(reconciler._fleet, "close", closing)
    gone = asyncio.create_task(reconciler.close())
    await asyncio.sleep(0.01)
    gone.cancel()
    assert await reconciler.ends()
    may_end.set()
    await reconciler.close()
    closing.assert_awaited_once()
