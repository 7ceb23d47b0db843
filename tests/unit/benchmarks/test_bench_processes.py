"""The processes of a benchmark, and the relay between them."""

import asyncio

import pytest

from benchmarks.processes import Process, relay
from outrider.errors import ConfigError

DELAY_MS = 50


async def test_a_relay_takes_longer_in_each_direction_and_keeps_the_order() -> None:
    """Data does not wait until earlier data has arrived; otherwise the test would take 4 s."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(4096):
            writer.write(part)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    setup = {"address": f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "delay_ms": DELAY_MS}
    loop = asyncio.get_running_loop()
    async with server, relay(setup) as role:
        host, port = str(role.ready["address"]).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        start = loop.time()
        sent = [f"{index:08}".encode() for index in range(40)]
        for part in sent:
            writer.write(part)
            await asyncio.sleep(0.001)
        writer.write_eof()
        assert await reader.readexactly(8) == sent[0]
        assert loop.time() - start >= 2 * DELAY_MS / 1e3
        assert await reader.read() == b"".join(sent[1:])
        assert loop.time() - start < 40 * DELAY_MS / 1e3
        writer.close()


async def test_a_process_that_cannot_start_says_why() -> None:
    setup = {"service": "target", "config": {"engine": "emulated:no=1"}}
    process = Process("benchmarks.processes:service", "the target process", setup)
    with pytest.raises(ConfigError, match="the target process: emulated: no="):
        async with process:
            pass
