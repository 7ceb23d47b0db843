"""Connections without calls, and links that are closed during calls."""

import asyncio
import socket
import time
import weakref
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import limits
from outrider.errors import ConfigError, Unavailable
from outrider.interfaces.messages import Prefix
from outrider.transport.channel import open_channel
from outrider.transport.codec import VERIFY
from outrider.transport.grpc_link import GrpcLink
from outrider.transport.server import RpcServer, ServerOptions, Serving, check_port
from outrider.transport.stream_server import ReplicaServicer
from outrider.v1 import types_pb2
from tests.chaos.proxy import FaultProxy

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""With an empty SETTINGS frame."""


@pytest.mark.parametrize("sent", [b"", PREFACE])
async def test_a_connection_without_a_call_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("outrider.limits.GRPC_HANDSHAKE_MS", 1_000)
    monkeypatch.setattr("outrider.limits.GRPC_IDLE_MS", 1_000)
    server = RpcServer([], ServerOptions())
    port = await server.start()
    async with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        began = time.monotonic()
        async with asyncio.timeout(8):
            await reader.read()
        assert time.monotonic() - began > 0.5
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.05)
        await stub.Check(health_pb2.HealthCheckRequest())
        writer.transport.abort()
    await server.stop()


async def test_a_caller_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no pings. Its call ends, and with it what the call holds."""
    monkeypatch.setattr("outrider.limits.KEEPALIVE_MS", 500)
    monkeypatch.setattr("outrider.limits.KEEPALIVE_TIMEOUT_MS", 500)
    server = RpcServer([], ServerOptions())
    await server.start()
    proxy = FaultProxy()
    address = await proxy.forward(server.address)
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await asyncio.sleep(1.5)
        assert not watch.done()
        began = time.monotonic()
        proxy.hold(address)
        async with asyncio.timeout(8):
            await watch.code()
        assert time.monotonic() - began > 0.4
        proxy.close()
    await server.stop()


async def test_calls_beyond_the_limit_of_a_connection_wait_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.limits.GRPC_STREAMS_MAX", 4)
    server = RpcServer([])
    await server.start()
    async with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(200)]
        codes = [await call.code() for call in calls]
    assert codes == [grpc.StatusCode.OK] * len(calls)
    await server.stop()


async def test_health_is_that_of_the_whole_server() -> None:
    server = RpcServer([])
    await server.start()
    async with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving in (False, True, False):
            await server.set_serving(serving)
            status = (await stub.Check(health_pb2.HealthCheckRequest())).status
            assert status == (Serving.SERVING if serving else Serving.NOT_SERVING)
        unknown = stub.Check(health_pb2.HealthCheckRequest(service="none"))
        assert (await unknown.code()).name == "NOT_FOUND"
    await server.stop()


async def test_a_stopped_server_is_freed_without_garbage_collection() -> None:
    server = RpcServer([])
    await server.start()
    async with open_channel(server.address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await server.stop()
    reference = weakref.ref(server)
    del server
    assert reference() is None


async def test_calls_get_a_new_connection_now_and_then() -> None:
    """Only a call that meets the end of a connection may fail, with UNAVAILABLE. Clients repeat
    such calls. A stream stays on its connection."""
    peers, num_failed = list[str](), 0
    options = ServerOptions(
        connection_age_ms=400, guard=lambda _, context: peers.append(context.peer())
    )
    server = RpcServer([], options)
    await server.start()
    async with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == Serving.NOT_SERVING
        until = time.monotonic() + 10
        while len(set(peers)) < 4 and time.monotonic() < until:
            try:
                await stub.Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                num_failed += 1
        assert len(set(peers)) == 4
        assert num_failed < 4
        await server.set_serving(True)
        async with asyncio.timeout(8):
            assert (await watching.read()).status == Serving.SERVING
    await server.stop()


async def test_a_port_that_another_process_holds_is_never_shared() -> None:
    """Also if that listens on one address only. A foreign host is not contacted."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.2", 0))
        other.listen()
        other.setblocking(False)
        port = other.getsockname()[1]
        for host in ("0.0.0.0", "127.0.0.2"):  # noqa: S104
            with pytest.raises(ConfigError, match="the port is taken"):
                await RpcServer([], ServerOptions(host, port, shares_port=True)).start()
        with pytest.raises(BlockingIOError):
            other.accept()
    began = time.monotonic()
    check_port("192.0.2.1", port)
    assert time.monotonic() - began < 0.5


async def test_a_caller_hears_that_the_link_is_closed() -> None:
    """And is not cancelled, although closing a channel raises this in its calls."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        link = GrpcLink(VERIFY, f"127.0.0.1:{silent.getsockname()[1]}")
        asking = asyncio.create_task(link.describe(30.0))
        accepted, _ = await asyncio.get_running_loop().sock_accept(silent)
        await link.close()
        with pytest.raises(Unavailable, match="closed"):
            await asking
        with pytest.raises(Unavailable, match="closed"):
            await link.describe(1.0)
        accepted.close()


async def test_few_releases_of_a_link_are_under_way_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else thousands of sessions that end at once would delay the answers to all others."""
    monkeypatch.setattr(limits, "RELEASES_WAITING_MAX", 40)
    link, released, running, most = GrpcLink(VERIFY, "127.0.0.1:1"), list[bytes](), 0, 0

    async def release(request: bytes, timeout: float) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        released.append(request)

    monkeypatch.setattr(link, "_release", release)
    for _ in range(2):
        for number in range(60):
            link.release(f"session {number}", 1)
        async with asyncio.timeout(5):
            while running or not released:
                await asyncio.sleep(0.001)
        assert most == limits.RELEASES_IN_FLIGHT_MAX
        assert len(released) == 40
        assert b"session 59" in released[-1]
        released.clear()
    await link.close()


@pytest.mark.parametrize("learned", [None, Prefix(5, 2**64 - 1)])
async def test_a_release_says_what_may_be_learned(
    monkeypatch: pytest.MonkeyPatch, learned: Prefix | None
) -> None:
    link, service, name = GrpcLink(VERIFY, "127.0.0.1:1"), Mock(), "0" * 32
    servicer = ReplicaServicer(service, VERIFY)

    async def release(request: bytes, timeout: float) -> None:
        await servicer.release(types_pb2.ReleaseRequest.FromString(request), None)

    monkeypatch.setattr(link, "_release", release)
    link.release(name, 3, learned)
    async with asyncio.timeout(5):
        while not service.release.called:
            await asyncio.sleep(0.001)
    service.release.assert_called_once_with(name, 3, learned)
    await link.close()
