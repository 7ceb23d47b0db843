"""Two servers on one port, as where a coordinator replaces another."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from test_http_server import Service

from coordinator.http_api.server import HttpOptions, HttpServer
from deploy.fleet.preflight import check_ports
from outrider.config import load_config
from outrider.errors import ConfigError, SettingError
from outrider.transport.server import RpcServer, ServerOptions

TIMES = 20
HAND_OVERS = 6
NUM_CLIENTS = 8


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
        check_ports(load_config({"engine": "emulated:", "grpc_port": port}, {}))
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


async def test_clients_notice_nothing_of_several_hand_overs() -> None:
    """Neither those that connect for each request, nor those that keep a connection."""
    server = HttpServer(Service(), HttpOptions(shares_port=True))  # type: ignore[arg-type]
    await server.start()
    port = int(server.address.rpartition(":")[2])
    failures: list[httpx.HTTPError] = []
    over = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        try:
            reply = await client.get(f"http://127.0.0.1:{port}/v1/models")
            assert reply.status_code == 200
        except httpx.HTTPError as error:
            failures.append(error)

    async def ask_all_the_time(*, keeps: bool) -> int:
        num_asked = 0
        limits = httpx.Limits(max_keepalive_connections=1 if keeps else 0)
        async with httpx.AsyncClient(limits=limits) as client:
            while not over.is_set():
                await ask(client)
                num_asked += 1
        return num_asked

    asking = [
        asyncio.create_task(ask_all_the_time(keeps=index % 2 == 0)) for index in range(NUM_CLIENTS)
    ]
    for _ in range(HAND_OVERS):
        options = HttpOptions(port=port, shares_port=True, takes_over=True)
        old, server = server, HttpServer(Service(), options)  # type: ignore[arg-type]
        await server.start()
        await asyncio.sleep(0.1)
        await old.stop(1.0)
    over.set()
    assert min(await asyncio.gather(*asking)) > HAND_OVERS
    await server.stop()
    assert not failures


async def test_a_request_that_still_comes_is_answered() -> None:
    """On connections that were queued, accepted, or answered before when the server was told to
    stop. The answer says that it is the last one."""
    server = HttpServer(Service(), HttpOptions())  # type: ignore[arg-type]
    await server.start()
    port = int(server.address.rpartition(":")[2])
    request = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    silent, begun, answered = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    begun[1].write(request[:20])
    answered[1].write(request)
    head = await answered[0].readuntil(b"\r\n\r\n")
    assert b"connection: close" not in head.lower()
    await asyncio.sleep(0.1)
    stopping = asyncio.create_task(server.stop(5.0))
    await asyncio.sleep(0.3)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)
    for (_, writer), left in ((silent, request), (begun, request[20:]), (answered, request)):
        writer.write(left)
    async with asyncio.timeout(5):
        for reader, writer in (silent, begun, answered):
            told = await reader.read()
            assert b"HTTP/1.1 200 OK" in told
            assert b"connection: close" in told.lower()
            writer.close()
        await stopping
