"""Starts the coordinators, targets and drafts of a deployment as Ray actors, and stops them.

| step | waits for |
| --- | --- |
| Ray, Redis and the models' files, at the same time | each other |
| a place for every actor | `startup_timeout_s` |
| targets and drafts load their models, and are announced in Redis | `model_timeout_s` |
| the coordinators, who find them there, say that they serve | `model_timeout_s` |

Stopping goes the other way round, whatever start-up had reached.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coordinator.actor import connect_store
from outrider.client import Client
from outrider.config import DeploymentConfig
from outrider.errors import SettingError, Unavailable
from outrider.fleet.redis_registry import RedisRegistry
from outrider.fleet.registry import ROLES, Role
from outrider.hosting import STANDARD_ERROR, available_cores
from outrider.sessions.embedded import EmbeddedRedis
from outrider.settings import blaming

from .blueprint import Blueprint
from .cluster import Cluster
from .fleet import Fleet
from .models import resolve_models, tokenizer_warning
from .placement import (
    are_apart,
    look_ahead_outcomes,
    plan_placement,
    share_cores,
    siblings_of_a_place,
)
from .preflight import check_before_start
from .replica import Replica, raise_first

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the replicas answer: each HOST:PORT, the oldest replica's first."""

    coordinators: tuple[str, ...]
    targets: tuple[str, ...]
    drafts: tuple[str, ...]
    """None where the target drafts for itself."""

    @property
    def coordinator(self) -> str:
        """All coordinators, with commas between them: what a `Client` takes."""
        return ",".join(self.coordinators)


class Deployment:
    """The actors of one deployment. Use it as an async context manager, or `start` and `stop`."""

    def __init__(
        self,
        config: DeploymentConfig,
        state: Path,
        report: Callable[[str], None] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`state` is a directory that is the deployment's own: its logs and the embedded Redis's
        data go there. `report` is told what start-up does, one line at a time; `on_change` hears
        when `endpoints` are others, or other counts are wanted."""
        self.config = config
        self.name = uuid.uuid4().hex[:12]
        """In Redis, where several deployments may be."""
        self._state = state
        self._report = report or _log.info
        self._on_change = on_change
        self._cluster = Cluster(config.address, f"outrider-{self.name}")
        self._redis: EmbeddedRedis | None = None
        self._registry: RedisRegistry | None = None
        self._fleet: Fleet | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def endpoints(self) -> Endpoints:
        """Where it answers now. Raises `Unavailable` before it has started."""
        found = [
            tuple(one.address for one in self.fleet.of(role) if one.address and not one.leaves)
            for role in ROLES
        ]
        return Endpoints(*found)

    @property
    def fleet(self) -> Fleet:
        """Its replicas. Raises `Unavailable` before it has started."""
        if self._fleet is None:
            raise Unavailable("the deployment has not started")
        return self._fleet

    @property
    def redis(self) -> EmbeddedRedis | None:
        """The embedded server; None where sessions are kept elsewhere."""
        return self._redis

    def replica(self, role: Role) -> Replica:
        """The oldest replica of a role."""
        return self.fleet.of(role)[0]

    async def start(self) -> Endpoints:
        """Starts everything; ready when the coordinator serves. Raises `ConfigError` and other
        errors of `outrider.errors`, with everything stopped again."""
        try:
            return await self._start()
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def _start(self) -> Endpoints:
        self._report("starting Ray and Redis, finding the models")
        config = await self._prepare()
        warning = tokenizer_warning(config.coordinator.tokenizer_directory)
        if warning is not None:
            self._report(warning)
        if self._cluster.local:
            config = share_cores(config, available_cores())
        fleet = self._fleet = self._plan_fleet(config)
        self._report("waiting for a place for every actor")
        await fleet.place()
        self._check_hosts(fleet)
        self._report(f"loading {config.target.model}, and {config.draft.model} as its draft")
        await fleet.begin("target", "draft")
        self._report("starting the coordinator")
        self._settle(fleet)
        await fleet.begin("coordinator")
        for address in self.endpoints.coordinators:
            async with Client(address) as client:
                if not await client.healthy():
                    raise Unavailable(f"the coordinator at {address} does not say that it serves")
        return self.endpoints

    def _plan_fleet(self, config: DeploymentConfig) -> Fleet:
        logs = self._state / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        local = self._cluster.local
        blueprint = Blueprint(
            placement=plan_placement(config, self._cluster.resources()),
            deployment=self.name,
            log_directory=str(logs) if local else STANDARD_ERROR,
            local=local,
        )
        self._registry = RedisRegistry(config.coordinator.redis, self.name)
        return Fleet(self._cluster, blueprint, self._registry, self._on_change)

    def _check_hosts(self, fleet: Fleet) -> None:
        actors = [actor for one in fleet.replicas for actor in one.ranks]
        nodes = {actor.place.node for actor in actors}
        if len(nodes) > 1 and not self.config.target.insecure:
            raise SettingError(
                "host",
                f"the actors were placed on {len(nodes)} machines, but their servers bind "
                f"{self.config.target.host}; give --host 0.0.0.0 --insecure on a trusted network",
            )

    def _settle(self, fleet: Fleet) -> None:
        """What coordinators are told that depends on where models have been placed."""
        placement = fleet.blueprint.placement
        config = placement.config
        models = [*fleet.of("target"), *fleet.of("draft")]
        apart = are_apart(
            config,
            same_node=len({one.leader.place.node for one in models}) == 1,
            num_cores=available_cores() if self._cluster.local else 0,
        )
        self.config = replace(
            config,
            coordinator=replace(
                config.coordinator,
                drafting_delays=not apart,
                look_ahead=look_ahead_outcomes(config, apart=apart),
                draft_siblings=siblings_of_a_place(config),
            ),
        )
        fleet.blueprint = replace(fleet.blueprint, placement=replace(placement, config=self.config))

    async def _prepare(self) -> DeploymentConfig:
        """Ray, Redis and the models' files; the configuration with their places."""
        if self._cluster.local:
            check_before_start(self.config)
        if self.config.coordinator.redis_url:
            # The coordinator will connect again: a wrong URL should not cost a model's loading.
            with blaming("redis_url"):
                await (await connect_store(self.config.coordinator)).close()
        _, redis_url, config = await _all(
            self._cluster.connect(),
            asyncio.to_thread(self._start_redis),
            asyncio.to_thread(resolve_models, self.config),
        )
        found: DeploymentConfig = config
        return replace(found, coordinator=replace(found.coordinator, redis_url=redis_url))

    def _start_redis(self) -> str:
        """The URL of the session store."""
        if self.config.coordinator.redis_url:
            return self.config.coordinator.redis_url
        if not self._cluster.local:
            raise SettingError(
                "redis_url",
                "actors on another cluster do not reach an embedded Redis; give a server's URL",
            )
        self._redis = EmbeddedRedis(self._state / "redis")
        self._redis.start()
        return self._redis.url

    async def wait(self) -> Role:
        """Keeps as many replicas as are wanted, until that is hopeless: the role of which there is
        none, and none can be started."""
        return await self.fleet.run()

    async def stop(self) -> None:
        """Lets running requests end within `stop_timeout_s`, and what is left of their steps within
        as long again; then stops everything that was started. Repeating it does nothing."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.close()
        if self._registry is not None:
            await self._registry.close()
        # Ray's processes end with it, and with them whoever still talks to Redis.
        await self._cluster.disconnect()
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop)
            self._redis = None


async def _all(*work: Awaitable[Any]) -> list[Any]:
    """The results of all; waits for every one even if another fails or the caller is cancelled, so
    that nothing still starts while what was started is being stopped. Raises the first error, a
    `ConfigError` before others."""
    gathering = asyncio.gather(*work, return_exceptions=True)
    try:
        results = await asyncio.shield(gathering)
    except asyncio.CancelledError:
        await gathering
        raise
    raise_first(results)
    return results
