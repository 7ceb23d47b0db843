"""The actor that keeps a deployment as it should be. It outlives the process that started it, and
is started again by Ray where it dies: then it takes over the replicas that are there.

| it knows | from |
| --- | --- |
| how replicas are made | its own arguments, which Ray keeps |
| which there are | Ray, by their names, and each of them |
| how many there should be | Redis, where nothing but counts is read |
| which settings and bounds are others since | Ray's head (`saved_state.py`) |

Commands ask it for changes, as an actor (`reconciler_client.py`). No setting comes from Redis: what
can be written there must not decide what runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from outrider.errors import SettingError, Unavailable
from outrider.registry.redis_registry import RedisRegistry
from outrider.replica.process_setup import Place, log_at, log_to
from outrider.sessions.redis_address import with_password

from .autoscaler import Autoscaling
from .model_files import check_same_tokens, resolve_models
from .ray_cluster import (
    CALLS_PER_ACTOR_MAX,
    RECONCILER,
    Actor,
    Cluster,
    Demand,
    asking_head,
    run_task,
)
from .replica_set import FIRST_REST_S, REST_S_MAX, Fleet
from .rolling_update import Rollout
from .saved_state import KeptByRay
from .spec import FleetSpec
from .status import Overview

if TYPE_CHECKING:
    from outrider.autoscaling import Bounds, Policy
    from outrider.config import DeploymentConfig, TargetConfig
    from outrider.registry.registry import Role
    from outrider.settings import Value

_log = logging.getLogger(__name__)

NEWS_S: Final = 10.0
"""Longest wait for another overview."""


class Reconciler:
    """Hosts a `Fleet`."""

    def __init__(self, blueprint: FleetSpec, namespace: str) -> None:
        """`namespace` is that of its actors. One that Ray has started again goes on."""
        import ray

        log_to(blueprint.log_directory, RECONCILER)
        log_at(blueprint.placement.config.coordinator.log_level)
        cluster = Cluster(namespace, local=blueprint.local)
        redis = blueprint.redis
        self._no_password: SettingError | None = None
        try:
            redis = with_password(redis)
        except SettingError as error:  # A method tells: Ray flattens what a constructor raises.
            self._no_password = error
        self._registry = RedisRegistry(redis, blueprint.deployment)
        self._fleet = Fleet(cluster, blueprint, self._registry, self._tell)
        kept = KeptByRay(namespace)
        self._autoscaling = Autoscaling(kept, self._registry, blueprint.policy)
        self._rollout = Rollout(kept, self._registry, blueprint, _resolved, _checked, self._go_by)
        self._looking: asyncio.Task[None] | None = None
        self._keeps = asyncio.Event()
        """Set once it keeps the fleet, and knows what held before."""
        self._work: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_keeping = False
        self._hopeless: Role | None = None
        self._version = uuid.uuid4().hex
        self._news = asyncio.Event()
        self._adopted = True
        self._upgrades = False
        if ray.get_runtime_context().was_current_actor_reconstructed:
            _log.warning("the reconciler has died, and returns")
            self._adopted, self._is_keeping, self._upgrades = False, True, True
            self._work = asyncio.create_task(self._keep(returns=True))

    async def ping(self) -> Place:
        """Where it runs."""
        return Place(os.getpid(), socket.gethostname())

    async def place(self) -> None:
        """See `Fleet.place`. Raises `SettingError` where its machine has no password of Redis."""
        self._check_password()
        # First, for one that Ray restarts from now on goes by what is kept.
        await self._autoscaling.begin()
        await self._rollout.begin()
        await self._do(self._fleet.place())

    async def begin(self, *roles: Role) -> None:
        """See `Fleet.begin`."""
        await self._do(self._fleet.begin(*roles))

    async def keep(self) -> None:
        """From now on there are as many replicas as are wanted, without anybody's doing."""
        if not self._is_keeping:
            before = self._work
            self._work = asyncio.create_task(self._keep(returns=False, after=before))

    async def want(self, counts: Mapping[Role, int]) -> Policy:
        """So many replicas of these roles from now on; the policy that may change that. Raises
        `ConfigError` for counts that cannot be, and `StoreUnavailable`."""
        await self._keeps.wait()
        for role, count in counts.items():
            self._fleet.blueprint.check_count(role, count)
        await self._registry.want(counts)
        return self._autoscaling.policy

    async def bound(self, changes: Mapping[Role, Bounds | None]) -> Policy:
        """See `Autoscaling.bound`. Raises `ConfigError` for bounds that cannot be."""
        await self._keeps.wait()
        for role, bounds in changes.items():
            for count in bounds or ():
                self._fleet.blueprint.check_count(role, count)
        return await self._autoscaling.bound(changes)

    async def change(self, name: str, values: Mapping[str, Value]) -> None:
        """See `Rollout.change`."""
        await self._keeps.wait()
        await self._rollout.change(name, values)

    async def blueprint(self) -> FleetSpec:
        """What is deployed, with what depends on where."""
        return self._fleet.blueprint

    async def overview(self, seen: str) -> Overview:
        """What there is, once that is another than the version `seen`, or after a while."""
        if seen == self._version:
            self._news.clear()
            try:
                async with asyncio.timeout(NEWS_S):
                    await self._news.wait()
            except TimeoutError:
                pass
        return self._overview()

    def _overview(self) -> Overview:
        fleet = self._fleet
        views = tuple(one.view(fleet.blueprint.plan(one.role)) for one in fleet.replicas)
        return Overview(
            self._version, dict(fleet.wanted), views, self._hopeless, self._adopted,
            self._upgrades, tuple(fleet.last_failures.values()),
        )  # fmt: skip

    async def ends(self) -> bool:
        """Whether it has been told to `close`: then there is nothing to be taken over."""
        return self._closing is not None

    async def close(self) -> None:
        """Ends what it was about to do, and all replicas, whoever waits for that; repeating it
        waits for the same end."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        tasks = [task for task in (self._looking, self._work) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fleet.close()
        try:
            await self._autoscaling.forget()
            await self._rollout.begin()
        except Unavailable as error:
            _log.warning("changes of this deployment are still kept: %s", error)
        await self._registry.close()

    async def _do(self, work: Any) -> None:
        """So that `close` can end it."""
        self._work = asyncio.ensure_future(work)
        await self._work

    async def _keep(self, *, returns: bool, after: asyncio.Task[Any] | None = None) -> None:
        """Once what was begun is done; also where it is hopeless: a machine may come back."""
        self._is_keeping = True
        if after is not None:
            await asyncio.wait([after])
        try:
            if returns:
                self._check_password()
                await self._rollout.return_to()
                await self._autoscaling.return_to()
                await self._fleet.adopt()
                self._adopted = True
                self._tell()
            self._looking = asyncio.create_task(self._autoscaling.run())
            self._keeps.set()
            while True:
                self._hopeless = await self._fleet.run()
                _log.error("there is no %s, and none can be started", self._hopeless)
                self._tell()
                await asyncio.sleep(REST_S_MAX)
                self._hopeless = None
                self._tell()
        except Exception:  # noqa: BLE001 (whatever it is, another one may do better)
            _log.exception("the fleet is not looked after any more")
            await asyncio.sleep(FIRST_REST_S)
            os._exit(1)  # Ray starts this again.

    def _check_password(self) -> None:
        if self._no_password is not None:
            raise self._no_password

    def _go_by(self, plan: FleetSpec) -> None:
        log_at(plan.placement.config.coordinator.log_level)
        self._fleet.go_by(plan)
        self._autoscaling.go_by(plan.policy)
        self._upgrades = True
        self._tell()

    def _tell(self) -> None:
        self._version = uuid.uuid4().hex
        self._upgrades = self._overview().num_stale > 0
        self._news.set()


async def _resolved(given: DeploymentConfig) -> DeploymentConfig:
    """In a process of its own: the model library stays there."""
    return await run_task(resolve_models, given)


async def _checked(running: TargetConfig, other: TargetConfig) -> None:
    await run_task(check_same_tokens, running, other)


def start_reconciler(blueprint: FleetSpec, namespace: str) -> Actor:
    """Starts the one of a deployment."""
    import ray

    options = ray.remote(Reconciler).options(
        name=RECONCILER,
        namespace=namespace,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=CALLS_PER_ACTOR_MAX,
    )
    return Actor(Demand(RECONCILER, 0, 0), options.remote(blueprint, namespace))


async def find_reconciler(namespace: str) -> Actor | None:
    """The one of a deployment, if there is one. Raises `Unavailable` where Ray's head does not
    answer."""
    import ray

    with asking_head(), suppress(ValueError):
        handle = await asyncio.to_thread(ray.get_actor, RECONCILER, namespace)
        return Actor(Demand(RECONCILER, 0, 0), handle)
    return None
