"""Builds a replica's service, serves it by gRPC, reports its health, and announces the replica. The
draft and target actors are subclasses of `ReplicaHost`.

Large modules are imported in `start`, so that Ray can place an actor quickly."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from outrider.config.deployment import DraftConfig, ReplicaConfig
from outrider.foundation.garbage import skip_what_exists
from outrider.foundation.settings import blaming
from outrider.limits import LOST_REPLICA_GRACE_S
from outrider.registry.registry import Engagement, ReplicaRecord
from outrider.replica import engines, logs, ray_actor, threads
from outrider.replica.rank_process import RankLeader, engine_of_a_replica, threads_of_a_rank
from outrider.transport import addresses

if TYPE_CHECKING:
    from outrider.engine.tensor_parallel.rank_rpc import Rendezvous
    from outrider.interfaces.engine import Engine
    from outrider.interfaces.messages import DraftAnswer, DraftItem, VerifyAnswer, VerifyItem
    from outrider.interfaces.step_costs import StepCosts
    from outrider.registry.redis_registry import Lease
    from outrider.replica.drivers import ThreadDriver
    from outrider.replica.service import SteppedService
    from outrider.transport.server import RpcServer
    from outrider.transport.stream_server import ReplicaServicer

    ServicerOfTarget = ReplicaServicer[VerifyItem, VerifyAnswer]
    ServicerOfDraft = ReplicaServicer[DraftItem, DraftAnswer]

Config = TypeVar("Config", bound=ReplicaConfig)
Service = TypeVar("Service", bound="SteppedService[VerifyItem] | SteppedService[DraftItem]")


class ReplicaHost(ray_actor.RayActor, Generic[Config, Service]):
    """Base class of `TargetActor` and `DraftActor`, which override `build` and `servicer`."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._server: RpcServer | None = None
        self._announcer: Lease | None = None
        self._engagement = Engagement()
        self._open = AsyncExitStack()  # what `stop` closes, the last entry first
        self._stopping: asyncio.Task[None] | None = None
        self._grace_s = 0.0
        self.leadership: RankLeader | None = None  # set if the model has several ranks
        self._num_neighbours = 1  # ranks of the model on this machine, including this rank

    async def open_rendezvous(
        self, num_ranks: int, num_neighbours: int, timeout_s: float
    ) -> Rendezvous:
        """Returns the address at which the model's other ranks join during `start`."""
        self.leadership = RankLeader(num_ranks, num_neighbours == num_ranks, timeout_s)
        self._num_neighbours = num_neighbours
        self._open.callback(self.leadership.close)
        return self.leadership.rendezvous

    async def start(self, config: Config, log_directory: str) -> str:
        """Loads the model or head, and serves. Returns the address that coordinators call. Raises
        `ConfigError`."""
        role = config.role
        num_threads = threads_of_a_rank(config, threads.cores_for(role), self._num_neighbours)
        threads.use_threads(num_threads, config.model_engine)
        logs.log_to(log_directory, config.log_name, config.log_level)
        exports = engine = None
        if config.telemetry:
            from outrider.telemetry.setup import start_exports

            exports = start_exports(
                config.telemetry, role, config.metrics_host, config.replica_index
            )
        if not (isinstance(config, DraftConfig) and config.drafter.kind):
            engine = await threads.on_passing_thread(
                engine_of_a_replica, config, num_threads, self.leadership
            )
        service = await threads.on_passing_thread(self._build, engine, config)
        if exports is not None:
            from outrider.replica.step_spans import ObservedSteps

            self._open.push_async_callback(exports.close)
            service.observe(ObservedSteps(exports.tracer, exports.meter, role))
        address = await self.serve(service, config)
        skip_what_exists()
        return address

    def _build(self, engine: Engine | None, config: Config) -> Service:
        from outrider.interfaces.engine import take_stated_seconds
        from outrider.kernels.threads import start_workers
        from outrider.models.loading import resolve_device, use_device
        from outrider.replica.drivers import ThreadDriver

        is_emulated = config.emulated is not None
        is_eager = resolve_device(config.device).type == "cpu"
        is_eager = is_eager and not engines.runs_on_vllm(config)
        driver = ThreadDriver(
            f"{config.role}-step",
            lambda: 0.0 if engine is None else take_stated_seconds(engine),
            is_timed=is_emulated,
            may_compile=not (is_emulated or is_eager),
        )
        driver.call(lambda: use_device(device=config.device))
        driver.call(start_workers)
        costs = None
        if engine is not None:
            layer = getattr(engine, "draft_layer", None)
            driver.call(lambda: engines.try_device_kernels(engine, layer))
            costs = driver.call(lambda: engines.step_costs(engine, config))
        return self.build(config, driver, engine, costs)

    def build(
        self, config: Config, driver: ThreadDriver, engine: Engine | None, costs: StepCosts | None
    ) -> Service:
        """Builds the service. Blocks. `engine` is None for a draft with a head and no model."""
        raise NotImplementedError

    def servicer(self, service: Service) -> ServicerOfTarget | ServicerOfDraft:
        """Returns what answers gRPC calls of the service."""
        raise NotImplementedError

    async def engagement(self) -> Engagement:
        """Returns what this replica reports to a new reconciler (the manager of replicas)."""
        return self._engagement

    async def traffic(self) -> int:
        """Returns the number of items that the replica has received."""
        return 0 if self._service is None else self._service.num_items

    async def wait(self) -> None:
        """Returns when the server has stopped. Raises `EngineLost` if the engine was lost."""
        if self._server is not None:
            await self._server.wait()
        lost = None if self._service is None else self._service.lost
        if lost is not None:
            await self.stop(LOST_REPLICA_GRACE_S)
            raise lost

    async def stop(self, grace_s: float) -> None:
        """Refuses further calls and items. Closes the server when no item waits and all answers are
        sent, at the latest after `grace_s` seconds. Concurrent callers wait for the same stop."""
        if self._stopping is None:
            self._grace_s = grace_s
            self._stopping = asyncio.create_task(self._open.aclose())
        await asyncio.shield(self._stopping)

    async def serve(self, service: Service, config: Config) -> str:
        """Serves `service` and announces it. Returns the address that coordinators call. Raises
        `ConfigError` if the server cannot listen, and `StoreUnavailable` if the registry does not
        answer."""
        from outrider.transport.server import RpcServer, ServerOptions

        options = ServerOptions(config.host, config.port)
        if config.internal_tls_dir:
            from outrider.transport.tls import internal_server_credentials, role_guard

            with blaming("internal_tls_dir"):
                directory = Path(config.internal_tls_dir)
                credentials = internal_server_credentials(directory, config.role)
            guard = role_guard("coordinator")
            options = replace(options, reflection=False, guard=guard, credentials=credentials)
        self._service = service
        servicer = self.servicer(service)
        self._server = server = RpcServer([servicer.grpc_service], options)
        self._open.push_async_callback(service.close)
        self._open.push_async_callback(lambda: server.stop(self._grace_s))
        self._open.callback(lambda: servicer.finish(service.drain()))
        await server.start()
        await server.set_serving(True)
        health = asyncio.create_task(self._follow_health(service, server))
        self._open.callback(health.cancel)
        address = addresses.advertised(config.host, server.address)
        await self._announce(service, address, config)
        self._engagement = Engagement(
            address=address,
            member=config.membership,
            num_ranks=1 if self.leadership is None else self.leadership.rendezvous.num_ranks,
        )
        return address

    async def _announce(self, service: Service, address: str, config: ReplicaConfig) -> None:
        member = config.membership
        if member is None:
            return
        from outrider.redis.address import with_password
        from outrider.registry.redis_registry import Lease, RedisRegistry

        def record() -> ReplicaRecord:
            runs = service.description
            return ReplicaRecord(
                role=config.role,
                name=member.name,
                address=address,
                host=socket.gethostname(),
                pid=os.getpid(),
                model=runs.model,
                weights=runs.weights,
                device=config.device,
                leaving=self._engagement.leaving,
                load=len(service.sessions),
                trial_share=member.trial_share,
                figures=service.figures,
            )

        registry = RedisRegistry(with_password(member.redis), member.deployment)
        self._open.push_async_callback(registry.close)
        self._announcer = Lease(registry, record)
        # The lease is added last, so it ends first. Coordinators then send no new sessions.
        self._open.push_async_callback(self._announcer.withdraw)
        await self._announcer.start()

    async def leave(self) -> None:
        """Announces that this replica will stop, so that its sessions move to other replicas."""
        self._engagement = replace(self._engagement, leaving=True)
        if self._announcer is not None:
            self._announcer.announce_now()

    async def _follow_health(self, service: Service, server: RpcServer) -> None:
        while service.lost is None:
            await service.health_changed.wait()
            service.health_changed.clear()
            await server.set_serving(service.healthy)
        await self.stop(LOST_REPLICA_GRACE_S)
