"""Start, take-over and stop of a deployment. Calls of Ray are faked."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import ray

from outrider.config.deployment import load_config
from outrider.errors import SettingError, Unavailable
from outrider.fleet import launcher
from outrider.fleet import reconciler as asking
from outrider.fleet.launcher import Deployment
from outrider.fleet.ray_cluster import Cluster, RayConnection

SETTINGS = {"engine": "emulated:vocab_size=10", "draft_model": "emulated", "address": "head:1"}


class Told:
    """A fake reconciler."""

    def __init__(self, *, is_lost: bool = False, **answers: object) -> None:
        self.answers, self.is_lost = answers, is_lost
        self.calls: list[str] = []

    async def call(self, method: str, *_: object, timeout_s: float | None = None) -> object:
        self.calls.append(method)
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def kill(self) -> None:
        self.calls.append("kill")
        if self.is_lost:
            raise Unavailable("the Ray head does not answer")


@pytest.mark.parametrize("local", [True, False])
async def test_a_stop_makes_every_step_while_the_head_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """A stop raises if replicas may be left on another cluster."""
    done: list[str] = []

    def noted(name: str) -> AsyncMock:
        return AsyncMock(side_effect=lambda *_: done.append(name))

    deployment: Any = Deployment(load_config(SETTINGS, {}), tmp_path)
    deployment.ray.local = local
    deployment._is_own = True
    deployment.redis = Mock(stop=lambda: done.append("redis"))
    for module in (launcher, asking):
        monkeypatch.setattr(module, "find_reconciler", AsyncMock(return_value=Told(is_lost=True)))
    monkeypatch.setattr(Cluster, "clear", noted("clear"))
    monkeypatch.setattr(deployment.ray, "disconnect", noted("disconnect"))
    monkeypatch.setattr(deployment.ray, "head_ended", asyncio.Event().wait)
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: done.append(path.name))
    if local:
        await deployment.stop()
    else:
        with pytest.raises(Unavailable, match="does not answer"):
            await deployment.stop()
    assert done == ["clear", "disconnect", "secrets", "redis"]


async def test_a_stop_does_not_wait_for_a_local_ray_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """systemd signals all processes of a service. A call of a dead head takes 60 s."""
    deployment: Any = Deployment(load_config(SETTINGS, {}), tmp_path)
    deployment.ray.local = deployment._is_own = True
    deployment._end, disconnect = asyncio.Event().wait, AsyncMock()
    monkeypatch.setattr(deployment.ray, "disconnect", disconnect)
    with socket.create_server(("127.0.0.1", 0)) as head:
        deployment.ray.gcs_address = f"127.0.0.1:{head.getsockname()[1]}"
        stopping = asyncio.create_task(deployment.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
    async with asyncio.timeout(5):
        await stopping
    disconnect.assert_awaited_once()
    assert "they end when Ray stops: Ray has ended" in caplog.text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ray.exceptions.AuthenticationError("no token\nlong advice"), "RAY_AUTH_TOKEN_PATH"),
        (ray.exceptions.RaySystemError("broken"), "cannot start or reach Ray"),
    ],
)
async def test_a_cluster_that_is_not_joined_is_a_wrong_address(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr(ray, "init", Mock(side_effect=error))
    with pytest.raises(SettingError, match=f"address: .*{said}"):
        await RayConnection("head:1", "outrider-d").connect()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


async def test_what_is_being_stopped_has_its_end_and_another_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Unavailable("the target-0 actor did not answer start in 1 s")
    old, new = Told(ends=True), Told(start=failure)
    find = AsyncMock(return_value=old)

    def start(*_: object) -> Told:
        find.return_value = new
        return new

    config = load_config(SETTINGS | {"deployment_name": "d"}, {})
    deployment = Deployment(config, tmp_path)
    monkeypatch.setattr(deployment, "_prepare", AsyncMock(return_value=config))
    monkeypatch.setattr(launcher, "resources", lambda: {"CPU": 8.0})
    for module in (launcher, asking):
        monkeypatch.setattr(module, "find_reconciler", find)
    monkeypatch.setattr(launcher, "start_reconciler", start)
    monkeypatch.setattr(launcher, "Cluster", Mock(return_value=AsyncMock()))
    with pytest.raises(Unavailable, match="did not answer start"):
        await deployment.start()
    assert old.calls == ["ends", "close", "kill"]
    assert new.calls == ["start", "close", "kill"]


async def test_a_wrong_draft_is_found_before_the_target_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = Mock(side_effect=OSError("no such"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    models = {"model": "a/large", "draft_model": "no/where"}
    deployment: Any = Deployment(load_config(models | {"grpc_port": 0, "port": 0}, {}), tmp_path)
    with pytest.raises(SettingError, match="draft_model: model no/where: not a local directory"):
        await deployment.start()
    assert {call.args[0] for call in fetched.call_args_list} == {"no/where"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("redis_wait_replicas", 1, "needs redis_url"),  # An embedded Redis has no replicas.
        ("model", "nothere", "model nothere: not a local directory"),
        ("draft_model", "no/where", "model no/where: not a local directory"),
        ("draft_model", "hybrid:suffix,eagle3:no/where", "model no/where: not a local directory"),
    ],
)
async def test_what_is_wrong_ends_the_start_before_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, said: str
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=OSError("no such")))
    config = load_config({key: value, "grpc_port": 0, "port": 0}, {})
    deployment: Any = Deployment(config, tmp_path)
    deployment.ray.connect = AsyncMock()
    with pytest.raises(SettingError, match=f"{key}: {said}"):
        await deployment.start()
    deployment.ray.connect.assert_not_awaited()


@pytest.mark.parametrize(
    ("other", "asked"),
    [
        ({}, []),
        ({"max_num_seqs": 7}, [{"max_num_seqs": 7}]),
        ({"draft_model": "b"}, [{"draft_model": "b"}]),
    ],
)
async def test_a_take_over_changes_what_is_another_setting(
    tmp_path: Path, other: dict[str, Any], asked: list[dict[str, Any]]
) -> None:
    """The name of a head is the same setting with and without its kind."""
    settings = {"address": "head:1", "draft_model": "a/head"}
    deployment: Any = Deployment(load_config(settings | other, {}), tmp_path)
    runs = load_config(settings | {"draft_model": "eagle3:a/head"}, {})
    deployment.reconciler = AsyncMock()
    deployment.reconciler.call.return_value = Mock(given=runs)
    deployment._go_on = AsyncMock()
    await deployment._take_over()
    calls = [call.args for call in deployment.reconciler.call.await_args_list]
    assert calls == [("spec",), *(("change", changes) for changes in asked)]
