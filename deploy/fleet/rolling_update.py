"""Other settings for a deployment that runs: its replicas are replaced one by one.

The reconciler makes a spec of the settings that it is asked for, and goes by it from then on. Those
that hold, all together since the deployment began, are saved for a reconciler that Ray restarts.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from pydantic import TypeAdapter

from outrider.config import DeploymentConfig, TargetConfig, configuration
from outrider.errors import SettingError
from outrider.registry.registry import Registry
from outrider.settings import Value

from .ray_cluster import SavedState, resources, retried
from .spec import FleetSpec, plan_fleet

_log = logging.getLogger(__name__)

_SAME_REDIS: Final = "sessions stay in their Redis"
_SCALE: Final = "use `outrider scale`"
_AUTOSCALE: Final = "use `outrider autoscale`"
FIXED: Final = {
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
    "autoscale_targets": _AUTOSCALE,
    "autoscale_drafts": _AUTOSCALE,
    "autoscale_coordinators": _AUTOSCALE,
}
"""Settings that hold as long as a deployment runs, and what to do instead."""
SWITCHES: Final = ("internal_tls_dir",)
"""Settings that may be others, but neither begin nor end."""
SHARING: Final = frozenset({"device", "target_num_gpus", "draft_num_gpus", "tensor_parallel_size",
                            "draft_tensor_parallel_size"})  # fmt: skip
"""Changes that name one of these have the cluster's GPUs counted, and shared out, anew."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Settings that are others than those that the deployment was started with."""

    name: str
    """Another one for each set of them."""
    values: Mapping[str, Value]
    cluster_gpus: float | None = None
    """As of a `FleetSpec`, where they were counted again; None = as at the start."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Changes:
        """Raises `ValueError` for what is no set of changes."""
        return TypeAdapter(Changes).validate_json(text)


def check_changes(given: Mapping[str, Value], changes: Mapping[str, Value]) -> None:
    """Raises `SettingError` for one of the changes that cannot be made to the `given` settings
    while a deployment runs."""
    for key, value in changes.items():
        if key in FIXED and value != given.get(key):
            raise SettingError(key, f"cannot be another one while a deployment runs: {FIXED[key]}")
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


class RollingUpdate:
    """Makes specs of the changes that are asked for."""

    def __init__(
        self,
        saved: SavedState,
        registry: Registry,
        spec: FleetSpec,
        resolve: Callable[[DeploymentConfig], Awaitable[DeploymentConfig]],
        check_target: Callable[[TargetConfig, TargetConfig], Awaitable[None]],
        use: Callable[[FleetSpec], None],
    ) -> None:
        """`spec` is the one without changes; `resolve` finds the models' files, as
        `resolve_models`; `check_target` refuses a target that cannot follow the one that runs, as
        `check_same_tokens`; `use` is called with another spec."""
        self._saved = saved
        self._registry = registry
        self._original = self._spec = spec
        self._resolve = resolve
        self._check_target = check_target
        self._use = use
        self._changes = Changes("", {})
        """All changes together."""
        self._made: set[str] = set()
        """Names of those that were made, so that none is made twice."""
        self._one_at_a_time = asyncio.Lock()

    async def forget(self) -> None:
        """Drops the changes that a deployment of this name had before. Raises `Unavailable`."""
        await self._saved.save("changes", "")

    async def restore(self) -> None:
        """Goes by the changes that an earlier reconciler of the deployment had saved."""

        async def load() -> None:
            if text := await self._saved.load("changes"):
                changes = Changes.from_json(text)
                self._go(changes, await self._plan(changes))

        await retried("the changes that hold", load)

    async def change(self, name: str, values: Mapping[str, Value]) -> None:
        """Adds settings to the changes that hold, after those that were asked for before. `name`
        is another one for each request: one that is made again after a lost answer changes
        nothing. Raises `ConfigError` for settings that cannot be, and `Unavailable`; then what held
        still holds."""
        async with self._one_at_a_time:
            if name in self._made:
                return
            before, spec_before = self._changes, self._spec
            gpus = before.cluster_gpus
            if not SHARING.isdisjoint(values):
                gpus = resources().get("GPU", 0.0)
            changes = Changes(name, {**before.values, **values}, gpus)
            spec = await self._plan(changes)
            await self._check_target(spec_before.config.target, spec.config.target)
            if "draft_model" in values and "draft" in spec.demands:
                wanted = await self._registry.wanted()
                if not wanted.get("draft"):  # No replica drafted before.
                    await self._registry.want({"draft": spec.counts["draft"]})
            self._go(changes, spec)
            try:
                await self._saved.save("changes", changes.to_json())
            except BaseException:
                self._go(before, spec_before)
                self._made.discard(name)
                raise
            _log.info("other settings: %s", ", ".join(values))

    def _go(self, changes: Changes, spec: FleetSpec) -> None:
        self._use(spec)
        self._spec, self._changes = spec, changes
        self._made.add(changes.name)

    async def _plan(self, changes: Changes) -> FleetSpec:
        """Raises `ConfigError` for what cannot work."""
        before, gpus = self._original, changes.cluster_gpus
        if gpus is None:
            gpus = before.cluster_gpus
        given = changed(before.given, changes.values)
        config = await self._resolve(given)
        coordinator = config.coordinator.reaching(before.config.coordinator.redis)
        return plan_fleet(
            given, replace(config, coordinator=coordinator), {"GPU": gpus}, before.deployment,
            before.log_directory, local=before.local,
        )  # fmt: skip
