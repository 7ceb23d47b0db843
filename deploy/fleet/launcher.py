"""Starts the coordinators, targets and drafts of a deployment as Ray actors, and stops them.

| step | waits for |
| --- | --- |
| Ray, Redis and the models' files, at the same time | each other |
| a place for every actor | `startup_timeout_s` |
| targets and drafts load their models, and are announced in Redis | `model_timeout_s` |
| the coordinators, which find them there, say that they serve | `model_timeout_s` |

Stopping goes the other way round, whatever start-up had reached.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from outrider.config import BOUND_SETTINGS, DeploymentConfig
from outrider.drafters.names import same_drafter
from outrider.errors import OutriderError, SettingError, Unavailable
from outrider.replica.process_setup import STANDARD_ERROR
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_address import with_password
from outrider.settings import blaming

from .local_state import DeploymentRecord, namespace_of
from .preflight import (
    check_before_start,
    check_ports,
    resolve_models,
    warnings,
    without_secrets,
)
from .ray_cluster import Cluster, RayConnection, SecretFiles, check_asks_for_token, resources
from .reconciler import CHANGE_S, FIXED, ReconcilerClient, find_reconciler, start_reconciler
from .replica_set import Overview, close_timeout_s, raise_first
from .spec import FleetSpec, plan_fleet

_log = logging.getLogger(__name__)

FOLLOW_PERIOD_S = 0.5
"""Until a reconciler that did not answer is asked again."""
REDIS_LOOK_PERIOD_S = 0.25
"""Between two looks at whether the embedded Redis runs."""
CLOSE_AWAY_S = 2.0
"""How long a reconciler that ends the replicas in order may be away: it may have died, and be about
to return."""


class Deployment:
    """The actors of one deployment. Use it as an async context manager, or `start` and `stop`."""

    def __init__(
        self,
        config: DeploymentConfig,
        state: Path,
        report: Callable[[str], None] = _log.info,
    ) -> None:
        """`state` is a directory that is the deployment's own: its logs and the embedded Redis's
        data go there. `report` gets a line for each step of a start-up."""
        config, self.api_key, self._passwords = without_secrets(config)
        self.config = self._given = config
        self.name = config.deployment_name or uuid.uuid4().hex[:12]
        """In Redis, where several deployments may be."""
        self._state = state
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._report = report
        self._secret_files = SecretFiles(state / "secrets")
        self.ray = RayConnection(config.address, namespace_of(self.name), self._secret_files)
        self.reconciler = ReconcilerClient(self.ray.namespace)
        """What keeps its replicas, to be asked for other numbers or settings."""
        self.redis: EmbeddedRedis | None = None
        """The embedded server; None where sessions are kept elsewhere."""
        self._is_own = False
        """Whether it runs, and is this one's to end."""
        self.overview = Overview({}, (), None)
        """Its replicas; none before it has started."""
        self._following: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        """Of all coordinators, with commas between them: what a `Client` takes."""
        return ",".join(self.overview.addresses("coordinator"))

    @property
    def record(self) -> DeploymentRecord:
        """How others find it, without secrets."""
        config, overview = self.config, self.overview
        redis = replace(config.coordinator.redis, password="", sentinel_password="")
        return DeploymentRecord(
            pid=os.getpid(), started_at=self._started_at,
            draft_model=config.draft.model, served_model_name=config.served_model_name,
            grpc_address=self.address,
            http_address=",".join(overview.addresses("coordinator", http=True)),
            target_addresses=overview.addresses("target"),
            draft_addresses=overview.addresses("draft"),
            target_directory=config.target.directory,
            tokenizer_directory=config.coordinator.tokenizer_directory,
            redis=asdict(redis), deployment=self.name, ray_address=self.ray.found,
            ray_token=str(self.ray.token or ""),
            asks_for_keys=config.coordinator.asks_for_keys, wanted={**overview.wanted},
            trial=str(overview.trial or ""),
            settings=config.values(secrets=False),
        )  # fmt: skip

    async def start(self) -> None:
        """Starts everything; ready when the coordinator serves. Raises `ConfigError` and other
        errors of `outrider.errors`, with everything stopped again."""
        try:
            await self._start()
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def _start(self) -> None:
        verb = "starting" if self.ray.local else "connecting to"
        self._report(f"{verb} Ray and Redis, finding the models")
        self._secret_files.forget()  # Of an earlier deployment.
        config = await self._prepare()
        for line in warnings(config):
            self._report(line)
        logs = self._state / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        spec = plan_fleet(
            self._given, config, resources(), self.name,
            str(logs) if self.ray.local else STANDARD_ERROR, local=self.ray.local,
        )  # fmt: skip
        if not self.ray.local and await find_reconciler(self.ray.namespace) is not None:
            if not await self.reconciler.call("ends"):
                await self._take_over()
                return
            self._report(f"a deployment {self.name} is being stopped there: waiting for its end")
            await self._end()
        self._is_own = True
        reconciler = start_reconciler(spec, self.ray.namespace)
        self._report(f"loading {config.target_name}, and {config.draft.model} as its draft")
        await reconciler.call("start")  # Once: a replica that does not start is `Unavailable`, too.
        await self._go_on()

    async def _take_over(self) -> None:
        """A deployment of this name that runs, with the settings of this one. Raises `ConfigError`
        where these cannot be; then it goes on as it was."""
        self._report(f"a deployment {self.name} runs there already: taking it over")
        self.api_key = ""  # It has not been told this one.
        before: FleetSpec = await self.reconciler.call("spec")
        runs, asked = before.given.values(), self._given.values()
        # With other ones of these it is another deployment, and they are refused.
        kept = {*FIXED, *BOUND_SETTINGS} - {"redis_url", "redis_key_prefix"}
        changes = {
            key: asked[key] for key, value in runs.items()
            if asked[key] != value and key not in kept
        }  # fmt: skip
        if same_drafter(self._given.draft.model, before.given.draft.model):
            changes.pop("draft_model", None)
        if changes:
            self._report(f"replacing its replicas one by one: {', '.join(changes)}")
            await self.reconciler.call("change", changes, timeout_s=CHANGE_S)
        await self._go_on()
        self._is_own = True  # From now on it is this one's to end.

    async def _go_on(self) -> None:
        await self._hear()  # Without `seen`: a reconciler of an older build takes nothing.
        self._following = [asyncio.create_task(self._follow())]
        if self.redis is not None:
            self._following.append(asyncio.create_task(_keep_running(self.redis)))

    async def _hear(self, *seen: Overview) -> None:
        found: Overview = await self.reconciler.call("overview", *seen)
        if found != self.overview:
            spec: FleetSpec = await self.reconciler.call("spec")
            self.config, self.overview = spec.config, found
            self._changed.set()

    async def _follow(self) -> None:
        """What the reconciler tells. While it is away the replicas go on without it; it may also
        have been replaced by another one."""
        while True:
            try:
                await self._hear(self.overview)
            except Exception as error:  # noqa: BLE001 (whatever Ray has to say, it is asked again)
                known = isinstance(error, Unavailable)
                _log.warning("the reconciler is away: %s", error, exc_info=not known)
                await asyncio.sleep(FOLLOW_PERIOD_S)

    async def _prepare(self) -> DeploymentConfig:
        """Ray, Redis and the models' files; the configuration with their places."""
        front = self.config.coordinator
        if self.ray.local:
            await asyncio.to_thread(check_before_start, self.config)
        if front.redis.url:
            # The coordinator will connect again: a wrong URL should not cost a model's loading.
            reached = replace(
                front.redis, password=self._passwords.redis,
                sentinel_password=self._passwords.sentinel,
            )  # fmt: skip
            from outrider.sessions.redis_store import RedisStore

            with blaming("redis_url"):
                store = await RedisStore.connect(
                    with_password(reached), wait_replicas=front.redis_wait_replicas
                )
                await store.close()
        elif front.redis_wait_replicas:
            raise SettingError(
                "redis_wait_replicas", "needs redis_url: an embedded server has no replicas"
            )
        if self.ray.local:
            check_ports(self.config)  # After what is wrong in itself: another port may be free.
        config: DeploymentConfig
        _, redis_url, config = await _all(
            self._connect(),
            asyncio.to_thread(self._start_redis),
            asyncio.to_thread(resolve_models, self.config),
        )
        redis, hide = replace(config.coordinator.redis, url=redis_url), self._secret_files.hide
        if self.ray.local and (password := self._passwords.redis):
            redis = replace(redis, password_file=str(hide("redis.password", password)))
        if self.ray.local and (password := self._passwords.sentinel):
            redis = replace(redis, sentinel_password_file=str(hide("sentinel.password", password)))
        return replace(config, coordinator=config.coordinator.reaching(redis))

    async def _connect(self) -> None:
        """Raises `ConfigError`, also for a cluster elsewhere that asks for no token."""
        await self.ray.connect()
        if not (self.ray.local or self.config.target.insecure):
            await asyncio.to_thread(check_asks_for_token, self.ray.found)

    def _start_redis(self) -> str:
        if url := self.config.coordinator.redis.url:
            return url
        if not self.ray.local:
            raise SettingError(
                "redis_url",
                "actors on another cluster do not reach an embedded Redis; give a server's URL",
            )
        self.redis = EmbeddedRedis(self._state / "redis")
        self.redis.start()
        return self.redis.url

    async def changed(self) -> None:
        """Returns once its `overview` is another; for one caller."""
        await self._changed.wait()
        self._changed.clear()

    async def stop(self) -> None:
        """Lets running requests end within `stop_timeout_s`, and what is left of their steps within
        as long again; then stops everything that was started. Repeating it does nothing. Raises
        `Unavailable` where replicas may be left on a cluster elsewhere, as its head is away."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        async with AsyncExitStack() as ending:  # Each step is made, even if one before it fails.
            ending.push_async_callback(self._stop_redis)
            ending.callback(self._secret_files.forget)
            # Ray's processes end with it, and with them every client of Redis.
            ending.push_async_callback(self.ray.disconnect)
            if not self._is_own:
                return
            self._is_own = False
            try:
                await self._end()
            except Unavailable as error:
                if not self.ray.local:
                    raise
                _log.warning("the replicas end with Ray's processes: %s", error)

    async def _stop_redis(self) -> None:
        if self.redis is not None:
            await asyncio.to_thread(self.redis.stop)
            self.redis = None

    async def _end(self) -> None:
        """The replicas in order, and whatever is left of them without."""
        closing = ReconcilerClient(self.ray.namespace, CLOSE_AWAY_S)
        try:
            await closing.call("close", timeout_s=close_timeout_s(self.config.stop_timeout_s))
        except OutriderError as error:
            _log.warning("the replicas do not end in order: %s", error)
        try:
            if (reconciler := await find_reconciler(self.ray.namespace)) is not None:
                await reconciler.kill()
        finally:
            await Cluster(self.ray.namespace, local=self.ray.local).clear()


async def _keep_running(redis: EmbeddedRedis) -> None:
    """Starts the embedded server again where it has died; it has its data on disk. Keeps its log
    small."""
    while True:
        await asyncio.sleep(REDIS_LOOK_PERIOD_S)
        redis.rotate_log()
        if redis.running:
            continue
        _log.error("the embedded Redis has died, and is started again")
        try:
            await asyncio.to_thread(redis.stop)
            await asyncio.to_thread(redis.start)
        except Exception:  # noqa: BLE001 (without it nothing goes on, so it is tried again)
            _log.exception("it did not start")


async def _all(*work: Awaitable[Any]) -> list[Any]:
    """The results of all; waits for every one even if another fails or the caller is cancelled, so
    that nothing still starts while what was started is being stopped. Raises the first error, a
    `ConfigError` before others."""
    tasks = asyncio.gather(*work, return_exceptions=True)
    try:
        results = await asyncio.shield(tasks)
    except asyncio.CancelledError:
        await tasks
        raise
    raise_first(results)
    return results
