"""How many replicas there should be, from what they say of their work. Pure.

| role | more, where |
| --- | --- |
| target | an item waits more than `target_queue_steps` steps for its own |
| draft | a larger share of the rounds than `draft_waits` waits for its turn |
| coordinator | it runs more than `coordinator_sessions` sessions |

One fewer where what that is about is below `calm` of its bound, and so would be the share of time
and places that one fewer would be busy with.

Growing is quick: by as many as the excess asks for, at most to twice the number. Shrinking is slow:
by one at a time, after it would have been right for `calm_s` on end. In between the fleet has
`cooldown_s` to show what the last change did.

Where fewer are there than are wanted the number does not grow, for those that are missing may be
enough. It shrinks by what those that are there are busy with, to as many as were there at most in
that time: they have been enough. While one of them leaves, or where there is none, nothing changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Final, Self

from outrider.registry.registry import ROLES, ReplicaRecord, Role

Bounds = tuple[int, int]
"""The least and the largest number of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
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

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises `ValueError` for what is no policy."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("a policy is an object")
        known = {one.name for one in fields(cls)} - {"bounds"}
        numbers = {name: value for name, value in values.items() if name in known}
        if any(type(value) not in (int, float) for value in numbers.values()):
            raise ValueError("a policy's values are numbers")
        bounds = values.get("bounds", {})
        if not isinstance(bounds, dict) or not all(
            role in ROLES and isinstance(pair, list) and len(pair) == 2
            and all(type(count) is int and count >= 0 for count in pair)
            for role, pair in bounds.items()
        ):  # fmt: skip
            raise ValueError("a policy's bounds are pairs of counts by role")
        return cls(
            bounds={role: (least, most) for role, (least, most) in bounds.items()}, **numbers
        )


@dataclass(frozen=True, slots=True)
class Change:
    """Another number of a role's replicas."""

    role: Role
    count: int
    reason: str


class Autoscaler:
    """Remembers what was changed, and how long it has been calm."""

    def __init__(self) -> None:
        self._changed_at: dict[Role, float] = {}
        self._calm: dict[Role, tuple[float, int]] = {}
        """Since when, and how many replicas have been there at most since."""

    def decide(
        self,
        now: float,
        policy: Policy,
        wanted: Mapping[Role, int],
        records: Mapping[Role, Sequence[ReplicaRecord]],
    ) -> list[Change]:
        """What is to be changed at `now`, in seconds. `wanted` are the numbers until now."""
        changes = []
        for role, (least, most) in policy.bounds.items():
            count = wanted.get(role)
            if count is None:
                continue
            change = self._bounded(role, count, least, most)
            if change is None and self._is_settled(now, policy, role, count, records[role]):
                change = self._change(now, policy, role, count, (least, most), records)
            if change is not None:
                self._changed_at[role] = now
                self._calm.pop(role, None)
                changes.append(change)
        return changes

    def _bounded(self, role: Role, count: int, least: int, most: int) -> Change | None:
        if least <= count <= most:
            return None
        return Change(role, min(max(count, least), most), f"it must be {least} to {most}")

    def _is_settled(
        self, now: float, policy: Policy, role: Role, count: int, records: Sequence[ReplicaRecord]
    ) -> bool:
        rests = now < self._changed_at.get(role, -math.inf) + policy.cooldown_s
        num_there = _num_staying(records)
        is_short = 0 < num_there < count and num_there == len(records)
        return not rests and (num_there == count or is_short)

    def _change(
        self,
        now: float,
        policy: Policy,
        role: Role,
        count: int,
        bounds: Bounds,
        records: Mapping[Role, Sequence[ReplicaRecord]],
    ) -> Change | None:
        num_there = _num_staying(records[role])
        num_left = min(num_there, count - 1)
        excess, fewer_load, reason = _LOADS[role](policy, records, num_there, num_left)
        least, most = bounds
        if excess > 1:
            self._calm.pop(role, None)
            if num_there < count:
                return None
            grown = min(most, max(1, math.ceil(count * min(excess, GROWTH_MAX))))
            return Change(role, grown, reason) if grown > count else None
        if fewer_load >= policy.calm or count <= least:
            self._calm.pop(role, None)
            return None
        since, num_enough = self._calm.get(role, (now, num_there))
        num_enough = max(num_enough, num_there)
        self._calm[role] = since, num_enough
        if now < since + policy.calm_s:
            return None
        return Change(role, max(least, min(num_enough, count - 1)), reason)


GROWTH_MAX: Final = 2
"""Times as many at once."""
IDLE: Final = 0.01
"""Whoever is as busy does nothing."""
_Load = tuple[float, float, str]
"""By how much the threshold is exceeded (1 = just not), how loaded those would be that were left of
those that are there (1 = wholly), and both in words."""


def _target_load(
    policy: Policy, records: Mapping[Role, Sequence[ReplicaRecord]], num_there: int, num_left: int
) -> _Load:
    found = [one.figures for one in records["target"]]
    queue = _mean([one.queue_steps for one in found])
    used = _mean([_product(one.busy, one.fill) for one in found])
    excess = queue / policy.target_queue_steps
    fewer = max(_spread(used, num_there, num_left), excess)
    return excess, fewer, f"items wait {queue:.2f} steps, {used:.0%} of the places are taken"


def _draft_load(
    policy: Policy, records: Mapping[Role, Sequence[ReplicaRecord]], num_there: int, num_left: int
) -> _Load:
    if num_there == 0:
        sessions = sum(one.load for one in records["coordinator"])
        return (math.inf if sessions else 0.0), 0.0, f"{sessions} sessions run without a draft"
    waits = _mean([one.figures.draft_waits for one in records["coordinator"]])
    busy = _mean([one.figures.busy for one in records["draft"]])
    excess = waits / policy.draft_waits
    fewer = max(_spread(busy, num_there, num_left), excess)
    return excess, fewer, f"{waits:.0%} of the rounds wait for a draft, drafts are {busy:.0%} busy"


def _coordinator_load(
    policy: Policy, records: Mapping[Role, Sequence[ReplicaRecord]], num_there: int, num_left: int
) -> _Load:
    sessions = sum(one.load for one in records["coordinator"])
    each = sessions / max(1, num_there) / policy.coordinator_sessions
    return each, _spread(each, num_there, num_left), f"{sessions} sessions run"


_LOADS: Final = {"target": _target_load, "draft": _draft_load, "coordinator": _coordinator_load}


def _spread(load: float, num_there: int, num_left: int) -> float:
    """Of a load of those that are there the share of each that is left."""
    if num_left > 0:
        return load * num_there / num_left
    return math.inf if load > IDLE else 0.0


def _num_staying(records: Sequence[ReplicaRecord]) -> int:
    return sum(not one.leaving for one in records)


def _mean(values: Sequence[float | None]) -> float:
    """Whoever has nothing to say has had nothing to do."""
    return sum(value or 0.0 for value in values) / len(values) if values else 0.0


def _product(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first * second


def parse_bounds(text: str, least_possible: int, most_possible: int) -> Bounds:
    """Of `LEAST:MOST`. Raises `ValueError` that says what is allowed."""
    words = text.split(":")
    counts = [int(word) for word in words if word.isascii() and word.isdecimal()]
    if len(words) != 2 or len(counts) != 2 or counts != sorted(counts):
        raise ValueError("it must be LEAST:MOST, the lesser first")
    least, most = counts
    if least < least_possible or most > most_possible:
        raise ValueError(f"it must be within {least_possible}:{most_possible}")
    return least, most
