"""Other settings for a deployment that runs: which are possible, and what holds then. The
reconciler makes a spec of them, and replaces the replicas one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from pydantic import TypeAdapter

from outrider.config import DeploymentConfig, configuration
from outrider.errors import SettingError
from outrider.settings import Value

_SAME_REDIS: Final = "sessions stay in their Redis"
_SCALE: Final = "use `outrider scale`"
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
}
"""Settings that hold as long as a deployment runs, and what to do instead."""
SWITCHES: Final = ("internal_tls_dir",)
"""Settings that may be others, but neither begin nor end."""
SHARING: Final = frozenset({"device", "target_num_gpus", "draft_num_gpus", "tensor_parallel_size",
                            "draft_tensor_parallel_size"})  # fmt: skip
"""Changes that name one of these have the cluster's GPUs counted, and shared out, anew."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from the settings that a deployment was started with."""

    values: Mapping[str, Value] = field(default_factory=dict)
    """By `outrider upgrade` and `autoscale`."""
    cluster_gpus: float | None = None
    """As of a `FleetSpec`, where they were counted again; None = as at the start."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Changes:
        """Of nothing, there are none. Raises `ValueError` for what is no set of changes."""
        return TypeAdapter(Changes).validate_json(text) if text else Changes()


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
