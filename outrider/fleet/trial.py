"""The trial of a drafter. One draft replica with other settings, or one target with another head,
gets a share of the sessions. If these sessions decode more tokens a second than the other sessions,
the new drafter is better."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from coordinator.decoding.trial import DrafterSums, TrialSums
from outrider.errors import ConfigError, SettingError
from outrider.foundation.settings import Value
from outrider.registry.registry import ROLES, ReplicaRecord, Role

from .spec import FleetSpec

SHARE_MAX = 0.9
MINUTES_DEFAULT = 15.0
MINUTES_MAX = 7 * 24 * 60.0
SESSIONS_MIN, ROUNDS_MIN = 10, 200
"""Before a judgement, each drafter needs this many sessions, and this many rounds in total."""
EARLY_ERRORS, LATE_ERRORS = 4.0, 2.0
"""A trial ends early if the speeds differ by `EARLY_ERRORS` standard errors. When its time is
over, the new drafter must lead by `LATE_ERRORS`. The early test runs often, so it is stricter."""


@dataclass(frozen=True)
class Trial:
    values: dict[str, Value]
    share: float
    seconds: float
    """Length of the trial, which begins when its replica serves."""
    spec: FleetSpec
    """The spec of a whole deployment with the settings `values`."""

    @property
    def role(self) -> Role:
        return self.spec.config.draft.drafter.runs_on


@dataclass(frozen=True)
class TrialReport:
    draft_model: str
    share: float
    state: Literal["runs", "taken", "not taken"] = "runs"
    reason: str = "its replica is being started"

    def __str__(self) -> str:
        tried = f"trial of {self.draft_model} on {self.share:.0%} of the sessions"
        return f"{tried}: {self.state}: {self.reason}"


def check_trial(before: FleetSpec, tried: FleetSpec) -> None:
    """Raises `ConfigError` if a replica of `tried` cannot run beside replicas of `before`."""
    now, then = (spec.config.draft.model for spec in (before, tried))
    ran, role = (spec.config.draft.drafter.runs_on for spec in (before, tried))
    cannot = f"{then!r} cannot be tried beside {now!r}"
    at_once = "without --trial-share, the drafter is replaced at once"
    if role == "coordinator" or role != ran:
        raise SettingError(
            "draft_model",
            f"{cannot}: {now!r} runs on {before.drafts_on}s and {then!r} on {tried.drafts_on}s, "
            f"but a trial needs two models on draft replicas, or two heads on targets; {at_once}",
        )
    if role == "target":
        values = before.given.values()
        for key, value in tried.given.values().items():
            if key != "draft_model" and value != values[key]:
                raise SettingError(
                    key, "cannot change in a trial on targets; only --draft-model can"
                )
    if before.plans[role] == tried.plans[role]:
        raise ConfigError(f"--trial-share: nothing to try; {role} replicas would not change")
    roles = [
        other
        for other in ROLES
        if other != role and other in tried.demands and before.plans[other] != tried.plans[other]
    ]
    if roles:
        raise SettingError(
            "draft_model",
            f"{cannot}: a trial changes only {role} replicas, but "
            f"these settings change each {' and each '.join(roles)}, too; {at_once}",
        )


def check_share(share: float, role: Role, num_replicas: int) -> None:
    """Raises `ConfigError` for a share that would give replicas very different loads. A difference
    in speed could then come from the loads."""
    fair = 1 / (num_replicas + 1)
    least, most = fair / 2, min(2 * fair, SHARE_MAX)
    if not least <= share <= most:
        raise ConfigError(
            f"--trial-share: {share:g} does not suit {num_replicas} {role} replicas; it must be "
            f"from {least:.3g} to {most:.3g}, best {fair:.3g}, so that loads are similar"
        )


def check_weights(records: Iterable[ReplicaRecord]) -> str:
    """Why sessions cannot move from or to the target on trial; empty if they can."""
    tried, kept = set[str](), set[str]()
    for record in records:
        (tried if record.trial_share else kept).add(record.weights)
    if not kept or tried <= kept:
        return ""
    return (
        f"its target runs {', '.join(tried)} (weights/dtype/max_model_len), the others "
        f"{', '.join(sorted(kept))}; sessions could not move between these targets; if only "
        "max_model_len differs, give --max-model-len"
    )


def added(reports: Iterable[TrialSums | None], replica: str) -> TrialSums:
    """The total of the sums that coordinators report for the trial of `replica`."""
    sums = TrialSums(replica)
    for report in reports:
        if report is not None and report.replica == replica:
            sums = TrialSums(replica, sums.old + report.old, sums.new + report.new)
    return sums


def judged(sums: TrialSums, is_over: bool) -> tuple[bool | None, str]:
    """Returns whether the new drafter is better, and the reason. None = not known yet. If the
    trial's time `is_over`, the result is never None."""
    old, new = sums.old, sums.new
    for which, drafter in (("old", old), ("new", new)):
        if drafter.num_sessions < SESSIONS_MIN or drafter.num_rounds < ROUNDS_MIN:
            return (False if is_over else None), (
                f"{drafter.num_sessions} sessions and {drafter.num_rounds} rounds with the {which} "
                f"drafter; {SESSIONS_MIN} and {ROUNDS_MIN} are needed"
            )
    before = old.tokens_per_second
    gain = new.tokens_per_second / before - 1 if before > 0 else math.inf
    error = (1 + gain) * math.hypot(old.relative_error, new.relative_error)
    reason = f"{_rates(new)}, against {_rates(old)}: {gain:+.1%} +- {error:.1%} tokens/s"
    needed = (LATE_ERRORS if is_over else EARLY_ERRORS) * error
    if abs(gain) > needed or is_over:
        return gain > needed, reason
    return None, reason


def _rates(drafter: DrafterSums) -> str:
    return (
        f"{drafter.tokens_per_second:.1f} tokens/s a session and {drafter.accepted_per_round:.2f} "
        f"accepted draft tokens a round in {drafter.num_rounds} rounds"
    )
