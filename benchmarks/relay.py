"""A TCP relay that makes the way between two processes longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from .processes import Role

PART_BYTES_MAX: Final = 2**16
PARTS_MAX: Final = 1_024
"""Parts on their way in one direction; a sender that is further ahead waits."""
_HOST: Final = "127.0.0.1"


@asynccontextmanager
async def relay(address: str, delay_s: float) -> AsyncIterator[str]:
    """Relays to `address` (HOST:PORT), `delay_s` later in each direction, as long as this lasts;
    the address that stands for it. A connection begins without a delay."""
    running: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_join(reader, writer, address, delay_s))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(connected, _HOST, 0)
    try:
        yield f"{_HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, delay_s: float
) -> None:
    """One connection, until both directions have ended."""
    host, _, port = address.rpartition(":")
    try:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
    except OSError:
        writer.close()
        return
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pass_on(reader, far_writer, delay_s))
            both.create_task(_pass_on(far_reader, writer, delay_s))
    finally:
        writer.close()
        far_writer.close()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """One direction, until its end or until either connection breaks."""
    loop = asyncio.get_running_loop()
    parts: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PARTS_MAX)

    async def receive() -> None:
        part = b"?"
        while part:  # An empty one is the end.
            try:
                part = await reader.read(PART_BYTES_MAX)
            except ConnectionError:
                part = b""
            await parts.put((loop.time() + delay_s, part))

    receiving = asyncio.create_task(receive())
    try:
        while True:
            due, part = await parts.get()
            await asyncio.sleep(due - loop.time())
            if not part:
                writer.write_eof()
                return
            writer.write(part)
            await writer.drain()
    except OSError:
        return  # The other end has gone.
    finally:
        receiving.cancel()


@asynccontextmanager
async def relay_role(setup: Mapping[str, Any]) -> AsyncIterator[Role]:
    """Relays to `setup`'s `address`, `delay_ms` later each way."""
    async with relay(setup["address"], setup["delay_ms"] / 1e3) as address:
        yield Role({"address": address})
