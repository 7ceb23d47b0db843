"""A coordinator's name in the store, its start without drafts, and the order of its shutdown."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from coordinator import host
from coordinator.host import CoordinatorHost, load_text, owner_name
from coordinator.service import CoordinatorService
from outrider.config.deployment import CoordinatorConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.errors import BadRequest
from outrider.redis.address import RedisAddress
from outrider.registry.registry import Membership
from outrider.transport.channel import open_channel
from outrider.transport.server import HEALTH_PATH
from tests.support.models import byte_level_tokenizer
from tests.support.redis_servers import free_port
from tests.support.script_store import ScriptStore
from tests.support.session_links import TOY, described

REDIS = RedisAddress(url="unix:///none", key_prefix="outrider:")


def test_every_coordinator_has_a_different_name_in_the_store() -> None:
    """Also after a restart: else its lease would keep others from the sessions of the dead one."""
    members = [Membership(redis=REDIS, deployment=one, name="coordinator-0") for one in "ab"]
    configs = [CoordinatorConfig(membership=one) for one in (*members, None)]
    assert len({owner_name(one) for one in 2 * configs}) == 6


@pytest.mark.parametrize("drafts_itself", [False, True])
async def test_without_a_draft_only_a_target_that_drafts_counts_as_delayed(
    drafts_itself: bool,
) -> None:
    target = described(replace(TOY, drafts_itself=drafts_itself))
    service = CoordinatorService(
        CoordinatorConfig(),
        "a",
        store=ScriptStore(lambda: 0.0),
        targets={"t": target},
        fallback=NgramDrafter(),
    )
    await service.start()
    assert service.runs.lengths.costs.drafting_delays is drafts_itself
    await service.close()


async def test_errors_name_the_model_as_callers_know_it(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    config = CoordinatorConfig(tokenizer_directory=str(tmp_path), served_model_name="mine")
    text = load_text(config)
    with pytest.raises(BadRequest, match=r"^tools: the chat template of model mine does not sup"):
        text.check_tools("tools")


class Part:
    """Records which of its methods are called."""

    failed, trouble, address, check_call = False, "", "h:1", None

    def __init__(self, name: str, heard: list[str]) -> None:
        self._name = name
        self._heard = heard

    @property
    def streams(self) -> "Part":
        return self

    health = streams

    def hand_over(self) -> None:
        self._heard.append("end lease")

    def __getattr__(self, verb: str) -> Any:
        async def end(*_: Any, **__: Any) -> None:
            self._heard.append(f"{verb} {self._name}")
            await asyncio.sleep(0.01)

        return end


async def test_the_service_is_closed_after_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, running requests find a target that replaced theirs."""
    heard: list[str] = []
    for name in ("CoordinatorService", "RpcServer", "Lease", "RedisRegistry"):
        monkeypatch.setattr(host, name, lambda *_, name=name, **__: Part(name, heard))
    monkeypatch.setattr(host, "RedisStore", Part("store", heard))
    member = Membership(redis=REDIS, deployment="a", name="coordinator-0")
    made = CoordinatorHost(CoordinatorConfig(http=False, telemetry="", membership=member))
    await made.start()
    heard.clear()
    await made.stop(1.0)
    assert heard == [
        "end lease",
        "withdraw Lease",
        "stop RpcServer",
        "close CoordinatorService",
        "close RedisRegistry",
    ]


async def silence() -> AsyncGenerator[bytes]:
    await asyncio.sleep(60)
    yield b""


async def test_a_second_port_tells_the_health_to_callers_without_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the coordinator cannot serve. Nobody learns more there."""
    service = Part("service", [])
    monkeypatch.setattr(host, "CoordinatorService", lambda *_, **__: service)
    monkeypatch.setattr(host, "RedisStore", Part("store", []))
    monkeypatch.setattr(host, "HEALTH_PERIOD_S", 0.01)
    config = CoordinatorConfig(
        http=False,
        grpc_port=0,
        health_port=free_port(),
        api_key="k" * 16,
        redis=REDIS,
        target_address="127.0.0.1:1",
    )
    made = CoordinatorHost(config)
    await made.start()
    assert made.health_server is not None
    async with open_channel(made.health_server.address) as channel:
        check = channel.unary_unary(f"{HEALTH_PATH}Check", None, HealthCheckResponse.FromString)
        assert (await check(b"")).status == HealthCheckResponse.SERVING
        # Its message is not awaited.
        await channel.stream_unary(f"{HEALTH_PATH}Check", None, None)(silence())
        service.health.trouble = "no target answers"
        async with asyncio.timeout(5):
            while (await check(b"")).status == HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.RpcError) as found:
            await channel.unary_unary("/outrider.v1.Coordinator/Describe", None, None)(b"")
        assert found.value.code() == grpc.StatusCode.UNIMPLEMENTED
    await made.stop(0.0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", config.health_port)
