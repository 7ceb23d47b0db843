"""A coordinator's HTTP and gRPC servers and a gateway, with scripted answers: no engine, no Redis.
Takes JSON options and a folder. Prints its addresses and keys as a line of JSON, and answers each
line on standard input with figures."""

import asyncio
import json
import logging
import resource
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

from coordinator.actor import collect_less
from coordinator.auth.access_control import AccessControl, watch_keys
from coordinator.grpc_api import CoordinatorServicer
from coordinator.host import health_options
from coordinator.http_api.app import build_app
from coordinator.http_api.gateway import Coordinators, build_gateway
from coordinator.http_api.server import HttpOptions, HttpServer
from outrider.client.failover import EndpointPool
from outrider.foundation.api_keys import Caller, add_key
from outrider.interfaces.request import Event, GenerateRequest
from outrider.limits import GRPC_AGE_MS
from outrider.transport.server import RpcServer, ServerOptions
from tests.support.told_coordinator import FINISHED, STARTED, TOKENS, MemorySlots, ToldCoordinator

CALLERS: Final = (Caller(name="alice", tenant="alice"), Caller(name="mallory", tenant="mallory"))
TOKEN_S: Final = 0.02


class Scripted(ToldCoordinator):
    async def generate(
        self, request: GenerateRequest, *_: Any, **options: Any
    ) -> AsyncGenerator[Event]:
        yield STARTED
        for _ in range(request.max_tokens or 16):
            await asyncio.sleep(TOKEN_S)
            yield TOKENS
        yield FINISHED


class Lag:
    """The longest time for which the event loop was blocked."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    async def watch(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.001)
            self._longest_s = max(self._longest_s, time.monotonic() - start - 0.001)

    def take_ms(self) -> float:
        longest_s, self._longest_s = self._longest_s, 0.0
        return round(1e3 * longest_s, 1)


async def main(options: dict[str, Any], directory: Path) -> None:
    if files := options.get("files"):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    keys = {one.name: add_key(directory / "keys", one) for one in CALLERS}
    access = AccessControl(watch_keys(directory / "keys"), MemorySlots())
    http_options, coordinator = HttpOptions(access=access), Scripted()
    http = HttpServer(http_options, build_app(coordinator, http_options))
    await http.start()
    coordinators = Coordinators(EndpointPool(f"http://{http.address}", str))
    gateway = HttpServer(HttpOptions(), build_gateway(coordinators))
    await gateway.start()
    options = ServerOptions(
        guard=access.check_call, reflection=False, connection_age_ms=GRPC_AGE_MS
    )
    rpc = RpcServer([CoordinatorServicer(coordinator, access).grpc_service], options)
    health = RpcServer([], health_options(options, port=0))
    for one in (rpc, health):
        await one.start()
        await one.set_serving(True)
    addresses = {
        "http": http.address,
        "gateway": gateway.address,
        "grpc": rpc.address,
        "health": health.address,
    }
    lag = Lag()
    watching = asyncio.create_task(lag.watch())
    collect_less()
    print(json.dumps({"addresses": addresses, "keys": keys}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        await asyncio.sleep(0.02)  # `lag` sees a block that has just ended.
        places = {"http": http._open.num_max, "gateway": gateway._open.num_max}
        print(json.dumps({"lag_ms": lag.take_ms(), "places": places}), flush=True)
    watching.cancel()
    for server in (rpc, health, gateway, http):
        await server.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(main(json.loads(sys.argv[1]), Path(sys.argv[2])))
