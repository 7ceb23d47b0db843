"""Reads the registry (the replicas' entries in Redis), and updates the replica pools.

- A new replica joins the pool of its role if it answers, and fits the pool's first replica.
- A leaving replica joins only if no replica of the pool has its weights. Only this replica can then
  continue sessions that began with these weights.
- If the registry marks a replica of the pool as leaving, its sessions move to other replicas.
- A replica that the registry no longer lists is asked whether it is there, and then once per
  `LEASE_S`. It is removed if it does not answer, or if another replica has its address now.
- A pool learns which replicas of its role are being started, so that requests wait for them.
- While the registry cannot be read, the pools do not change. Afterwards, replicas have `LEASE_S` to
  announce themselves again."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from coordinator.routing.replica_pool import DraftPool, TargetPool
from outrider.errors import Incompatible, InvariantError, OutriderError
from outrider.foundation.bounded_dict import BoundedDict
from outrider.limits import REPLICAS_MAX
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import (
    LEASE_S,
    NO_FIGURES,
    ROLES,
    Figures,
    ReplicaRecord,
    Role,
    Starts,
)
from outrider.transport.link import DraftLink, TargetLink

_log = logging.getLogger(__name__)

READ_PERIOD_S = 0.5
"""Pause between two reads of the registry."""
REFUSED_S = 10.0
"""Pause before a replica that could not join is asked again."""
NAMES_KEPT = 2 * len(ROLES) * REPLICAS_MAX
"""Largest number of replicas, present and former, that `Discovery` remembers."""

State = Literal["serving", "away", "leaving", "joining"]
"""away: not reachable. joining: in the registry, but refused by the pool or not added yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReplica:
    """A replica as this coordinator sees it."""

    role: Role
    name: str
    model: str
    node: str
    """Host name of the replica's machine; empty if not known."""
    device: str
    load: int
    """Number of sessions; for a target or draft, only those of this coordinator."""
    state: State
    here: bool = False
    figures: Figures = NO_FIGURES


@dataclass(frozen=True, slots=True)
class Registered:
    """A registry, and what opens links to its replicas at their addresses."""

    registry: RedisRegistry
    target_link: Callable[[str], TargetLink]
    draft_link: Callable[[str], DraftLink]


class Discovery:
    """Updates the replica pools from the registry, and lists all replicas."""

    def __init__(
        self,
        own_name: str,
        targets: TargetPool,
        drafts: DraftPool,
        registered: Registered | None = None,
    ) -> None:
        self._own_name = own_name
        self._targets, self._drafts = targets, drafts
        self._pools: dict[Role, TargetPool | DraftPool] = {"target": targets, "draft": drafts}
        self._registered = registered
        self._records: dict[Role, dict[str, ReplicaRecord]] = {role: {} for role in ROLES}
        self.wanted: Mapping[Role, int] = {}
        """Role -> number of replicas that should run, from the registry."""
        self.present: dict[Role, int] = {}
        """Role -> number of replicas in the registry that are neither leaving nor on trial."""
        self._read_at: float | None = None
        self._trusted_until: BoundedDict[str, tuple[float, str]] = BoundedDict(NAMES_KEPT)
        """Replica name -> (time until which its absence from the registry raises no doubt, the
        address with which the registry last listed it)."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: BoundedDict[str, float] = BoundedDict(NAMES_KEPT)
        """Name of a replica that could not join -> earliest time of the next attempt."""
        self._refused: dict[str, OutriderError] = {}
        """Role -> error of the last replica that could not join."""
        self._away = False
        """Whether the newest read of the registry failed."""

    @property
    def follows(self) -> bool:
        """Whether there is a registry. Without one, `begin` and `run` must not be called."""
        return self._registered is not None

    @property
    def _known(self) -> Registered:
        if self._registered is None:
            raise InvariantError("there is no registry")
        return self._registered

    async def begin(self) -> None:
        """Adds the targets that the registry lists, then the drafts. Waits up to `LEASE_S` for a
        target. Within this time, every running target announces itself, even if the registry lost
        its data. Raises `Incompatible` if a pool stays empty because its replicas do not fit."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LEASE_S
        while not self._targets.replicas and loop.time() < until:
            await self._refresh_and_add()
            if not self._targets.replicas:
                await asyncio.sleep(READ_PERIOD_S)
        await self._refresh_and_add()
        for role, pool in self._pools.items():
            error = self._refused.get(role)
            if isinstance(error, Incompatible) and not pool.replicas:
                raise error

    async def _refresh_and_add(self) -> None:
        await self.refresh()
        await asyncio.gather(*self._tasks.values())

    async def run(self) -> None:
        """Calls `refresh` every `READ_PERIOD_S`."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(READ_PERIOD_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def refresh(self) -> None:
        """Reads the registry once, and updates the pools."""
        try:
            contents = await self._known.registry.contents()
        except OutriderError as error:
            if not self._away:
                _log.warning("the registry cannot be read; replicas are not updated: %s", error)
            self._away = True
        else:
            self.wanted = contents.wanted
            for role, pool in self._pools.items():
                pool.starts = contents.starts.get(role, Starts(role))
            self.update(contents.records)

    def update(self, by_role: Mapping[Role, Sequence[ReplicaRecord]]) -> None:
        """Updates the pools from all current records of the registry."""
        self._read_at = now = asyncio.get_running_loop().time()
        if self._away:
            # Replicas could not announce themselves until now.
            trusted = now + LEASE_S
            self._trusted_until.update(
                {name: (trusted, entry[1]) for name, entry in self._trusted_until.items()}
            )
        self._away = False
        for role, records in by_role.items():
            self._records[role] = {record.name: record for record in records}
            self.present[role] = sum(
                not (record.leaving or record.trial_share) for record in records
            )
            if role != "coordinator":
                self._follow(self._pools[role], records, now)

    def _follow(
        self, pool: TargetPool | DraftPool, records: Sequence[ReplicaRecord], now: float
    ) -> None:
        for record in records:
            self._trusted_until[record.name] = now, record.address
            is_known = record.name in pool.replicas
            if record.leaving and (is_known or (record.weights and pool.newest(record.weights))):
                pool.retire(record.name)
            elif (
                not is_known
                and now >= self._not_before.get(record.name, now)
                # Drafts must fit the first target.
                and (pool.role == "target" or self._targets.first is not None)
                # A leaving replica may be outdated. If it were first, others would have to fit it.
                and not (record.leaving and pool.first is None)
            ):
                self._begin(record.name, self._join(pool, record))
        taken = {record.address for record in records}
        for name in pool.replicas:
            trusted, address = self._trusted_until.setdefault(name, (now + LEASE_S, ""))
            if now > trusted:
                self._begin(name, self._check_unlisted(pool, name, address in taken))

    def _begin(self, name: str, work: Coroutine[None, None, None]) -> None:
        if name in self._tasks:
            work.close()
            return
        self._tasks[name] = asyncio.create_task(work)
        self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name))

    async def _check_unlisted(
        self, pool: TargetPool | DraftPool, name: str, is_replaced: bool
    ) -> None:
        """Removes a replica that the registry no longer lists, unless the replica answers. If
        `is_replaced`, does not ask, because another replica has its address and would answer."""
        replica = pool.replicas.get(name)
        if replica is None:
            return
        if not (is_replaced or replica.away) and await replica.answers():
            trusted = asyncio.get_running_loop().time() + LEASE_S
            self._trusted_until[name] = trusted, self._trusted_until[name][1]
        else:
            _log.warning("the %s %s is removed: the registry no longer lists it", pool.role, name)
            await pool.leave(name)

    async def _join(self, pool: TargetPool | DraftPool, record: ReplicaRecord) -> None:
        name, address, share = record.name, record.address, record.trial_share
        try:
            if pool.role == "target":
                await self._targets.join(name, self._known.target_link(address), share)
            else:
                await self._drafts.join(name, self._known.draft_link(address), share)
            if record.leaving:
                pool.retire(record.name)
            _log.info("the %s %s has joined", pool.role, record.name)
        except OutriderError as error:
            _log.warning("the %s %s cannot join: %s", pool.role, record.name, error)
            self._refused[pool.role] = error
            self._not_before[record.name] = asyncio.get_running_loop().time() + REFUSED_S

    @property
    def heard_ms_ago(self) -> float | None:
        """Time since the newest successful read of the registry; None before the first read."""
        if self._read_at is None:
            return None
        return (asyncio.get_running_loop().time() - self._read_at) * 1e3

    @property
    def peers(self) -> list[ReplicaRecord]:
        """Records of the other coordinators."""
        known = self._records["coordinator"]
        return [record for name, record in known.items() if name != self._own_name]

    def replicas(self, model: str, load: int, figures: Figures) -> list[SeenReplica]:
        """Returns all replicas sorted by role and name. The arguments describe this coordinator."""
        own = ReplicaRecord(
            role="coordinator",
            name=self._own_name,
            address="",
            host=socket.gethostname(),
            pid=0,
            model=model,
            load=load,
            figures=figures,
        )
        seen = [_seen(own, here=True), *map(_seen, self.peers)]
        for role, pool in self._pools.items():
            known = self._records[role]
            for name in {**known, **pool.replicas}:
                unknown = ReplicaRecord(role=role, name=name, address="", host="", pid=0)
                record, replica = known.get(name, unknown), pool.replicas.get(name)
                if replica is None:
                    seen.append(_seen(replace(record, load=0), "joining"))
                    continue
                current = replace(
                    record,
                    model=replica.description.model,
                    load=len(replica.routes),
                    leaving=replica.leaving,
                )
                seen.append(_seen(current, "away" if replica.away else "serving"))
        return sorted(seen, key=lambda entry: (ROLES.index(entry.role), entry.name))


def _seen(record: ReplicaRecord, state: State = "serving", here: bool = False) -> SeenReplica:
    return SeenReplica(
        role=record.role,
        name=record.name,
        model=record.model,
        node=record.host,
        device=record.device,
        load=record.load,
        state="leaving" if record.leaving else state,
        here=here,
        figures=record.figures,
    )
