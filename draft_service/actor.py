"""The Ray actor that hosts a draft: its drafter, its service and its gRPC server."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from outrider.config import DraftConfig
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
from outrider.messages import DraftAnswer, DraftItem

if TYPE_CHECKING:
    from outrider.wire.server import RpcServer

    from .service import DraftService


class DraftActor:
    """A draft in a process of its own. Everything heavy is imported by `start`, so that finding a
    place for the actor is quick."""

    def __init__(self) -> None:
        self._service: DraftService | None = None
        self._metered: MeteredService[DraftItem, DraftAnswer] | None = None
        self._server: RpcServer | None = None

    async def ping(self) -> Place:
        """Where the actor runs."""
        return Place(os.getpid(), socket.gethostname())

    async def start(self, config: DraftConfig, log_directory: str) -> str:
        """Loads the model, if there is one, and serves; the address that coordinators call.
        Raises `ConfigError`."""
        num_threads = config.num_threads or _default_threads(config)
        use_threads(num_threads)
        log_to(log_directory, "draft")
        service = await asyncio.to_thread(_build, config, num_threads)
        from outrider.wire.server import RpcServer, ServerOptions

        from .servicer import draft_grpc_service

        self._service = service
        self._metered = MeteredService(service)
        self._server = RpcServer(
            [draft_grpc_service(self._metered)], ServerOptions(config.host, config.port)
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


def _default_threads(config: DraftConfig) -> int:
    """Half of the cores for a model: the target has all of them, and waits while the draft runs."""
    return 1 if config.is_ngram else max(1, available_cores() // 2)


def _build(config: DraftConfig, num_threads: int) -> DraftService:
    from outrider.engine.executor import ThreadExecutor

    from .service import DraftService

    if config.is_ngram:
        from outrider.drafting.ngram import NgramConfig, NgramDrafter

        drafter = NgramDrafter(NgramConfig(config.ngram_min, config.ngram_max))
        lookup = ThreadExecutor("draft-step", lambda: 0.0)
        return DraftService.without_model(
            config.model, drafter, lookup, max_num_seqs=config.max_num_seqs
        )
    engine = build_engine(config, "draft", num_threads)
    executor = ThreadExecutor("draft-step", engine.take_step_seconds)
    return DraftService.with_model(
        engine,
        executor,
        max_num_seqs=config.max_num_seqs,
        entries_max=config.support_entries,
    )
