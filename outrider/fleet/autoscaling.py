"""Autoscaling adapts the wanted numbers of replicas to the load that the replicas report.

| role | a replica is added if, on average |
| --- | --- |
| target | a request waits in the queue for more than `autoscale_queue_steps` steps |
| draft | the share of rounds that wait for a busy draft is above `autoscale_draft_waits` |
| coordinator | it runs more than `SESSIONS` sessions, is busy for more than the share `BUSY` of |
|  | the time, or its event loop is late by more than `LAG_MS` |

A role is *calm* if both of these numbers are below `CALM`: the load divided by the bound in the
table, and the busy share that the replicas would have if one of them were removed. The busy share
of a target is the share of the time in which a step runs, multiplied by how full the steps are.

The wanted number of a role grows at once, in proportion to the load, at most by the factor
`GROWTH_MAX`. It shrinks by one after the role has been calm for `autoscale_calm_s`. At least
`COOLDOWN_S` pass between two changes of a role. While fewer replicas run than are wanted, the
wanted number does not grow. It then shrinks only if a replica runs and none is leaving.

At a constant load, the number must not go up and down. The causes of growth are not always seen in
the busy share, for example if requests wait although replicas are rarely busy. So a number that was
too few is not tried again for `MEMORY_S`, unless the busy share has fallen below `CALM` times the
share at that time. And the last draft stays while sessions run, even if it is idle.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

from outrider.config.deployment import AutoscaleConfig
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ROLES, ReplicaRecord, Role

_log = logging.getLogger(__name__)
AUTOSCALING_PERIOD_S = 1.0
GROWTH_MAX = 2
SESSIONS, BUSY, LAG_MS = 1024, 0.8, 100.0
COOLDOWN_S = 15.0
CALM = 0.6
IDLE = 0.01
MEMORY_S = 3600.0

Records = Mapping[Role, Sequence[ReplicaRecord]]
Change = tuple[Role, int, str]


class Autoscaler:
    """Changes the wanted numbers in `registry`. `config` may be replaced at any time."""

    def __init__(self, registry: RedisRegistry, config: AutoscaleConfig) -> None:
        self.config = config
        self._registry = registry
        self._changed_at: dict[Role, float] = {}
        self._calm_since: dict[Role, float] = {}
        self._too_few: dict[Role, dict[int, tuple[float, float]]] = {role: {} for role in ROLES}
        """Role -> number of replicas that was too few -> when, and the total of their busy shares.
        """

    async def adjust(self) -> None:
        if not self.config.bounds:
            return
        contents = await self._registry.contents()
        wanted, now = contents.wanted, asyncio.get_running_loop().time()
        for role, count, reason in self.decide(now, wanted, contents.records):
            # `outrider scale` may have changed the number meanwhile, and then has the last word.
            if await self._registry.change_wanted(role, wanted[role], count):
                _log.info("wanted: %s=%d, %s", role, count, reason)

    def decide(self, now: float, wanted: Mapping[Role, int], records: Records) -> list[Change]:
        changes = []
        for role, (least, most) in self.config.bounds.items():
            if (count := wanted.get(role)) is None:
                continue
            change = None
            if not least <= count <= most:
                change = role, min(max(count, least), most), f"the bounds are {least} to {most}"
            elif any(record.trial_share for record in records[role]):
                # A trial distorts the averages.
                self._calm_since.pop(role, None)
            elif now >= self._changed_at.get(role, -math.inf) + COOLDOWN_S:
                change = self._change(now, role, count, records)
            if change is not None:
                self._changed_at[role] = now
                self._calm_since.pop(role, None)
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
            self._calm_since.pop(role, None)
            grown = min(most, max(1, math.ceil(count * min(excess, GROWTH_MAX))))
            if grown == count or num_there != count:
                return None
            if count:
                self._too_few[role][count] = now, load * count
            return role, grown, reason
        num_left = min(num_there, count - 1)
        if num_left > 0:
            fewer_load = load * num_there / num_left
        else:
            needed = load > IDLE or (role == "draft" and _num_sessions(records))
            fewer_load = math.inf if needed else 0.0
        was_too_few = any(
            number >= count - 1 and now < at + MEMORY_S and load * num_there >= CALM * total > 0
            for number, (at, total) in self._too_few[role].items()
        )
        if max(excess, fewer_load) >= CALM or was_too_few or count <= least:
            self._calm_since.pop(role, None)
            return None
        since = self._calm_since.setdefault(role, now)
        is_over = now >= since + self.config.autoscale_calm_s
        return (role, count - 1, reason) if is_over else None


def _load(role: Role, config: AutoscaleConfig, records: Records) -> tuple[float, float, str]:
    """Returns the load divided by its bound, the replicas' busy share, and a log text of both."""
    replicas, coordinators, sessions = records[role], records["coordinator"], _num_sessions(records)
    if role == "target":
        queue = _mean([record.figures.queue_steps for record in replicas])
        used = _mean(
            [(record.figures.busy or 0.0) * (record.figures.fill or 0.0) for record in replicas]
        )
        reason = f"requests wait {queue:.2f} steps, {used:.0%} of the targets' capacity is used"
        return queue / config.autoscale_queue_steps, used, reason
    if role == "coordinator":
        each = sessions / max(1, _num_staying(replicas)) / SESSIONS
        busy = _mean([record.figures.busy for record in replicas])
        lag_ms = _mean([record.figures.loop_lag_ms for record in replicas])
        excess = max(each, busy / BUSY, lag_ms / LAG_MS)
        reason = f"{sessions} sessions; coordinators are {busy:.0%} busy and {lag_ms:.0f} ms late"
        return excess, max(each, busy), reason
    if not _num_staying(replicas):
        return (math.inf if sessions else 0.0), 0.0, f"{sessions} sessions run without a draft"
    waits = _mean([record.figures.draft_waits for record in coordinators])
    busy = _mean([record.figures.busy for record in replicas])
    reason = f"{waits:.0%} of the rounds wait for a draft, drafts are {busy:.0%} busy"
    return waits / config.autoscale_draft_waits, busy, reason


def _num_sessions(records: Records) -> int:
    return sum(record.load for record in records["coordinator"])


def _num_staying(records: Sequence[ReplicaRecord]) -> int:
    return sum(not record.leaving for record in records)


def _mean(values: Sequence[float | None]) -> float:
    """The mean, in which None counts as 0."""
    return sum(value or 0.0 for value in values) / len(values) if values else 0.0
