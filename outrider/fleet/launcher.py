"""Starts the coordinators, targets and drafts of a deployment as Ray actors, and stops them.

| step | time limit |
| --- | --- |
| concurrently: start Ray and Redis, or connect to them; find the models' files | |
| find room for every actor | `startup_timeout_s` |
| start the processes of all actors | `model_timeout_s` |
| targets and drafts load their models and register in Redis | `model_timeout_s` |
| coordinators find targets and drafts in Redis, and serve | `model_timeout_s` |

A stop undoes these steps in reverse order, and so does a start that fails.
"""

import asyncio
import logging
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from outrider.config.deployment import BOUND_SETTINGS, DeploymentConfig
from outrider.errors import OutriderError, SettingError, Unavailable
from outrider.foundation.settings import blaming
from outrider.redis.address import with_password
from outrider.redis.embedded import EmbeddedRedis
from outrider.replica.logs import STANDARD_ERROR
from outrider.sessions.redis_store import RedisStore

from . import preflight
from .local_state import DeploymentRecord, namespace_of
from .ray_cluster import Cluster, RayConnection, check_asks_for_token, hide, repeated, resources
from .reconciler import FIXED, ReconcilerClient, differing, find_reconciler, start_reconciler
from .replica_set import STOP_CALL_TIMEOUT_S, Overview, raise_first
from .spec import FleetSpec, plan_fleet

_log = logging.getLogger(__name__)
FOLLOW_PERIOD_S = 0.5
REDIS_CHECK_PERIOD_S = 0.25
CLOSE_AWAY_S = 2.0
"""If the reconciler (`reconciler.py`) is gone for this time, a stop kills the replicas."""


class Deployment:
    """One deployment. Use it as an async context manager, or call `start` and `stop`."""

    def __init__(
        self, config: DeploymentConfig, state: Path, report: Callable[[str], None] = _log.info
    ) -> None:
        """`state` is a directory for logs and Redis' data. Each step calls `report` with a text."""
        self._passwords: dict[str, Any]
        config, self.api_key, self._passwords = preflight.without_secrets(config)
        self.config = self._given = config
        self.name = config.deployment_name or uuid.uuid4().hex[:12]
        self._state = state
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._report = report
        self._secrets_at = state / "secrets"
        self.ray = RayConnection(config.address, namespace_of(self.name), self._secrets_at)
        self.reconciler = ReconcilerClient(self.ray.namespace)
        self.redis: EmbeddedRedis | None = None
        self._is_own = False
        """Whether this process started or took over the replicas. If so, `stop` ends them."""
        self.overview = Overview({}, (), None)
        self._following: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        return ",".join(self.overview.addresses("coordinator"))

    @property
    def record(self) -> DeploymentRecord:
        """The record by which other commands find the deployment, without secrets."""
        config, coordinator, overview = self.config, self.config.coordinator, self.overview
        return DeploymentRecord(
            pid=os.getpid(),
            started_at=self._started_at,
            draft_model=config.draft.model,
            served_model_name=config.served_model_name,
            grpc_address=self.address,
            http_address=",".join(overview.addresses("coordinator", http=True)),
            target_addresses=overview.addresses("target"),
            draft_addresses=overview.addresses("draft"),
            target_directory=config.target.directory,
            tokenizer_directory=coordinator.tokenizer_directory,
            redis=asdict(coordinator.redis),
            name=self.name,
            ray_address=self.ray.gcs_address,
            ray_token=str(self.ray.token or ""),
            asks_for_keys=coordinator.asks_for_keys,
            wanted={**overview.wanted},
            trial=str(overview.trial or ""),
            settings=config.values(secrets=False),
        )

    async def start(self) -> None:
        """Returns when coordinators serve. After a failure, stops and raises an `OutriderError`."""
        try:
            await self._start()
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def _start(self) -> None:
        verb = "starting" if self.ray.local else "connecting to"
        self._report(f"{verb} Ray and Redis; finding, downloading or converting models")
        self._forget_secrets()  # A deployment that was killed may have left secrets.
        config = await self._prepare()
        for line in preflight.warnings(config):
            self._report(line)
        logs = self._state / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        spec = plan_fleet(
            self._given,
            config,
            resources().get("GPU", 0.0),
            self.name,
            str(logs) if self.ray.local else STANDARD_ERROR,
            local=self.ray.local,
        )
        if not self.ray.local and await find_reconciler(self.ray.namespace) is not None:
            if not await self.reconciler.call("ends"):
                await self._take_over()
                return
            self._report(f"waiting: deployment {self.name} on the cluster is being stopped")
            await self._end()
        self._is_own = True
        reconciler = start_reconciler(spec, self.ray.namespace)
        self._report(f"loading {config.target_name}, and {config.draft.model} as its draft")
        # If the reconciler dies, this call must fail. A `ReconcilerClient` would repeat the call.
        await reconciler.call("start")
        await self._go_on()

    async def _take_over(self) -> None:
        """Gives a running deployment of this name the settings of this process. Raises
        `ConfigError` if they cannot be used; the deployment then keeps its settings."""
        self._report(f"deployment {self.name} already runs on the cluster: taking it over")
        self.api_key = ""  # The running coordinators do not know this key.
        before: FleetSpec = await self.reconciler.call("spec")
        # `change` gets new values of `redis_url` and `redis_key_prefix`, and refuses the change.
        kept = {*FIXED, *BOUND_SETTINGS} - {"redis_url", "redis_key_prefix"}
        if changes := differing(before.given, self._given.values(), kept):
            self._report(f"replacing its replicas one by one, to change {', '.join(changes)}")
            await self.reconciler.call("change", changes)
        await self._go_on()
        self._is_own = True

    async def _go_on(self) -> None:
        await self._follow_reconciler()
        following = [
            repeated(self._follow_reconciler, FOLLOW_PERIOD_S, "the reconciler does not answer")
        ]
        if self.redis is not None:
            watch = partial(_watch, self.redis)
            following.append(
                repeated(watch, REDIS_CHECK_PERIOD_S, "the embedded Redis did not start")
            )
        self._following = [asyncio.create_task(work) for work in following]

    async def _follow_reconciler(self) -> None:
        overview: Overview = await self.reconciler.call("overview", self.overview)
        if overview != self.overview:
            spec: FleetSpec = await self.reconciler.call("spec")
            self.config, self.overview = spec.config, overview
            self._changed.set()

    async def _prepare(self) -> DeploymentConfig:
        coordinator = self.config.coordinator
        if self.ray.local:
            await asyncio.to_thread(preflight.check_before_start, self.config)
        if coordinator.redis.url:  # A wrong URL is reported before models are loaded.
            with blaming("redis_url"):
                reached = with_password(replace(coordinator.redis, **self._passwords))
                store = await RedisStore.connect(
                    reached, wait_replicas=coordinator.redis_wait_replicas
                )
                await store.close()
        elif coordinator.redis_wait_replicas:
            raise SettingError(
                "redis_wait_replicas", "needs redis_url: an embedded server has no replicas"
            )
        if self.ray.local:
            preflight.check_ports(self.config)
        resolving = asyncio.ensure_future(asyncio.to_thread(preflight.resolve_models, self.config))
        if preflight.needs_hub(self.config):  # The hub may lack a model, so ask before Ray starts.
            await resolving
        config: DeploymentConfig
        _, redis_url, config = await _all(
            self._connect(), asyncio.to_thread(self._start_redis), resolving
        )
        files: dict[str, Any] = {}
        if self.ray.local:
            for kind, secret in self._passwords.items():
                files[f"{kind}_file"] = str(hide(self._secrets_at, f"redis.{kind}", secret))
        redis = replace(config.coordinator.redis, url=redis_url, **files)
        return replace(config, coordinator=config.coordinator.reaching(redis))

    async def _connect(self) -> None:
        await self.ray.connect()
        if not (self.ray.local or self.config.target.insecure):
            await asyncio.to_thread(check_asks_for_token, self.ray.gcs_address)

    def _start_redis(self) -> str:
        if url := self.config.coordinator.redis.url:
            return url
        if not self.ray.local:
            raise SettingError(
                "redis_url", "is missing; an existing cluster cannot reach an embedded Redis"
            )
        self.redis = EmbeddedRedis(self._state / "redis")
        self.redis.start()
        return self.redis.url

    async def changed(self) -> None:
        """Waits until `overview` changes. Only one caller may wait."""
        await self._changed.wait()
        self._changed.clear()

    async def stop(self) -> None:
        """Stops all that `start` has started. First, coordinators get `stop_timeout_s` to end their
        requests. Then targets and drafts get the same time for their steps. Idempotent. Raises
        `Unavailable` if an existing cluster's head does not answer; replicas may then still run."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        async with AsyncExitStack() as ending:  # Runs all steps, even if one fails.
            ending.push_async_callback(self._stop_redis)
            ending.callback(self._forget_secrets)
            # `disconnect` ends local replicas, which use Redis, before Redis stops.
            ending.push_async_callback(self.ray.disconnect)
            if not self._is_own:
                return
            self._is_own = False
            try:
                await (self._end_before_ray() if self.ray.local else self._end())
            except Unavailable as error:
                if not self.ray.local:
                    raise
                _log.warning("cannot stop the replicas; they end when Ray stops: %s", error)

    def _forget_secrets(self) -> None:
        shutil.rmtree(self._secrets_at, ignore_errors=True)

    async def _stop_redis(self) -> None:
        if self.redis is not None:
            await asyncio.to_thread(self.redis.stop)
            self.redis = None

    async def _end_before_ray(self) -> None:
        """Like `_end`, but raises `Unavailable` if Ray's head ends meanwhile, because systemd, for
        example, signals all processes of a service. Ray's calls would then take 60 s, after which
        Ray ends this process."""
        ending = asyncio.ensure_future(self._end())
        watching = asyncio.ensure_future(self.ray.head_ended())
        try:
            await asyncio.wait((ending, watching), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                raise Unavailable("Ray has ended")
            await ending
        finally:
            ending.cancel()
            watching.cancel()

    async def _end(self) -> None:
        closing = ReconcilerClient(self.ray.namespace, CLOSE_AWAY_S)
        each_s = self.config.stop_timeout_s + STOP_CALL_TIMEOUT_S
        try:  # First coordinators get `each_s`, then targets and drafts.
            await closing.call("close", timeout_s=2 * each_s + STOP_CALL_TIMEOUT_S)
        except OutriderError as error:
            _log.warning("the replicas did not end in time, and are killed: %s", error)
        try:
            if (reconciler := await find_reconciler(self.ray.namespace)) is not None:
                await reconciler.kill()
        finally:
            await Cluster(self.ray.namespace, local=self.ray.local).clear()


async def _watch(redis: EmbeddedRedis) -> None:
    redis.rotate_log()
    if not redis.running:
        _log.error("the embedded Redis died, and is restarted")
        await asyncio.to_thread(redis.stop)
        await asyncio.to_thread(redis.start)


async def _all(*work: Awaitable[Any]) -> list[Any]:
    """Waits for all `work`, even if a part fails or the caller is cancelled. So no part still runs
    when `stop` begins. Raises like `raise_first`."""
    tasks = asyncio.gather(*work, return_exceptions=True)
    try:
        results = await asyncio.shield(tasks)
    except asyncio.CancelledError:
        await tasks
        raise
    raise_first(results)
    return results
