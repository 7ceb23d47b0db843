"""What a deployment of all services can be told, and what its configuration is made from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from outrider.config.coordinators import CoordinatorConfig
from outrider.config.models import EMULATED, DraftConfig, TargetConfig
from outrider.config.servers import LOOPBACK
from outrider.drafters.names import AUTO, LookupKind
from outrider.errors import SettingError
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import Role
from outrider.settings import CHECKED, Internal, Setting, Value, build, layers, settings_of

WAIT_S_MAX: Final = 86_400
_NAME: Final = re.compile("[A-Za-z0-9_-]{0,63}")
LEAST: Final[dict[Role, int]] = {"coordinator": 1, "target": 1, "draft": 0}
"""Replicas without which a role cannot do."""


_Count = Annotated[int, Field(ge=0, strict=True)]
Bounds = tuple[_Count, _Count]
"""The least and the largest number of replicas."""


@dataclass(frozen=True, kw_only=True)
class AutoscalePolicy:
    """Which roles are scaled, between which bounds, and when."""

    bounds: Mapping[Role, Bounds] = field(default_factory=dict)
    """Roles that are not named are left alone."""
    target_queue_steps: float = 1.5
    draft_waits: float = 0.25
    coordinator_sessions: int = 1024
    calm: float = 0.6
    cooldown_s: float = 15.0
    calm_s: float = 120.0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> AutoscalePolicy:
        """Raises `ValueError` for what is no policy."""
        return TypeAdapter(AutoscalePolicy).validate_json(text)


def parse_bounds(text: str, role: Role) -> Bounds:
    """Of `LEAST:MOST`. Raises `ValueError` that says what is allowed."""
    words = text.split(":")
    counts = [int(word) for word in words if word.isascii() and word.isdecimal()]
    if len(words) != 2 or len(counts) != 2 or counts != sorted(counts):
        raise ValueError("it must be LEAST:MOST, the lesser first")
    least, most = counts
    if least < LEAST[role] or most > REPLICAS_MAX:
        raise ValueError(f"it must be within {LEAST[role]}:{REPLICAS_MAX}")
    return least, most


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class AutoscaleConfig:
    """The settings of an `AutoscalePolicy`."""

    autoscale_targets: str = ""
    """As many targets as the load wants, between LEAST:MOST; empty = as many as was said."""
    autoscale_drafts: str = ""
    """The same for drafts."""
    autoscale_coordinators: str = ""
    """The same for coordinators."""
    autoscale_queue_steps: Annotated[float, Field(ge=0.1, le=1000)] = 1.5
    """More targets where items wait longer for a step than so many steps last."""
    autoscale_draft_waits: Annotated[float, Field(ge=0.01, le=1)] = 0.25
    """More drafts where a larger share of the rounds waits for a draft's turn."""
    autoscale_sessions: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """More coordinators where each runs more sessions."""
    autoscale_cooldown_s: Annotated[float, Field(ge=1, le=WAIT_S_MAX)] = 15.0
    """Between two changes of a role's number, s."""
    autoscale_calm_s: Annotated[float, Field(ge=1, le=WAIT_S_MAX)] = 120.0
    """One fewer once that would have been enough for so long, s."""

    def __post_init__(self) -> None:
        self.policy  # noqa: B018 (raises)

    @property
    def policy(self) -> AutoscalePolicy:
        """What the settings come to. Raises `SettingError`."""
        bounds = {}
        for role in LEAST:
            key = f"autoscale_{role}s"
            if text := getattr(self, key):
                try:
                    bounds[role] = parse_bounds(text, role)
                except ValueError as error:
                    raise SettingError(key, f"{text!r} is wrong; {error}") from None
        return AutoscalePolicy(
            bounds=bounds,
            target_queue_steps=self.autoscale_queue_steps,
            draft_waits=self.autoscale_draft_waits,
            coordinator_sessions=self.autoscale_sessions,
            cooldown_s=self.autoscale_cooldown_s,
            calm_s=self.autoscale_calm_s,
        )


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DeploymentConfig:
    """Coordinators, targets and drafts, and how they are started."""

    target: Internal[TargetConfig] = Field(default_factory=lambda: TargetConfig())
    draft: Internal[DraftConfig] = Field(default_factory=lambda: DraftConfig())
    coordinator: Internal[CoordinatorConfig] = Field(default_factory=lambda: CoordinatorConfig())
    autoscale: Internal[AutoscaleConfig] = Field(default_factory=lambda: AutoscaleConfig())
    num_targets: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 1
    """Target replicas at first; `outrider scale` changes how many there are."""
    num_drafts: Annotated[int, Field(ge=0, le=REPLICAS_MAX)] = 1
    """Draft replicas at first; none where the target drafts for itself, or a look-up alone."""
    num_coordinators: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 1
    """Coordinators at first. On one machine each next one has the next port."""
    target_resources: str = ""
    """Ray resources that each rank of a target asks for beside CPUs and GPUs, as NAME=AMOUNT with
    commas between several: where it may be placed."""
    draft_resources: str = ""
    """The same for a draft."""
    coordinator_resources: str = ""
    """The same for a coordinator."""
    address: str = ""
    """Ray cluster to start the actors on; empty = a local one."""
    deployment_name: str = ""
    """Name of the deployment. On a cluster elsewhere one of this name that runs there is taken
    over, and upgraded to what is asked for now. Empty = another one each time."""
    startup_timeout_s: Annotated[float, Field(ge=0.1, le=WAIT_S_MAX)] = 20.0
    """Wait for Ray to find a place for every actor, s."""
    model_timeout_s: Annotated[float, Field(ge=0.1, le=WAIT_S_MAX)] = 900.0
    """Wait for the models to load, s."""
    stop_timeout_s: Annotated[float, Field(ge=0, le=WAIT_S_MAX)] = 10.0
    """Wait for running requests to end when stopping, s."""

    def __post_init__(self) -> None:
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


@cache
def deployment_settings() -> dict[str, Setting]:
    """Every setting of a deployment by key, in the order of the documentation."""
    found: dict[str, Setting] = {}
    for config in (TargetConfig, DraftConfig, CoordinatorConfig, DeploymentConfig, AutoscaleConfig):
        found |= {one.key: one for one in settings_of(config).values() if one.key not in found}
    return found


def merge(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None
) -> dict[str, Value]:
    """The settings that a `file` (YAML), the `environment` (`OUTRIDER_*`) or `flags` (text or
    values) set, by key; the last one wins. Raises `ConfigError` naming what set a bad value, also
    where another layer overrides it."""
    given = layers(deployment_settings(), file, environment, flags)
    return {found.key: found.parse(raw, source) for found, raw, source in given}


def load_config(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None
) -> DeploymentConfig:
    """The deployment that these layers describe (see `merge`). Raises `ConfigError`."""
    return configuration(merge(flags, environment, file))


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
