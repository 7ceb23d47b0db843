"""Gateways in processes of their own, which may be killed and stopped. A file lists the
coordinators that they follow. `python -m tests.chaos.gateways FILE PORT` runs one."""

import asyncio
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Self

from coordinator.http_api.gateway import Coordinators, build_gateway
from coordinator.http_api.server import HttpOptions, HttpServer
from outrider.client.failover import EndpointPool
from outrider.fleet.launcher import Deployment

NUM_GATEWAYS: Final = 2
WRITE_PERIOD_S: Final = 0.2
START_S: Final = 30.0


class Gateways:
    def __init__(self, file: Path) -> None:
        self._file = file
        self.addresses = tuple(f"127.0.0.1:{_free_port()}" for _ in range(NUM_GATEWAYS))
        self.num_kills = Counter[str]()
        """Address -> how often its gateway was killed."""
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, address: str) -> None:
        """Starts the gateway of an address, and waits until it listens."""
        host, port = address.split(":")
        self._processes[address] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.chaos.gateways",
            str(self._file),
            port,
            cwd=Path(__file__).parents[2],
        )
        async with asyncio.timeout(START_S):
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
                    return
                await asyncio.sleep(0.05)

    async def kill(self, address: str) -> None:
        """Kills a gateway, and starts it again."""
        self.num_kills[address] += 1
        self._processes[address].kill()
        await self._processes[address].wait()
        await self.start(address)

    async def pause(self, address: str, seconds: float) -> None:
        pid = self._processes[address].pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    async def __aenter__(self) -> Self:
        for address in self.addresses:
            await self.start(address)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@asynccontextmanager
async def gateways(file: Path, coordinators: Callable[[], str]) -> AsyncIterator[Gateways]:
    """Runs gateways to these coordinators, comma-separated URLs that may change."""

    async def write() -> None:
        while True:
            new = file.with_suffix(".new")
            new.write_text(coordinators())
            new.replace(file)
            await asyncio.sleep(WRITE_PERIOD_S)

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    try:
        async with Gateways(file) as running:
            yield running
    finally:
        writing.cancel()


def http_urls(deployment: Deployment) -> str:
    """The coordinators of a deployment, for `gateways`."""
    addresses = deployment.overview.addresses("coordinator", http=True)
    return ",".join(f"http://{one}" for one in addresses)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _run(file: Path, port: int) -> None:
    coordinators = Coordinators(EndpointPool(file.read_text, str))
    options = HttpOptions(port=port)
    server = HttpServer(options, build_gateway(coordinators, options.hosts))
    await server.start()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1]), int(sys.argv[2])))
