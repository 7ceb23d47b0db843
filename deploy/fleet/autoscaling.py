"""Changes how many replicas are wanted, by what they say of their work.

| role | more, where |
| --- | --- |
| target | an item waits more than `autoscale_queue_steps` steps for its own |
| draft | a larger share of the rounds than `autoscale_draft_waits` waits for its turn |
| coordinator | it runs more than `autoscale_sessions` sessions, computes for more than |
|  | `autoscale_busy` of the time, or is later than `autoscale_lag_ms` |

One fewer where what that is about is below `CALM` of its bound, and so would be the share of time
and places that one fewer would be busy with.

Growing is quick: by as many as the excess asks for, at most to twice the number. Shrinking is slow:
by one at a time, after it would have been right for `autoscale_calm_s` on end. Between two changes
of a role pass at least `autoscale_cooldown_s`.

Where fewer are there than are wanted the number does not grow, for those that are missing may be
enough. It shrinks by what those that are there are busy with, to as many as were there at most in
that time: they have been enough. While one of them leaves, or where there is none, nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

from outrider.config import AutoscaleConfig
from outrider.errors import OutriderError
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ROLES, ReplicaRecord, Role

_log = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0
"""Between two looks at what replicas say of their work."""
GROWTH_MAX = 2
"""Times as many at once."""
CALM = 0.6
IDLE = 0.01
"""A replica that is busy for a smaller share of the time is idle."""


Records = Mapping[Role, Sequence[ReplicaRecord]]


Change = tuple[Role, int, str]
"""Another number of a role's replicas, and why."""


class Autoscaler:
    """Decides; remembers what was changed, and how long it has been calm."""

    def __init__(self, registry: RedisRegistry, config: AutoscaleConfig) -> None:
        """`config` may be replaced by another one at any time."""
        self.config = config
        self._registry = registry
        self._changed_at: dict[Role, float] = {}
        self._calm: dict[Role, tuple[float, int]] = {}
        """Since when, and how many replicas have been there at most since."""

    async def run(self) -> None:
        """Looks at the registry again and again."""
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 (the numbers stay those that there are)
                known = isinstance(error, OutriderError)
                _log.warning("the numbers of replicas stay: %s", error, exc_info=not known)
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self) -> None:
        """Once. Raises `StoreUnavailable`."""
        if not self.config.bounds:
            return
        wanted = await self._registry.wanted()
        records = {role: await self._registry.records(role) for role in ROLES}
        for change in self.decide(asyncio.get_running_loop().time(), wanted, records):
            _log.info("wanted: %s=%d, %s", *change)
            await self._registry.want({change[0]: change[1]})

    def decide(self, now: float, wanted: Mapping[Role, int], records: Records) -> list[Change]:
        """What is to be changed at `now`, in seconds. `wanted` are the numbers until now."""
        changes = []
        for role, (least, most) in self.config.bounds.items():
            if (count := wanted.get(role)) is None:
                continue
            change = None
            on_trial = any(one.trial_share for one in records[role])
            if not least <= count <= most:
                change = role, min(max(count, least), most), f"it must be {least} to {most}"
            elif on_trial:  # How the rounds of the sessions wait says little of the others.
                self._calm.pop(role, None)
            elif now >= self._changed_at.get(role, -math.inf) + self.config.autoscale_cooldown_s:
                change = self._change(now, role, count, records)
            if change is not None:
                self._changed_at[role] = now
                self._calm.pop(role, None)
                changes.append(change)
        return changes

    def _change(self, now: float, role: Role, count: int, records: Records) -> Change | None:
        least, most = self.config.bounds[role]
        num_there = _num_staying(records[role])
        is_short = 0 < num_there < count and num_there == len(records[role])
        if num_there != count and not is_short:
            return None
        excess, load, reason = _load(role, self.config, records)
        if excess > 1:
            self._calm.pop(role, None)
            grown = min(most, max(1, math.ceil(count * min(excess, GROWTH_MAX))))
            return (role, grown, reason) if grown > count and num_there == count else None
        fewer_load = max(excess, _load_of_fewer(load, num_there, min(num_there, count - 1)))
        if fewer_load >= CALM or count <= least:
            self._calm.pop(role, None)
            return None
        since, num_enough = self._calm.get(role, (now, num_there))
        num_enough = max(num_enough, num_there)
        self._calm[role] = since, num_enough
        if now < since + self.config.autoscale_calm_s:
            return None
        return role, max(least, min(num_enough, count - 1)), reason


_Load = tuple[float, float, str]
"""How far above its threshold the load is (1 = at it), how busy the replicas are (1 = wholly), and
both in words."""


def _load(role: Role, config: AutoscaleConfig, records: Records) -> _Load:
    found, front = records[role], records["coordinator"]
    sessions = sum(one.load for one in front)
    if role == "target":
        queue = _mean([one.figures.queue_steps for one in found])
        used = _mean([(one.figures.busy or 0.0) * (one.figures.fill or 0.0) for one in found])
        reason = f"items wait {queue:.2f} steps, {used:.0%} of the places are taken"
        return queue / config.autoscale_queue_steps, used, reason
    if role == "coordinator":
        each = sessions / max(1, _num_staying(found)) / config.autoscale_sessions
        busy = _mean([one.figures.busy for one in found])
        lag_ms = _mean([one.figures.loop_lag_ms for one in found])
        excess = max(each, busy / config.autoscale_busy, lag_ms / config.autoscale_lag_ms)
        reason = f"{sessions} sessions run, at {busy:.0%} of a core each, {lag_ms:.0f} ms late"
        return excess, max(each, busy), reason
    if not _num_staying(found):
        return (math.inf if sessions else 0.0), 0.0, f"{sessions} sessions run without a draft"
    waits = _mean([one.figures.draft_waits for one in front])
    busy = _mean([one.figures.busy for one in found])
    reason = f"{waits:.0%} of the rounds wait for a draft, drafts are {busy:.0%} busy"
    return waits / config.autoscale_draft_waits, busy, reason


def _load_of_fewer(load: float, num_there: int, num_left: int) -> float:
    """The load of each that is left of those that are there."""
    if num_left > 0:
        return load * num_there / num_left
    return math.inf if load > IDLE else 0.0


def _num_staying(records: Sequence[ReplicaRecord]) -> int:
    return sum(not one.leaving for one in records)


def _mean(values: Sequence[float | None]) -> float:
    """A replica without a figure has had nothing to do."""
    return sum(value or 0.0 for value in values) / len(values) if values else 0.0
