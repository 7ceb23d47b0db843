"""Other processes of a benchmark: what they answer, how they end, and the relay between two."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.processes import Process, ending, service_config
from benchmarks.relay import relay
from outrider.config import CoordinatorConfig, DraftConfig, TargetConfig
from outrider.errors import ConfigError, Unavailable

DELAY_S = 0.05

PARTS = 40


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(4096):
        writer.write(part)
        await writer.drain()
    writer.write(b"end")
    writer.close()


@asynccontextmanager
async def echo_behind_relay() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, relay(f"127.0.0.1:{port}", DELAY_S) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[1]))
        try:
            yield reader, writer
        finally:
            writer.close()


async def test_each_direction_takes_longer() -> None:
    async with echo_behind_relay() as (reader, writer):
        loop = asyncio.get_running_loop()
        for _ in range(3):
            start = loop.time()
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            assert loop.time() - start >= 2 * DELAY_S


async def test_parts_keep_their_order_and_do_not_wait_for_each_other() -> None:
    """All are on their way at the same time: one after the other they would take 4 s."""
    async with echo_behind_relay() as (reader, writer):
        start = asyncio.get_running_loop().time()
        sent = [f"{index:08}".encode() for index in range(PARTS)]
        for part in sent:
            writer.write(part)
            await asyncio.sleep(0.001)
        assert await reader.readexactly(8 * PARTS) == b"".join(sent)
        assert asyncio.get_running_loop().time() - start < PARTS * DELAY_S


async def test_an_end_is_passed_on_after_what_came_before_it() -> None:
    async with echo_behind_relay() as (reader, writer):
        writer.write(b"last")
        writer.write_eof()
        assert await reader.read() == b"lastend"


async def test_a_connection_to_nobody_ends() -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with relay(f"127.0.0.1:{port}", DELAY_S) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[1]))
        assert await reader.read() == b""
        writer.close()


async def test_open_connections_end_with_the_relay(caplog: pytest.LogCaptureFixture) -> None:
    async with echo_behind_relay() as (reader, writer):
        writer.write(b"x")
        await reader.readexactly(1)
    with pytest.raises(ConnectionError):
        for _ in range(100):
            writer.write(b"x")
            await asyncio.sleep(0.01)
            await writer.drain()
    assert not caplog.records  # asyncio logs what goes wrong where nobody waits


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "ended with exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed, as the system does where memory"),
    ],
)
def test_a_kill_is_told_as_one(program: str, said: str) -> None:
    status = subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert said in ending(status)


async def test_a_process_that_cannot_start_says_why() -> None:
    setup = {"service": "target", "config": {"engine": "no such"}}
    process = Process("benchmarks.processes:service", "the target process", setup)
    with pytest.raises(ConfigError, match=r"the target process: engine: 'no such' is wrong"):
        async with process:
            pass
    with pytest.raises(Unavailable, match="has not been started"):
        await process.ask({})


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("target", TargetConfig(max_num_seqs=3)),
        ("draft", DraftConfig(ngram_max=5)),
        ("coordinator", CoordinatorConfig(lookup=DraftConfig(ngram_max=5))),
        ("coordinator", CoordinatorConfig(num_draft_tokens=2)),
    ],
)
def test_a_configuration_reaches_the_process_of_its_service(name: str, config: Any) -> None:
    """As JSON; of a coordinator with that of its look-up."""
    assert service_config(name, json.loads(json.dumps(asdict(config)))) == config
