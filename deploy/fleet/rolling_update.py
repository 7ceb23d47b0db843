"""Other settings for a deployment that runs: its replicas are replaced one by one.

The reconciler makes a plan of the settings that it is asked for, and goes by it from then on. Those
that hold, all together since the deployment began, are kept (`saved_state.py`) for a reconciler
that returns.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final, Self

from outrider.config import DeploymentConfig, TargetConfig, configuration
from outrider.errors import OutriderError, SettingError
from outrider.registry.registry import Registry
from outrider.replica.process_setup import available_cores
from outrider.settings import Value

from .placement import plan_placement, share_cores
from .ray_cluster import resources
from .saved_state import Kept
from .spec import FleetSpec

_log = logging.getLogger(__name__)

RETRY_PERIOD_S: Final = 1.0
"""Until what is kept is read again, where that failed."""
KEPT: Final = {
    "address": "a deployment stays on its cluster",
    "deployment_name": "a deployment keeps its name",
    "redis_url": "sessions stay in their Redis",
    "redis_username": "sessions stay in their Redis",
    "redis_password": "sessions stay in their Redis",
    "redis_password_file": "sessions stay in their Redis",
    "redis_sentinel_password": "sessions stay in their Redis",
    "redis_key_prefix": "sessions stay in their Redis",
    "api_key": "a deployment keeps its keys; give an --api-key-file, whose keys may change",
    "num_targets": "use `outrider scale`",
    "num_drafts": "use `outrider scale`",
    "num_coordinators": "use `outrider scale`",
    "autoscale_targets": "use `outrider autoscale`",
    "autoscale_drafts": "use `outrider autoscale`",
    "autoscale_coordinators": "use `outrider autoscale`",
}
"""Settings that hold as long as a deployment runs, and what to do instead."""
SWITCHES: Final = ("internal_tls_dir",)
"""Settings that may be others, but neither begin nor end."""
SHARING: Final = frozenset({"device", "target_num_gpus", "draft_num_gpus", "tensor_parallel_size",
                            "draft_tensor_parallel_size"})  # fmt: skip
"""Changes that name one of these have the cluster's GPUs counted, and shared out, anew."""
STAYS: Final = ("redis_url", "redis_key_prefix")
"""Those of them without which a deployment is another one."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Settings that are others than those that the deployment was started with."""

    name: str
    """Another one for each set of them."""
    values: Mapping[str, Value]
    cluster_gpus: float | None = None
    """As of a `Placement`, where they were counted again; None = as at the start."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `ValueError` for what is no set of changes."""
        found = json.loads(text)
        if not isinstance(found, dict) or not isinstance(found.get("values"), dict):
            raise ValueError("changes are an object with values")
        return cls(str(found.get("name", "")), found["values"], found.get("cluster_gpus"))


def check_changes(given: Mapping[str, Value], changes: Mapping[str, Value]) -> None:
    """Raises `SettingError` for one of the changes that cannot be made to the `given` settings
    while a deployment runs."""
    for key, value in changes.items():
        if key in KEPT and value != given.get(key):
            raise SettingError(key, f"cannot be another one while a deployment runs: {KEPT[key]}")
        if key in SWITCHES and bool(value) != bool(given.get(key)):
            raise SettingError(
                key,
                "cannot be turned on or off while a deployment runs: its replicas would not "
                "understand each other meanwhile",
            )


def changed(given: DeploymentConfig, changes: Mapping[str, Value]) -> DeploymentConfig:
    """What was given, with these settings in its place. Raises as `check_changes`, and
    `SettingError` for values that do not go together."""
    values = given.values()
    check_changes(values, changes)
    if changes.get("model", given.target.model) != given.target.model:
        # What was chosen for the other target need not fit this one.
        del values["draft_model"]
    return configuration(values | dict(changes))


def make_blueprint(
    given: DeploymentConfig,
    found: DeploymentConfig,
    amounts: Mapping[str, float],
    deployment: str,
    logs: str,
    *,
    local: bool,
) -> FleetSpec:
    """`found` is what was `given`, with the models' files and Redis; `amounts` are the cluster's
    resources. Raises as `plan_placement`."""
    if local:
        found = share_cores(found, available_cores())
    return FleetSpec(
        placement=plan_placement(found, amounts),
        deployment=deployment,
        log_directory=logs,
        local=local,
        given=given,
    )


class Rollout:
    """Makes plans of the changes that are asked for."""

    def __init__(
        self,
        kept: Kept,
        registry: Registry,
        blueprint: FleetSpec,
        resolve: Callable[[DeploymentConfig], Awaitable[DeploymentConfig]],
        check_target: Callable[[TargetConfig, TargetConfig], Awaitable[None]],
        go_by: Callable[[FleetSpec], None],
    ) -> None:
        """`blueprint` is the plan without changes; `resolve` finds the models' files, as
        `resolve_models`; `check_target` refuses a target that cannot follow the one that runs, as
        `check_same_tokens`; `go_by` hears of another plan."""
        self._kept = kept
        self._registry = registry
        self._original = self._plan_that_holds = blueprint
        self._resolve = resolve
        self._check_target = check_target
        self._go_by = go_by
        self._holds = Changes("", {})
        """All changes together."""
        self._made: set[str] = set()
        """Names of those that were made, so that none is made twice."""
        self._one_at_a_time = asyncio.Lock()

    async def begin(self) -> None:
        """There are no changes yet, whatever a deployment of this name had before. Raises
        `Unavailable`."""
        await self._kept.save("changes", "")

    async def return_to(self) -> None:
        """Goes by the changes that held when another one had the care of the fleet; until their
        plan is known nothing is done."""
        while True:
            try:
                if text := await self._kept.load("changes"):
                    changes = Changes.from_json(text)
                    self._go(changes, await self._plan(changes))
                return
            except (OutriderError, ValueError) as error:
                _log.warning("the changes that hold are not known yet: %s", error)
                await asyncio.sleep(RETRY_PERIOD_S)

    async def change(self, name: str, values: Mapping[str, Value]) -> None:
        """Adds settings to the changes that hold, after those that were asked for before. `name`
        is another one for each request: one that is made again after a lost answer changes
        nothing. Raises `ConfigError` for settings that cannot be, and `Unavailable`; then what held
        still holds."""
        async with self._one_at_a_time:
            if name in self._made:
                return
            before, gpus = self._holds, self._holds.cluster_gpus
            if not SHARING.isdisjoint(values):
                gpus = resources().get("GPU", 0.0)
            changes = Changes(name, {**before.values, **values}, gpus)
            plan = await self._plan(changes)
            runs, follows = self._plan_that_holds.placement.config, plan.placement.config
            await self._check_target(runs.target, follows.target)
            if "draft_model" in values and plan.placement.draft is not None:
                wanted = await self._registry.wanted()
                if not wanted.get("draft"):  # No replica drafted before.
                    await self._registry.want({"draft": plan.counts["draft"]})
            plan_before = self._plan_that_holds
            self._go(changes, plan)
            try:
                await self._kept.save("changes", changes.to_json())
            except BaseException:
                self._go(before, plan_before)
                self._made.discard(name)
                raise
            _log.info("other settings: %s", ", ".join(values))

    def _go(self, changes: Changes, plan: FleetSpec) -> None:
        self._go_by(plan)
        self._plan_that_holds, self._holds = plan, changes
        self._made.add(changes.name)

    async def _plan(self, changes: Changes) -> FleetSpec:
        """Raises `ConfigError` for what cannot work."""
        before, gpus = self._original, changes.cluster_gpus
        if gpus is None:
            gpus = before.placement.cluster_gpus
        given = changed(before.given, changes.values)
        config = await self._resolve(given)
        coordinator = config.coordinator.reaching(before.redis)
        return make_blueprint(
            given, replace(config, coordinator=coordinator), {"GPU": gpus}, before.deployment,
            before.log_directory, local=before.local,
        )  # fmt: skip
