"""The proxy of `tests.chaos`: what it breaks or holds must really be broken or held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from outrider.transport.channel import open_channel
from tests.chaos.machines import PROXY
from tests.chaos.proxy import FaultProxy

WAIT_S = 10.0


@pytest_asyncio.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultProxy]:
    found = FaultProxy()
    monkeypatch.setenv(PROXY, await found.start())
    yield found
    found.close()


async def echo(request: bytes, context: object) -> bytes:
    return request


async def serve() -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(echo)
    handler = grpc.method_handlers_generic_handler("test.Echo", {"Say": method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_calls_pass_are_held_and_break(proxy: FaultProxy) -> None:
    """And the next connection is as good as the first."""
    server, address = await serve()
    async with open_channel(address) as channel:
        say = channel.unary_unary("/test.Echo/Say")
        assert await say(b"first", timeout=WAIT_S) == b"first"
        proxy.hold(address)
        held = asyncio.ensure_future(say(b"held", timeout=WAIT_S))
        await asyncio.sleep(0.3)
        assert not held.done()
        proxy.release(address)
        assert await held == b"held"
        proxy.hold("127.0.0.1:1")
        assert await say(b"of another", timeout=WAIT_S) == b"of another"
        proxy.hold(address)
        broken = asyncio.ensure_future(say(b"broken", timeout=WAIT_S))
        await asyncio.sleep(0.1)
        proxy.cut(address)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await broken
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        again = asyncio.ensure_future(say(b"again", timeout=WAIT_S, wait_for_ready=True))
        await asyncio.sleep(0.3)
        assert not again.done(), "a new connection waits, too"
        proxy.release(address)
        assert await again == b"again"
    await server.stop(None)


async def test_a_port_leads_to_a_socket(proxy: FaultProxy, tmp_path: Path) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.upper())
        writer.close()

    server = await asyncio.start_unix_server(shout, tmp_path / "socket")
    name = await proxy.forward(str(tmp_path / "socket"))
    host, _, port = name.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"a\n")
    assert await reader.readline() == b"A\n"
    proxy.hold(name)
    writer.write(b"b\n")
    answer = asyncio.ensure_future(reader.readline())
    await asyncio.sleep(0.1)
    assert not answer.done()
    proxy.release(name)
    assert await answer == b"B\n"
    proxy.cut(name)
    assert await reader.read() == b""
    writer.close()
    server.close()
