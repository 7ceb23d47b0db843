"""Two servers on one port, as where a coordinator replaces another."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from test_http_server import Service

from coordinator.http.server import HttpOptions, HttpServer
from deploy.preflight import check_before_start
from outrider.config import load_config
from outrider.errors import ConfigError, SettingError
from outrider.wire.server import RpcServer, ServerOptions

TIMES = 20


async def healthy(address: str) -> bool:
    """By a connection of its own."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def test_one_grpc_server_takes_the_port_over_from_another() -> None:
    """Each new connection is served before, while and after both run. A server that does not take
    over is refused, whether it would share or not, and so is a deployment on that port."""
    old = RpcServer([], ServerOptions(shares_port=True))
    port = await old.start()
    await old.set_serving(True)
    new = RpcServer([], ServerOptions(port=port, shares_port=True, takes_over=True))
    assert await new.start() == port
    await new.set_serving(True)
    for _ in range(TIMES):
        assert await healthy(old.address)
    for shares in (False, True):  # Another deployment's coordinator would share its own port, too.
        with pytest.raises(ConfigError, match="the port is taken"):
            await RpcServer([], ServerOptions(port=port, shares_port=shares)).start()
    with pytest.raises(SettingError, match="cannot listen on"):
        check_before_start(load_config({"engine": "emulated:", "grpc_port": port}, {}))
    await old.stop()
    for _ in range(TIMES):
        assert await healthy(new.address)
    await new.stop()


async def test_one_http_server_takes_the_port_over_from_another() -> None:
    old = HttpServer(Service(), HttpOptions(shares_port=True))  # type: ignore[arg-type]
    await old.start()
    port = int(old.address.rpartition(":")[2])
    options = HttpOptions(port=port, shares_port=True, takes_over=True)
    new = HttpServer(Service(), options)  # type: ignore[arg-type]
    await new.start()

    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            reply = await client.get(f"http://127.0.0.1:{port}/v1/models")
            assert reply.status_code == 200

    for _ in range(TIMES):
        await ask()
    for shares in (False, True):
        options = HttpOptions(port=port, shares_port=shares)
        with pytest.raises(ConfigError, match=r"cannot listen on .*Address already in use"):
            await HttpServer(Service(), options).start()  # type: ignore[arg-type]
    await old.stop()
    for _ in range(TIMES):
        await ask()
    await new.stop()
