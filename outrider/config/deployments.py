"""What a deployment of all services can be told, and what its configuration is made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from outrider.config.autoscaling import AutoscaleConfig
from outrider.config.coordinators import CoordinatorConfig
from outrider.config.drafts import DraftConfig
from outrider.config.models import EMULATED, LOOPBACK, TargetConfig
from outrider.drafters.names import AUTO, LookupKind
from outrider.errors import SettingError
from outrider.limits import REPLICAS_MAX
from outrider.settings import (
    Setting,
    Value,
    build,
    merge,
    setting,
    settings_by_key,
    settings_of,
    verify_settings,
)

WAIT_S_MAX: Final = 86_400
_NAME: Final = re.compile("[A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """Coordinators, targets and drafts, and how they are started."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    num_targets: int = setting(
        1, "Target replicas at first; `outrider scale` changes how many there are.",
        minimum=1, maximum=REPLICAS_MAX,
    )  # fmt: skip
    num_drafts: int = setting(
        1, "Draft replicas at first; none where the target drafts for itself, or a look-up alone.",
        minimum=0, maximum=REPLICAS_MAX,
    )  # fmt: skip
    num_coordinators: int = setting(
        1, "Coordinators at first. On one machine each next one has the next port.",
        minimum=1, maximum=REPLICAS_MAX,
    )  # fmt: skip
    target_resources: str = setting(
        "", "Ray resources that each rank of a target asks for beside CPUs and GPUs, as "
        "NAME=AMOUNT with commas between several: where it may be placed."
    )  # fmt: skip
    draft_resources: str = setting("", "The same for a draft.")
    coordinator_resources: str = setting("", "The same for a coordinator.")
    address: str = setting("", "Ray cluster to start the actors on; empty = a local one.")
    deployment_name: str = setting(
        "", "Name of the deployment. On a cluster elsewhere one of this name that runs there is "
        "taken over, and upgraded to what is asked for now. Empty = another one each time."
    )  # fmt: skip
    startup_timeout_s: float = setting(
        20.0, "Wait for Ray to find a place for every actor, s.", minimum=0.1, maximum=WAIT_S_MAX
    )
    model_timeout_s: float = setting(
        900.0, "Wait for the models to load, s.", minimum=0.1, maximum=WAIT_S_MAX
    )
    stop_timeout_s: float = setting(
        10.0, "Wait for running requests to end when stopping, s.", minimum=0, maximum=WAIT_S_MAX
    )

    def __post_init__(self) -> None:
        verify_settings(self)
        if not _NAME.fullmatch(self.deployment_name):
            raise SettingError(
                "deployment_name",
                f"{self.deployment_name!r} is wrong; it must be up to 63 letters, digits, - and _",
            )
        if self.draft.model == AUTO:
            object.__setattr__(self, "draft", replace(self.draft, model=LookupKind.SUFFIX.value))
        if self.draft.drafter.reads_target:
            self._check_reading()
        if self.target.deterministic and self.coordinator.draft_siblings:
            raise SettingError(
                "draft_siblings",
                f"{self.coordinator.draft_siblings} given, but with `deterministic` there are no "
                "trees: their logits may differ in the last bit from those of a chain",
            )

    def _check_reading(self) -> None:
        """Of a target that computes what is drafted from."""
        ranks = self.target.tensor_parallel_size
        for key, value, reason in (
            ("tensor_parallel_size", ranks if ranks > 1 else 0, "which takes one rank"),
            ("look_ahead", self.coordinator.look_ahead, "once the outcome is known"),
        ):
            if value:
                raise SettingError(
                    key,
                    f"{value} given, but {self.draft.model} drafts from what its target computes, "
                    f"{reason}",
                )

    def values(self) -> dict[str, Value]:
        """Every setting by key, secrets too."""
        return {
            found.key: getattr(part, name)
            for part in (self.target, self.draft, self.coordinator, self.autoscale, self)
            for name, found in settings_of(type(part)).items()
        }

    @property
    def target_name(self) -> str:
        """What the target calls its model."""
        return self.target.model if self.target.emulated is None else EMULATED.removesuffix(":")

    @property
    def served_model_name(self) -> str:
        """What requests call the model."""
        return self.coordinator.served_model_name or self.target_name


def deployment_settings() -> dict[str, Setting]:
    """Every setting of a deployment by key, in the order of the documentation."""
    return settings_by_key(
        TargetConfig, DraftConfig, CoordinatorConfig, DeploymentConfig, AutoscaleConfig
    )


def load_config(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> DeploymentConfig:
    """The deployment that defaults < `file` (YAML) < `environment` (`OUTRIDER_*`) < `flags` (by
    key; text or values) describe. Raises `ConfigError` naming what set the bad value, and
    `SettingError` for values that do not go together."""
    return configuration(merge(deployment_settings(), file, environment, flags))


def configuration(values: Mapping[str, Value]) -> DeploymentConfig:
    """The deployment that settings by key describe; what they lack keeps its default. Raises
    `SettingError` for values that do not go together."""
    coordinator = build(CoordinatorConfig, values)
    inner = dict(values)
    is_open = coordinator.insecure or coordinator.internal_tls_dir or values.get("address")
    if coordinator.asks_for_keys and not is_open:
        # Users reach coordinators; these call others on this machine, who would ask nobody.
        inner["host"] = LOOPBACK
    return build(
        DeploymentConfig,
        values,
        target=build(TargetConfig, inner),
        draft=build(DraftConfig, inner),
        coordinator=coordinator,
        autoscale=build(AutoscaleConfig, values),
    )
