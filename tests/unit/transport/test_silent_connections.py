"""How long gRPC servers keep connections that make no call."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.transport.channel import open_channel
from outrider.transport.server import RpcServer, ServerOptions

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""With an empty frame of settings."""
LATE_S = 8.0


@pytest.mark.parametrize("sent", [b"", PREFACE[:10], PREFACE])
async def test_a_connection_without_a_call_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Whether it has sent nothing, a part of its preface, or all of it. A channel connects again
    with its next call."""
    monkeypatch.setattr("outrider.transport.channel.GRPC_HANDSHAKE_MS", 1_000)
    monkeypatch.setattr("outrider.transport.channel.GRPC_IDLE_MS", 1_000)
    server = RpcServer([], ServerOptions())
    port = await server.start()
    channel = open_channel(server.address)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        began = time.monotonic()
        async with asyncio.timeout(LATE_S):
            await reader.read()
        assert time.monotonic() - began > 0.5
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.05)
        await stub.Check(health_pb2.HealthCheckRequest())
        writer.transport.abort()
    finally:
        await channel.close()
        await server.stop()
