"""The reconciler is the actor that keeps a deployment in its wanted state. It survives the process
that started it. If the reconciler dies, Ray restarts it, and it takes over the replicas.

| the reconciler reads | from |
| --- | --- |
| the original settings | its arguments, which Ray keeps |
| which replicas exist | Ray, and the replicas |
| the wanted numbers of replicas | Redis |
| changed settings and autoscaling bounds, and a trial's drafter | Ray's head (`Cluster.save`) |
| the results of the trial | the coordinators |

Redis holds no settings, because more processes can write to Redis than to Ray. Settings change only
by calls through Ray, which need the cluster's token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from pydantic import TypeAdapter

from outrider.config.deployment import (
    BOUND_SETTINGS,
    AutoscaleConfig,
    DeploymentConfig,
    configuration,
)
from outrider.drafters.names import same_drafter
from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.foundation.settings import Value
from outrider.redis.address import with_password
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import Role
from outrider.replica.logs import log_at, log_to
from outrider.replica.ray_actor import RayActor

from .autoscaling import AUTOSCALING_PERIOD_S, Autoscaler
from .local_state import DeploymentLocation, namespace_of
from .preflight import check_same_tokens, listeners, resolve_models
from .ray_cluster import (
    RECONCILER,
    Actor,
    Cluster,
    RayConnection,
    asking_head,
    repeated,
    retried,
    run_task,
)
from .replica_set import FIRST_RETRY_DELAY_S, Fleet, Overview
from .spec import FleetSpec, plan_fleet
from .trial import Trial, TrialReport, added, check_share, check_trial, check_weights, judged

_REDIS = (
    "redis_url",
    "redis_username",
    "redis_password",
    "redis_password_file",
    "redis_sentinel_password",
    "redis_key_prefix",
)
FIXED = {
    "address": "a deployment stays on its cluster",
    "deployment_name": "a deployment keeps its name",
    **dict.fromkeys(_REDIS, "sessions stay in their Redis"),
    "api_key": "a deployment keeps its keys; give an --api-key-file, whose keys may change",
    **dict.fromkeys(("num_targets", "num_drafts", "num_coordinators"), "use `outrider scale`"),
}
"""Settings that cannot change while a deployment runs, with the reason or an alternative."""

Changes = tuple[dict[str, Value], tuple[str, float] | None]
"""The changed settings by key, and the running trial's draft model and share (None = no trial)."""


def changed(given: DeploymentConfig, changes: Mapping[str, Value]) -> DeploymentConfig:
    """`given` with `changes`. Raises `SettingError` for a setting that cannot change while a
    deployment runs, and for values that exclude each other."""
    values = given.values()
    for key, value in changes.items():
        if key in FIXED and value != values.get(key):
            raise SettingError(key, f"cannot change while a deployment runs: {FIXED[key]}")
        if key == "internal_tls_dir" and bool(value) != bool(values.get(key)):
            raise SettingError(
                key,
                "cannot be turned on or off while a deployment runs: old and new replicas could "
                "not call each other",
            )
    if changes.get("model", given.target.model) != given.target.model:
        del values["draft_model"]  # The user chose this draft model for the old target.
    return configuration(values | dict(changes))


def differing(
    given: DeploymentConfig, requested: Mapping[str, Value], kept: Collection[str]
) -> dict[str, Value]:
    """The settings in `requested` that differ from `given`, without the keys in `kept`."""
    runs = given.values()
    changes = {
        key: value for key, value in requested.items() if key not in kept and value != runs[key]
    }
    requested_drafter = changes.get("draft_model")
    if requested_drafter and same_drafter(str(requested_drafter), given.draft.model):
        del changes["draft_model"]
    return changes


_log = logging.getLogger(__name__)
AWAY_S = 60.0
"""A restart takes seconds, so a reconciler that is silent for this time counts as lost."""
RETRY_PERIOD_S = 0.5
NEWS_S = 10.0
NEWS_PERIOD_S = 0.5
TRIAL_CHECK_S = 2.0
TRIAL_CALL_S = 5.0
END_TRIAL = "end it with `outrider upgrade --trial-share 0`"
SLOW_S = 900.0
"""Time limit of `change` and `begin_trial`, which may have to fetch a model."""


class Reconciler(RayActor):
    """Supervises a `Fleet`. After a restart by Ray, begins without a call of `start`."""

    def __init__(self, spec: FleetSpec, namespace: str) -> None:
        log_to(spec.log_directory, RECONCILER, spec.config.coordinator.log_level)
        redis = spec.config.coordinator.redis
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the fleet is supervised with all saved changes, or has failed to start."""
        try:
            redis = with_password(redis)
        except SettingError as error:
            # Ray delivers only the text of a constructor's error, so `start` raises the error.
            self._begun.set_exception(error)
        self._original = spec
        self._changes: Changes = {}, None
        self._report: TrialReport | None = None
        self._trial_over_at = math.inf
        """End of the trial by the event loop's clock; infinite until the trial's replica serves."""
        self._changing = asyncio.Lock()
        self._registry = RedisRegistry(redis, spec.deployment)
        self._cluster = Cluster(namespace, local=spec.local)
        self._fleet = Fleet(self._cluster, spec, self._registry)
        self._autoscaler = Autoscaler(self._registry, spec.config.autoscale)
        self._closing: asyncio.Task[None] | None = None
        self._upgrades = returns = ray.get_runtime_context().was_current_actor_reconstructed
        self._work: asyncio.Task[None] | None = None
        if returns:
            _log.warning("the reconciler was restarted")
            self._work = asyncio.create_task(self._keep(returns=True))

    async def start(self) -> None:
        if self._work is None:
            self._work = asyncio.create_task(self._start())
        await self._ready()

    async def _start(self) -> None:
        if self._begun.done():
            return
        try:
            await self._cluster.save("")  # An earlier deployment may have saved changes.
            await self._fleet.start()
        except (asyncio.CancelledError, Unavailable) as error:
            # Not `Unavailable`, because a `ReconcilerClient` would then repeat its call.
            reason = f"the deployment did not start: {str(error) or 'it was stopped'}"
            self._begun.set_exception(OutriderError(reason))
        except Exception as error:  # noqa: BLE001 (`_ready` raises it)
            self._begun.set_exception(error)
        else:
            await self._keep(returns=False)

    async def _ready(self) -> None:
        """Waits until the fleet is supervised. Raises an `OutriderError` if the start failed."""
        await asyncio.shield(self._begun)

    async def want(self, counts: Mapping[Role, int]) -> AutoscaleConfig:
        """Stores wanted numbers of replicas. Returns the settings of autoscaling."""
        await self._ready()
        for role, count in counts.items():
            self._fleet.spec.check_count(role, count)
        await self._registry.want(counts)
        return self._autoscaler.config

    async def change(self, values: dict[str, Value]) -> None:
        """Changes settings. Raises `Unavailable`, and `ConfigError` for settings that cannot work.
        After an error, no setting has changed."""
        await self._ready()
        async with self._changing:
            (before, tried), fleet = self._changes, self._fleet
            only_bounds = values.keys() <= {*BOUND_SETTINGS}
            if fleet.trial is not None and not only_bounds:
                raise ConfigError(f"{self._report}; wait for the trial's end, or {END_TRIAL}")
            changes = before | values
            if only_bounds:  # No model changes, so the files of models are not looked up again.
                given = changed(self._original.given, changes)
                config = replace(fleet.spec.config, autoscale=given.autoscale)
                spec = replace(fleet.spec, given=given, config=config)
            else:
                spec = await self._plan(changes)
                await run_task(check_same_tokens, fleet.spec.config.target, spec.config.target)
            for role, bounds in spec.config.autoscale.bounds.items():
                for count in bounds if f"autoscale_{role}s" in values else ():
                    spec.check_count(role, count)
            fleet.settled(spec)
            begins_drafting = "draft" in spec.demands and not fleet.wanted["draft"]
            if begins_drafting and "draft_model" in values:
                await self._registry.want({"draft": spec.counts["draft"]})
            await self._adopt_spec(spec, (changes, tried))
            _log.info("changed settings: %s", ", ".join(values))

    async def _adopt_spec(self, spec: FleetSpec, changes: Changes) -> None:
        before = self._changes
        await self._save(*changes)
        try:
            self._use(spec)
        except BaseException:  # For example, replicas on several machines bind loopback.
            await self._save(*before)
            raise
        if "draft" not in spec.demands:
            with suppress(OutriderError):  # Only a metric reads this number.
                await self._registry.want({"draft": 0})

    async def begin_trial(self, values: dict[str, Value], share: float, seconds: float) -> None:
        """Begins a trial. One more replica, with the settings `values`, gets a share of the new
        sessions. If its sessions are faster than the others, all replicas get the settings.
        Idempotent. Raises like `change`, and `ConfigError` for settings that cannot be tried."""
        await self._ready()
        async with self._changing:
            (changes, _), fleet = self._changes, self._fleet
            if (runs := fleet.trial) is not None:
                if (runs.values, runs.share, runs.seconds) == (values, share, seconds):
                    return
                raise ConfigError(f"{self._report}; wait for the trial's end, or {END_TRIAL}")
            spec = await self._plan(changes | values)
            check_trial(fleet.spec, spec)
            fleet.settled(spec)
            trial = Trial(values, share, seconds, spec)
            if self._overview().num_stale or not fleet.wanted[trial.role]:
                raise ConfigError(
                    f"--trial-share: needs {trial.role} replicas that all run with the same "
                    "settings; wait for the end of the upgrade, or start a replica with `outrider "
                    f"scale {trial.role}=1`"
                )
            check_share(share, trial.role, fleet.wanted[trial.role])
            tried = spec.given.draft.model, share
            await self._save(changes, tried)
            self._report, self._trial_over_at = TrialReport(*tried), math.inf
            fleet.set_trial(trial)
            _log.info("%s", self._report)

    async def end_trial(self) -> None:
        await self._ready()
        if (trial := self._fleet.trial) is not None:
            await self._decide(trial, False, "it was ended by `outrider upgrade --trial-share 0`")

    async def _check_trial(self) -> None:
        if (trial := self._fleet.trial) is not None:
            is_better, reason = await self._compare(trial)
            await self._decide(trial, is_better, reason)

    async def _compare(self, trial: Trial) -> tuple[bool | None, str]:
        fleet, now = self._fleet, asyncio.get_running_loop().time()
        if fleet.trial_failure:
            return False, fleet.trial_failure
        replica = fleet.on_trial
        if replica is None or not replica.address:
            return None, "its replica is being started"
        if trial.role == "target":
            reason = check_weights(await self._registry.records("target"))
            if reason:
                return False, reason
        self._trial_over_at = min(self._trial_over_at, now + trial.seconds)
        serving = [
            coordinator
            for coordinator in fleet.of("coordinator")
            if coordinator.address and not coordinator.leaves
        ]
        answers = await asyncio.gather(
            *(
                coordinator.ranks[0].call("trial_sums", timeout_s=TRIAL_CALL_S)
                for coordinator in serving
            ),
            return_exceptions=True,
        )
        reports = [answer for answer in answers if not isinstance(answer, BaseException)]
        return judged(added(reports, replica.name), now >= self._trial_over_at)

    async def _decide(self, trial: Trial, is_better: bool | None, reason: str) -> None:
        """Updates the trial's report. Ends the trial unless `is_better` is None."""
        async with self._changing:
            if self._fleet.trial is not trial or self._report is None:
                return
            if is_better is None:
                self._report = replace(self._report, reason=reason)
                return
            changes, _ = self._changes
            if is_better:
                taken = changes | trial.values
                try:
                    await self._adopt_spec(await self._plan(taken), (taken, None))
                except ConfigError as error:
                    is_better, reason = False, f"{error} ({reason})"
            if not is_better:
                await self._save(changes, None)
            state: Any = "taken" if is_better else "not taken"
            self._report = replace(self._report, state=state, reason=reason)
            self._fleet.set_trial(None)
            _log.info("%s", self._report)

    async def _plan(self, changes: Mapping[str, Value]) -> FleetSpec:
        before = self._original
        given = changed(before.given, changes)
        if before.local:
            listeners(given)
        # `resolve_models` imports `transformers`, so another process runs the function.
        config = await run_task(resolve_models, given)
        coordinator = config.coordinator.reaching(before.config.coordinator.redis)
        return plan_fleet(
            given,
            replace(config, coordinator=coordinator),
            before.cluster_gpus,
            before.deployment,
            before.log_directory,
            local=before.local,
        )

    async def _save(self, *changes: Any) -> None:
        await self._cluster.save(json.dumps(changes))
        self._changes = changes

    async def _restore(self) -> None:
        """Applies saved changes and ends a saved trial. Raises `ValueError` for damaged changes."""
        if text := await self._cluster.saved():
            values, tried = TypeAdapter(Changes).validate_json(text)
            self._use(await self._plan(values))
            self._changes = values, None
            if tried is not None:
                await self._save(values, None)
                self._report = TrialReport(*tried, "not taken", "the reconciler died")

    def _use(self, spec: FleetSpec) -> None:
        log_at(spec.config.coordinator.log_level)
        self._fleet.use(spec)
        self._autoscaler.config = spec.config.autoscale
        self._upgrades = True

    async def spec(self) -> FleetSpec:
        return self._fleet.spec

    async def overview(self, seen: Overview | None = None) -> Overview:
        """Returns the overview as soon as it differs from `seen`, at the latest after `NEWS_S`."""
        await self._ready()
        loop = asyncio.get_running_loop()
        until = loop.time() + NEWS_S
        while True:
            overview = self._overview()
            if overview != seen or loop.time() >= until:
                return overview
            await asyncio.sleep(NEWS_PERIOD_S)

    def _overview(self) -> Overview:
        overview = self._fleet.overview(self._upgrades, self._report)
        self._upgrades = overview.num_stale > 0
        return overview

    async def ends(self) -> bool:
        return self._closing is not None

    async def close(self) -> None:
        """Ends all replicas, even if the caller dies meanwhile. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        await self._fleet.close()
        try:
            await self._cluster.save("")
        except Unavailable as error:
            _log.warning("the saved changes were not removed: %s", error)
        await self._registry.close()

    async def _keep(self, returns: bool) -> None:
        try:
            if returns:
                if self._begun.done():
                    await self._begun
                await retried("the saved changes cannot be read", self._restore)
                await self._fleet.adopt()
            self._begun.set_result(None)
            await asyncio.gather(
                self._fleet.run(),
                repeated(
                    self._autoscaler.adjust, AUTOSCALING_PERIOD_S, "autoscaling is interrupted"
                ),
                repeated(self._check_trial, TRIAL_CHECK_S, "the trial cannot be compared"),
            )
        except Exception:  # noqa: BLE001 (a restart may help)
            _log.exception("the reconciler failed, and restarts")
            await asyncio.sleep(FIRST_RETRY_DELAY_S)
            os._exit(1)


def start_reconciler(spec: FleetSpec, namespace: str) -> Actor:
    actor = Actor(RECONCILER, None)
    # On another node it would be lost with the replicas that it must replace.
    on_head = {"node:__internal_head__": 0.001}
    actor.start(
        Reconciler, namespace, spec, namespace, num_cpus=0, max_restarts=-1, resources=on_head
    )
    return actor


async def find_reconciler(namespace: str) -> Actor | None:
    """The running reconciler, or None. Raises `Unavailable` if Ray's head does not answer."""
    with asking_head(), suppress(ValueError):
        handle = await asyncio.to_thread(ray.get_actor, RECONCILER, namespace)
        return Actor(RECONCILER, handle)
    return None


@asynccontextmanager
async def connect_reconciler(where: DeploymentLocation) -> AsyncIterator[ReconcilerClient]:
    """Yields a client of the reconciler. Raises `SettingError` if Ray cannot be reached."""
    connection = RayConnection(where.address, namespace_of(where.deployment), token=where.token)
    try:
        await connection.connect()
        yield ReconcilerClient(connection.namespace)
    finally:
        await connection.disconnect()


@dataclass(frozen=True)
class ReconcilerClient:
    """Calls a reconciler. While Ray restarts the actor, repeats a call for at most `away_s`."""

    namespace: str
    away_s: float = AWAY_S

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """Calls a method, perhaps more than once. Raises the method's errors, and `Unavailable` if
        there is no reconciler, if it does not answer within `timeout_s` (by default `AWAY_S` or
        `SLOW_S`), or if its restart takes longer than `away_s`."""
        loop = asyncio.get_running_loop()
        limit_s = timeout_s or (SLOW_S if method in ("change", "begin_trial") else AWAY_S)
        give_up_at = None
        while True:
            try:  # A restart may have changed the reconciler's handle.
                if (reconciler := await find_reconciler(self.namespace)) is not None:
                    return await reconciler.call(method, *arguments, timeout_s=limit_s)
            except Unavailable as error:
                give_up_at = give_up_at or loop.time() + self.away_s
                if isinstance(error.__cause__, TimeoutError) or loop.time() > give_up_at:
                    raise
            else:
                raise Unavailable("no deployment of this name runs on the Ray cluster")
            await asyncio.sleep(RETRY_PERIOD_S)
