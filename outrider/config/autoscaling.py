"""What a deployment is told about the numbers of its replicas."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.autoscaling import Policy, parse_bounds
from outrider.errors import SettingError
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import Role
from outrider.settings import setting, verify_settings

LEAST: dict[Role, int] = {"coordinator": 1, "target": 1, "draft": 0}
"""Replicas without which a role cannot do."""
_SECONDS_MAX = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """Bounds and thresholds, see `Policy`."""

    autoscale_targets: str = setting(
        "", "As many targets as the load wants, between LEAST:MOST; empty = as many as was said."
    )
    autoscale_drafts: str = setting("", "The same for drafts.")
    autoscale_coordinators: str = setting("", "The same for coordinators.")
    autoscale_queue_steps: float = setting(
        1.5, "More targets where items wait longer for a step than so many steps last.",
        minimum=0.1, maximum=1000,
    )  # fmt: skip
    autoscale_draft_waits: float = setting(
        0.25, "More drafts where a larger share of the rounds waits for a draft's turn.",
        minimum=0.01, maximum=1,
    )  # fmt: skip
    autoscale_sessions: int = setting(
        1024, "More coordinators where each runs more sessions.", minimum=1, maximum=100_000
    )
    autoscale_cooldown_s: float = setting(
        15.0, "Between two changes of a role's number, s.", minimum=1, maximum=_SECONDS_MAX
    )
    autoscale_calm_s: float = setting(
        120.0, "One fewer once that would have been enough for so long, s.",
        minimum=1, maximum=_SECONDS_MAX,
    )  # fmt: skip

    def __post_init__(self) -> None:
        verify_settings(self)
        self.policy  # noqa: B018 (raises)

    @property
    def policy(self) -> Policy:
        """What the settings come to. Raises `SettingError`."""
        bounds = {}
        for role in LEAST:
            key = f"autoscale_{role}s"
            if text := getattr(self, key):
                try:
                    bounds[role] = parse_bounds(text, LEAST[role], REPLICAS_MAX)
                except ValueError as error:
                    raise SettingError(key, f"{text!r} is wrong; {error}") from None
        return Policy(
            bounds=bounds,
            target_queue_steps=self.autoscale_queue_steps,
            draft_waits=self.autoscale_draft_waits,
            coordinator_sessions=self.autoscale_sessions,
            cooldown_s=self.autoscale_cooldown_s,
            calm_s=self.autoscale_calm_s,
        )
