"""Several machines, simulated on this one: the nodes of a Ray cluster, Redis, and the network
between them."""

import asyncio
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from outrider.fleet.ray_cluster import ENVIRONMENT, OBJECT_STORE_BYTES, use_token
from tests.chaos.proxy import FaultProxy
from tests.support.redis_servers import START_S, RedisServers, Server, free_port

if TYPE_CHECKING:
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

NUM_NODES: Final = 2
"""Number of nodes for replicas. The node of Ray's head has no replicas."""
NODE_CPUS: Final = 2
PROXY: Final = "grpc_proxy"
POLL_S: Final = 0.05
EXTERNAL: Final = "RAY_REDIS_ADDRESS"


class Machines:
    """An async context manager."""

    def __init__(self, state: Path) -> None:
        self.proxy = FaultProxy()
        self.redis = RedisServers(state / "redis", forward=self.proxy.forward)
        """Other servers, Sentinel and clients reach each server by an address of the proxy."""
        self._gcs: Server | None = None
        """A Redis for the state of Ray's head, so that the head may be lost. It is not behind the
        proxy, because Ray connects while it holds this interpreter's lock."""
        self._head: subprocess.Popen[bytes] | None = None
        """The process of the head's server after a restart."""
        self._token = state / "ray.token"
        self._cluster: Cluster | None = None
        self._nodes: list[Node] = []

    async def __aenter__(self) -> Self:
        self._token.write_text(secrets.token_hex(32))
        use_token(self._token)
        os.environ |= ENVIRONMENT | {PROXY: await self.proxy.start()}
        port = free_port()
        config = f"port {port}\nbind 127.0.0.1\nsave ''\n"
        self._gcs = Server(self._token.parent / "gcs", config, port=port)
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self._gcs.info):
                await asyncio.sleep(POLL_S)
        os.environ[EXTERNAL] = f"redis://{self._gcs.address}"
        await self.redis.__aenter__()
        await asyncio.to_thread(self._start_nodes)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.shutdown)
        if self._head is not None:
            self._head.kill()
            await asyncio.to_thread(self._head.wait)
        if self._gcs is not None:
            await asyncio.to_thread(self._gcs.kill)
        await self.redis.__aexit__()
        self.proxy.close()
        del os.environ[PROXY]
        del os.environ[EXTERNAL]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def _start_nodes(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            shutdown_at_exit=False,  # Needs the main thread; `__aexit__` ends it.
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "gcs_server_port": free_port(),  # The same after a restart.
                "object_store_memory": OBJECT_STORE_BYTES,
            },
        )
        for _ in range(NUM_NODES):
            self._add_node()

    def _add_node(self) -> None:
        node = self._cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=OBJECT_STORE_BYTES)
        self._nodes.append(node)

    async def kill_head(self, away_s: float) -> None:
        """Kills the server of Ray's head, and restarts it with its stored state."""
        server = self._head
        if server is None:
            server = self._cluster.head_node.all_processes["gcs_server"][0].process
        self._head = await asyncio.to_thread(_started_again, server, away_s)

    def processes(self, index: int) -> list[int]:
        raylet = self._nodes[index].all_processes["raylet"][0].process.pid
        return [*(one.pid for one in psutil.Process(raylet).children(recursive=True)), raylet]

    async def lose_node(self, index: int) -> None:
        """Kills all processes of a node at once, as a power failure would. Another node joins."""
        pids, node = self.processes(index), self._nodes.pop(index)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self._cluster.remove_node, node, False)
        await asyncio.to_thread(self._add_node)


def _started_again(server: Any, away_s: float) -> subprocess.Popen[bytes]:
    """Kills a process and restarts its command. Ray's own class would also reconnect this process,
    which has crashed it."""
    words = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")[:-1]
    server.kill()
    server.wait()
    time.sleep(away_s)
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
