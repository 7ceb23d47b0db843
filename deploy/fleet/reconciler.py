"""The actor that keeps a deployment as it should be, and how it is asked for changes. It outlives
the process that started it, and Ray starts it again where it dies: then it takes over the replicas
that are there.

| it knows | from |
| --- | --- |
| how replicas are made | its own arguments, which Ray keeps |
| which there are | Ray, by their names, and each of them |
| how many there should be | Redis, where nothing but counts is read |
| which settings and bounds are others since, and what is tried | Ray's head (`Cluster.save`) |
| how a trial goes | the coordinators |

Ray lets in only callers that show the cluster's token, and they may run code anyway. So this, and
nothing in Redis, is how settings come to a deployment that runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from outrider.config import BOUND_SETTINGS, AutoscaleConfig, DeploymentConfig, configuration
from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import Role
from outrider.replica.process_setup import PlacedActor, log_at, log_to
from outrider.sessions.redis_address import with_password
from outrider.settings import Value

from .autoscaling import Autoscaler
from .local_state import DeploymentLocation, namespace_of
from .preflight import check_same_tokens, listeners, resolve_models
from .ray_cluster import (
    RECONCILER,
    Actor,
    Cluster,
    RayConnection,
    asking_head,
    resources,
    retried,
    run_task,
)
from .replica_set import FIRST_REST_S, Fleet, Overview
from .spec import FleetSpec, plan_fleet
from .trial import Trial, TrialReport, added, check_share, check_trial, judged

_SAME_REDIS = "sessions stay in their Redis"
_SCALE = "use `outrider scale`"
FIXED = {
    "address": "a deployment stays on its cluster",
    "deployment_name": "a deployment keeps its name",
    "redis_url": _SAME_REDIS,
    "redis_username": _SAME_REDIS,
    "redis_password": _SAME_REDIS,
    "redis_password_file": _SAME_REDIS,
    "redis_sentinel_password": _SAME_REDIS,
    "redis_key_prefix": _SAME_REDIS,
    "api_key": "a deployment keeps its keys; give an --api-key-file, whose keys may change",
    "num_targets": _SCALE,
    "num_drafts": _SCALE,
    "num_coordinators": _SCALE,
}
"""Settings that hold as long as a deployment runs, and what to do instead."""
SWITCHES = ("internal_tls_dir",)
"""Settings that may be others, but neither begin nor end."""
SHARING = frozenset({"device", "target_num_gpus", "draft_num_gpus", "tensor_parallel_size",
                            "draft_tensor_parallel_size"})  # fmt: skip
"""Changes that name one of these have the cluster's GPUs counted, and shared out, anew."""


Tried = tuple[dict[str, Value], float, float]
"""The settings, the share and the seconds of a `Trial`."""
Changes = tuple[dict[str, Value], float | None, Tried | None]
"""What differs from the settings that a deployment was started with, by `outrider upgrade` and
`autoscale`; `cluster_gpus` of a `FleetSpec`, where they were counted again; and what is tried."""


def changed(given: DeploymentConfig, changes: Mapping[str, Value]) -> DeploymentConfig:
    """What was given, with these settings in its place. Raises `SettingError` for one that cannot
    change while a deployment runs, and for values that do not go together."""
    values = given.values()
    for key, value in changes.items():
        if key in FIXED and value != values.get(key):
            raise SettingError(key, f"cannot be another one while a deployment runs: {FIXED[key]}")
        if key in SWITCHES and bool(value) != bool(values.get(key)):
            raise SettingError(
                key,
                "cannot be turned on or off while a deployment runs: its replicas would not "
                "understand each other meanwhile",
            )
    if changes.get("model", given.target.model) != given.target.model:
        # What was chosen for the other target need not fit this one.
        del values["draft_model"]
    return configuration(values | dict(changes))


def _shared(values: Mapping[str, Value], gpus: float | None) -> float | None:
    """The cluster's GPUs that are shared out with these changes, and were with those before."""
    return gpus if SHARING.isdisjoint(values) else resources().get("GPU", 0.0)


_log = logging.getLogger(__name__)

AWAY_S = 60.0
"""A reconciler that has died is started again by Ray within seconds; after so long it is lost."""
RETRY_PERIOD_S = 0.5
"""Until one that did not answer is asked again."""
NEWS_S = 10.0
"""Longest wait for another overview ..."""
NEWS_PERIOD_S = 0.5
"""... and between two looks at whether there is one."""
TRIAL_LOOK_S = 2.0
"""Between two looks at how a trial goes."""
TRIAL_CALL_S = 5.0
"""What a coordinator may take to tell."""
END_TRIAL = "end it with `outrider upgrade --trial-share 0`"
CHANGE_S = 900.0
"""What making a plan of other settings may take: a model's files may have to be fetched."""


class Reconciler(PlacedActor):
    """Hosts a `Fleet`."""

    def __init__(self, spec: FleetSpec, namespace: str) -> None:
        """`namespace` is that of its actors. One that Ray has started again goes on."""
        import ray

        log_to(spec.log_directory, RECONCILER, spec.config.coordinator.log_level)
        redis = spec.config.coordinator.redis
        self._no_password: SettingError | None = None
        try:
            redis = with_password(redis)
        except SettingError as error:  # A method tells: Ray flattens what a constructor raises.
            self._no_password = error
        self._original = spec
        self._changes: Changes = {}, None, None
        """Those that hold, all together since the deployment began."""
        self._report: TrialReport | None = None
        self._trial_over_at = math.inf
        """When the time of a trial is over, of the loop's clock. It begins once its replica
        serves, and anew where this reconciler returns."""
        self._changing = asyncio.Lock()
        self._registry = RedisRegistry(redis, spec.deployment)
        self._cluster = Cluster(namespace, local=spec.local)
        self._fleet = Fleet(self._cluster, spec, self._registry)
        self._autoscaler = Autoscaler(self._registry, spec.config.autoscale)
        self._keeps = asyncio.Event()
        """Set once it keeps the fleet, and knows what held before; or has failed to start it."""
        self._closing: asyncio.Task[None] | None = None
        self._upgrades = returns = ray.get_runtime_context().was_current_actor_reconstructed
        self._work: asyncio.Task[None] | None = None
        if returns:
            _log.warning("the reconciler has died, and returns")
            self._work = asyncio.create_task(self._keep(returns=True))

    async def start(self) -> None:
        """Starts all replicas, and keeps them from then on. Raises as `Fleet.start`, and
        `SettingError` where its machine has no password of Redis."""
        if self._work is None:
            if self._no_password is not None:
                raise self._no_password
            # First, for one that Ray restarts from now on goes by what is saved.
            await self._cluster.save("")
            self._work = asyncio.create_task(self._fleet.start())  # `close` may cancel it.
            try:
                await self._work
            except BaseException:
                self._keeps.set()
                raise
            self._work = asyncio.create_task(self._keep(returns=False))
        await self._ready()

    async def _ready(self) -> None:
        """Returns once it keeps the fleet. Raises what starting it has failed with, but no
        `Unavailable`: that is a reconciler that is away, and is asked again."""
        await self._keeps.wait()
        try:
            if self._work is not None and self._work.done() and not self._work.cancelled():
                self._work.result()
        except Unavailable as error:
            raise OutriderError(f"the deployment did not start: {error}") from error

    async def want(self, counts: Mapping[Role, int]) -> AutoscaleConfig:
        """So many replicas of these roles from now on; by what the load may change that. Raises
        `ConfigError` for counts that cannot be, and `StoreUnavailable`."""
        await self._ready()
        for role, count in counts.items():
            self._fleet.spec.check_count(role, count)
        await self._registry.want(counts)
        return self._autoscaler.config

    async def change(self, values: dict[str, Value]) -> AutoscaleConfig:
        """Adds settings to the changes that hold; how the load changes numbers then. Raises
        `ConfigError` for settings that cannot be, and `Unavailable`; then what held still holds."""
        await self._ready()
        if not values:
            return self._autoscaler.config
        async with self._changing:
            before, fleet = self._changes, self._fleet
            if fleet.trial is not None and not values.keys() <= {*BOUND_SETTINGS}:
                raise ConfigError(f"{self._report}; wait for its end, or {END_TRIAL}")
            changes, gpus = before[0] | values, _shared(values, before[1])
            if values.keys() <= {*BOUND_SETTINGS}:
                given = changed(self._original.given, changes)
                config = replace(fleet.spec.config, autoscale=given.autoscale)
                spec = replace(fleet.spec, given=given, config=config)
            else:
                spec = await self._plan(changes, gpus)
                await run_task(check_same_tokens, fleet.spec.config.target, spec.config.target)
            for role, bounds in spec.config.autoscale.bounds.items():
                for count in bounds if f"autoscale_{role}s" in values else ():
                    spec.check_count(role, count)
            fleet.settled(spec)
            if "draft_model" in values and "draft" in spec.demands:
                wanted = await self._registry.wanted()
                if not wanted.get("draft"):  # No replica drafted before.
                    await self._registry.want({"draft": spec.counts["draft"]})
            await self._adopt_spec(spec, (changes, gpus, before[2]))
            _log.info("other settings: %s", ", ".join(values))
        return self._autoscaler.config

    async def _adopt_spec(self, spec: FleetSpec, changes: Changes) -> None:
        before = self._changes
        await self._save(*changes)
        try:
            self._use(spec)
        except BaseException:  # A replica has been placed since it was checked.
            await self._save(*before)
            raise

    async def begin_trial(self, values: dict[str, Value], share: float, seconds: float) -> None:
        """Tries settings of draft replicas by one of these on a share of the new sessions, and goes
        on with them where they are better. Raises as `change`, and `ConfigError` for what cannot be
        tried. Repeating it does nothing."""
        await self._ready()
        async with self._changing:
            (changes, gpus, tried), fleet = self._changes, self._fleet
            if tried is not None:
                if tried == (values, share, seconds):
                    return
                raise ConfigError(f"{self._report}; wait for its end, or {END_TRIAL}")
            spec = await self._plan(changes | values, _shared(values, gpus))
            check_trial(fleet.spec, spec)
            fleet.settled(spec)
            if self._overview().num_stale or not fleet.wanted["draft"]:
                raise ConfigError(
                    "--trial-share: draft replicas are compared with the new one: wait until all "
                    "are of one kind, and `outrider scale draft=1` where there is none"
                )
            check_share(share, fleet.wanted["draft"])
            await self._save(changes, gpus, (values, share, seconds))
            self._try_out(Trial(values, share, seconds, spec))

    def _try_out(self, trial: Trial) -> None:
        self._report = TrialReport(trial.spec.given.draft.model, trial.share)
        self._trial_over_at = math.inf
        self._fleet.try_out(trial)
        _log.info("%s", self._report)

    async def end_trial(self) -> None:
        """Ends the trial that runs, if one does: what held before still holds."""
        await self._ready()
        if (trial := self._fleet.trial) is not None:
            await self._decide(trial, False, "it was ended by `outrider upgrade --trial-share 0`")

    async def _watch_trials(self) -> None:
        while True:
            await asyncio.sleep(TRIAL_LOOK_S)
            if (trial := self._fleet.trial) is None:
                continue
            try:
                is_better, reason = await self._compare(trial)
                await self._decide(trial, is_better, reason)
            except Exception as error:  # noqa: BLE001 (the fleet goes on, and it is looked at again)
                known = isinstance(error, OutriderError)
                _log.warning("the trial of a drafter goes on: %s", error, exc_info=not known)

    async def _compare(self, trial: Trial) -> tuple[bool | None, str]:
        """As `judged`."""
        fleet, now = self._fleet, asyncio.get_running_loop().time()
        if fleet.trial_failure:
            return False, fleet.trial_failure
        replica = fleet.on_trial
        if replica is None or not replica.address:
            return None, "its replica is being started"
        self._trial_over_at = min(self._trial_over_at, now + trial.seconds)
        serving = [one for one in fleet.of("coordinator") if one.address and not one.leaves]
        found = await asyncio.gather(
            *(one.leader.call("trial_sums", timeout_s=TRIAL_CALL_S) for one in serving),
            return_exceptions=True,
        )
        told = [one for one in found if not isinstance(one, BaseException)]  # Silent for long.
        return judged(added(told, replica.name), now >= self._trial_over_at)

    async def _decide(self, trial: Trial, is_better: bool | None, reason: str) -> None:
        """Notes how the trial goes, and ends it where that is decided."""
        async with self._changing:
            if self._fleet.trial is not trial or self._report is None:
                return
            changes, gpus, _ = self._changes
            if is_better is None:
                self._report = replace(self._report, reason=reason)
                return
            if is_better:
                taken, shared = changes | trial.values, trial.spec.cluster_gpus
                try:
                    await self._adopt_spec(await self._plan(taken, shared), (taken, shared, None))
                except ConfigError as error:
                    is_better, reason = False, f"{error} ({reason})"
            if not is_better:
                await self._save(changes, gpus, None)
            self._report = replace(
                self._report, state="taken" if is_better else "not taken", reason=reason
            )
            self._fleet.try_out(None)
            _log.info("%s", self._report)

    async def _plan(self, changes: Mapping[str, Value], gpus: float | None) -> FleetSpec:
        """By all changes together. Raises `ConfigError` for what cannot work."""
        before = self._original
        given = changed(before.given, changes)
        if before.local:
            listeners(given)
        # In a process of its own: the model library stays there.
        config = await run_task(resolve_models, given)
        coordinator = config.coordinator.reaching(before.config.coordinator.redis)
        return plan_fleet(
            given, replace(config, coordinator=coordinator),
            {"GPU": before.cluster_gpus if gpus is None else gpus}, before.deployment,
            before.log_directory, local=before.local,
        )  # fmt: skip

    async def _save(self, *changes: Any) -> None:
        await self._cluster.save(json.dumps(changes))
        self._changes = changes

    async def _restore(self) -> None:
        """Goes by the changes that an earlier reconciler of the deployment had saved."""
        if text := await self._cluster.saved():
            match json.loads(text):
                case [dict() as values, None | int() | float() as gpus, None | list() as tried]:
                    self._use(await self._plan(values, gpus))
                    self._changes = values, gpus, None
                    if tried is not None:
                        await self._restore_trial(*tried)
                case _:
                    raise ValueError("what Ray's head has are no changes of this release")

    async def _restore_trial(self, values: dict[str, Value], share: float, seconds: float) -> None:
        changes, gpus, _ = self._changes
        try:
            spec = await self._plan(changes | values, _shared(values, gpus))
        except ConfigError as error:  # The fleet is to be kept all the same.
            await self._save(changes, gpus, None)
            model = str(values.get("draft_model", self._fleet.spec.given.draft.model))
            self._report = TrialReport(model, share, "not taken", str(error))
            _log.error("%s", self._report)
            return
        self._changes = changes, gpus, (values, share, seconds)
        self._try_out(Trial(values, share, seconds, spec))

    def _use(self, spec: FleetSpec) -> None:
        log_at(spec.config.coordinator.log_level)
        self._fleet.use(spec)
        self._autoscaler.config = spec.config.autoscale
        self._upgrades = True

    async def spec(self) -> FleetSpec:
        return self._fleet.spec

    async def overview(self, seen: Overview | None = None) -> Overview:
        """What there is, once that is known and another than what was `seen`, or after `NEWS_S`.
        Raises as `_ready`."""
        await self._ready()
        loop = asyncio.get_running_loop()
        until = loop.time() + NEWS_S
        while True:
            found = self._overview()
            if found != seen or loop.time() >= until:
                return found
            await asyncio.sleep(NEWS_PERIOD_S)

    def _overview(self) -> Overview:
        fleet = self._fleet
        found = Overview(
            dict(fleet.wanted),
            fleet.views(),
            fleet.hopeless,
            self._upgrades,
            fleet.failures,
            self._report,
        )
        self._upgrades = found.num_stale > 0
        return found

    async def ends(self) -> bool:
        """Whether it has been told to `close`: then there is nothing to be taken over."""
        return self._closing is not None

    async def close(self) -> None:
        """Ends what it was about to do, and all replicas, also where the caller goes away.
        Idempotent: concurrent callers await the same end."""
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
            _log.warning("changes of this deployment are still saved: %s", error)
        await self._registry.close()

    async def _keep(self, returns: bool) -> None:
        try:
            if returns:
                if self._no_password is not None:
                    raise self._no_password
                await retried("the changes that hold", self._restore)
                await self._fleet.adopt()
            self._keeps.set()
            await asyncio.gather(self._fleet.run(), self._autoscaler.run(), self._watch_trials())
        except Exception:  # noqa: BLE001 (whatever it is, another one may do better)
            _log.exception("the fleet is not looked after any more")
            await asyncio.sleep(FIRST_REST_S)
            os._exit(1)  # Ray starts this again.


def start_reconciler(spec: FleetSpec, namespace: str) -> Actor:
    """Starts the reconciler of a deployment."""
    found = Actor(RECONCILER, None)
    found.start(Reconciler, namespace, spec, namespace, num_cpus=0, max_restarts=-1)
    return found


async def find_reconciler(namespace: str) -> Actor | None:
    """The one of a deployment, if there is one. Raises `Unavailable` where Ray's head does not
    answer."""
    import ray

    with asking_head(), suppress(ValueError):
        handle = await asyncio.to_thread(ray.get_actor, RECONCILER, namespace)
        return Actor(RECONCILER, handle)
    return None


@asynccontextmanager
async def connect_reconciler(where: DeploymentLocation) -> AsyncIterator[ReconcilerClient]:
    """Connects to the cluster, and leaves it in the end. Raises `SettingError` for one that cannot
    be reached."""
    connection = RayConnection(where.address, namespace_of(where.deployment), token=where.token)
    try:
        await connection.connect()
        yield ReconcilerClient(connection.namespace)
    finally:
        await connection.disconnect()


class ReconcilerClient:
    """Calls a reconciler, and again while it is away."""

    def __init__(self, namespace: str, away_s: float = AWAY_S) -> None:
        """It may be away for so long."""
        self._namespace = namespace
        self._away_s = away_s

    async def call(self, method: str, *arguments: object, timeout_s: float | None = AWAY_S) -> Any:
        """What a method returns. It may be called twice. Raises what it raises, and `Unavailable`
        where there is none, it does not answer in `timeout_s`, or is away for too long."""
        loop = asyncio.get_running_loop()
        give_up_at = None
        while True:
            try:
                found = await find_reconciler(self._namespace)  # It may be another one.
                if found is not None:
                    return await found.call(method, *arguments, timeout_s=timeout_s)
            except Unavailable as error:
                give_up_at = give_up_at or loop.time() + self._away_s
                if isinstance(error.__cause__, TimeoutError) or loop.time() > give_up_at:
                    raise
            else:
                raise Unavailable("no deployment of this name runs on the Ray cluster")
            await asyncio.sleep(RETRY_PERIOD_S)
