"""The Ray actor that hosts a target: its engine, its service and its gRPC server."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from outrider.config import TargetConfig
from outrider.hosting import (
    MeteredService,
    Place,
    Traffic,
    advertised,
    available_cores,
    build_engine,
    log_to,
    use_threads,
)
from outrider.messages import VerifyAnswer, VerifyItem

if TYPE_CHECKING:
    from outrider.wire.server import RpcServer

    from .service import TargetService


class TargetActor:
    """A target in a process of its own. Everything heavy is imported by `start`, so that finding a
    place for the actor is quick."""

    def __init__(self) -> None:
        self._service: TargetService | None = None
        self._metered: MeteredService[VerifyItem, VerifyAnswer] | None = None
        self._server: RpcServer | None = None

    async def ping(self) -> Place:
        """Where the actor runs."""
        return Place(os.getpid(), socket.gethostname())

    async def start(self, config: TargetConfig, log_directory: str) -> str:
        """Loads the model and serves; the address that coordinators call. Raises `ConfigError`."""
        num_threads = config.num_threads or available_cores()
        use_threads(num_threads)
        log_to(log_directory, "target")
        service = await asyncio.to_thread(_build, config, num_threads)
        from outrider.wire.server import RpcServer, ServerOptions

        from .servicer import target_grpc_service

        self._service = service
        self._metered = MeteredService(service)
        self._server = RpcServer(
            [target_grpc_service(self._metered)], ServerOptions(config.host, config.port)
        )
        await self._server.start()
        await self._server.set_serving(True)
        return advertised(config.host, self._server.address)

    async def traffic(self) -> Traffic:
        """What crossed its streams."""
        return Traffic(0, 0) if self._metered is None else self._metered.traffic

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        if self._server is not None:
            await self._server.wait()

    async def stop(self, grace_s: float) -> None:
        """Ends the streams, after `grace_s` seconds at the latest, and the running step."""
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._service is not None:
            await self._service.close()


def _build(config: TargetConfig, num_threads: int) -> TargetService:
    from outrider.engine.executor import ThreadExecutor

    from .service import TargetService

    engine = build_engine(config, "target", num_threads)
    executor = ThreadExecutor("target-step", engine.take_step_seconds)
    return TargetService(engine, executor, max_num_seqs=config.max_num_seqs)
