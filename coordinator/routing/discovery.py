"""Follows the registry: updates the pools of replicas, and lists the fleet.

- A replica joins once it has described itself and fits the replicas that joined before. A replica
  that is leaving joins only if no other with its weights is known: sessions that began with these
  weights have nowhere else to go.
- Sessions leave a replica once its record says that it is leaving.
- A replica is removed when the registry has not listed it for the length of a lease, and either it
  does not answer or another replica has its address.
- While the registry is away, nothing changes.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from coordinator.routing.replica_pool import ReplicaPool
from outrider.errors import Incompatible, OutriderError
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import LEASE_S, NO_FIGURES, ROLES, Figures, ReplicaRecord, Role
from outrider.transport.link import Link

_log = logging.getLogger(__name__)

READ_PERIOD_S = 0.5
"""Time between two reads of the registry."""
REFUSED_S = 10.0
"""A replica that could not join is tried again after this time."""

State = Literal["serving", "away", "leaving", "joining"]
"""away: it could not be reached. leaving: it ends soon. joining: it is announced, but has not
described itself yet or does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReplica:
    """A replica as this coordinator sees it."""

    role: Role
    name: str
    model: str
    node: str
    """The machine it runs on; empty = not known."""
    device: str
    load: int
    """Number of sessions. For a coordinator all that it runs; for a target or draft only those of
    this coordinator."""
    state: State
    here: bool = False
    """Whether it is this coordinator."""
    figures: Figures = NO_FIGURES


class Discovery:
    """Updates the pools from the registry. Lists the fleet from its last read and this
    coordinator's own knowledge, without asking any other process."""

    def __init__(
        self,
        own_name: str,
        targets: ReplicaPool,
        drafts: ReplicaPool,
        registry: RedisRegistry | None = None,
        link: Callable[[Role, str], Link] | None = None,
    ) -> None:
        """`own_name` is the coordinator's name in the registry. `link(role, address)` makes a link
        without sending anything."""
        self._own_name = own_name
        self._pools: dict[Role, ReplicaPool] = {"target": targets, "draft": drafts}
        self._registry: Any = registry
        self._link: Any = link
        self._records: dict[Role, dict[str, ReplicaRecord]] = {role: {} for role in ROLES}
        self._heard_at: float | None = None
        self._heard: dict[str, tuple[float, str]] = {}
        """By name, when the registry last listed a replica (loop time, s), and its address then."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By name, the task that adds or checks a replica."""
        self._not_before: dict[str, float] = {}
        """By name, when a replica that could not join is tried again."""
        self._refused: dict[str, OutriderError] = {}
        """By role, the last error of a replica that could not join."""
        self._away = False
        """Whether the last read of the registry failed."""

    async def begin(self) -> None:
        """Adds the announced targets, and then the drafts. Waits for a target up to the length of a
        lease: by then a live one has announced itself, even to a registry that lost all its data.
        Raises `Incompatible` if replicas of a role were refused and none joined."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LEASE_S
        while not self._pools["target"].replicas and loop.time() < until:
            await self._look_and_add()
            if not self._pools["target"].replicas:
                await asyncio.sleep(READ_PERIOD_S)
        await self._look_and_add()
        for role, pool in self._pools.items():
            error = self._refused.get(role)
            if isinstance(error, Incompatible) and not pool.replicas:
                raise error

    async def _look_and_add(self) -> None:
        await self.look()
        await asyncio.gather(*self._tasks.values())

    async def run(self) -> None:
        """Follows the registry until it is cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(READ_PERIOD_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def look(self) -> None:
        """Reads the registry once."""
        try:
            found = await self._registry.fleet()
        except OutriderError as error:
            if not self._away:
                _log.warning("the registry cannot be read; replicas are not updated: %s", error)
            self._away = True
        else:
            self.hear(found)

    def hear(self, found: Mapping[Role, Sequence[ReplicaRecord]]) -> None:
        """Handles the current records of these roles."""
        self._heard_at = now = asyncio.get_running_loop().time()
        if self._away:
            # Replicas could not announce themselves while the registry was away.
            self._heard = {name: (now, address) for name, (_, address) in self._heard.items()}
        self._away = False
        for role, records in found.items():
            self._records[role] = {record.name: record for record in records}
            if role != "coordinator":
                self._follow(self._pools[role], records, now)
        in_pools = (pool.replicas for pool in self._pools.values())
        known = set[str]().union(*self._records.values(), *in_pools)
        for notes in (self._heard, self._not_before):
            for name in notes.keys() - known:
                del notes[name]

    def _follow(self, pool: ReplicaPool, records: Sequence[ReplicaRecord], now: float) -> None:
        for record in records:
            self._heard[record.name] = now, record.address
            is_known = record.name in pool.replicas
            if record.leaving and (is_known or (record.weights and pool.newest(record.weights))):
                pool.retire(record.name)
            elif (
                not is_known
                and now >= self._not_before.get(record.name, now)
                # Drafts must fit the first target.
                and (pool.role == "target" or self._pools["target"].first is not None)
                and not (
                    record.leaving and pool.first is None
                )  # Later replicas would have to fit this one.
            ):
                self._begin(record.name, self._join(pool, record))
        taken = {record.address for record in records}
        for name in pool.replicas:
            at, address = self._heard.setdefault(name, (now, ""))
            if now - at > LEASE_S:
                self._begin(name, self._doubt(pool, name, address in taken))

    def _begin(self, name: str, work: Any) -> None:
        if name in self._tasks:
            work.close()
            return
        self._tasks[name] = asyncio.create_task(work)
        self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name))

    async def _doubt(self, pool: ReplicaPool, name: str, is_replaced: bool) -> None:
        """Removes a replica that is no longer announced, unless it answers: it may only have lost
        its connection to the registry. `is_replaced`: another replica has its address now, and
        would answer in its place."""
        replica = pool.replicas.get(name)
        if replica is None:
            return
        if not (is_replaced or replica.away) and await replica.answers():
            self._heard[name] = asyncio.get_running_loop().time(), self._heard[name][1]
        else:
            _log.warning("the %s %s is not announced any more and is removed", pool.role, name)
            await pool.leave(name)

    async def _join(self, pool: ReplicaPool, record: ReplicaRecord) -> None:
        try:
            link = self._link(pool.role, record.address)
            await pool.join(record.name, link, record.trial_share)
            if record.leaving:
                pool.retire(record.name)
            _log.info("the %s %s has joined", pool.role, record.name)
        except OutriderError as error:
            _log.warning("the %s %s cannot join: %s", pool.role, record.name, error)
            self._refused[pool.role] = error
            self._not_before[record.name] = asyncio.get_running_loop().time() + REFUSED_S

    @property
    def heard_ms_ago(self) -> float | None:
        """How long ago the registry was read; None if it never was."""
        if self._heard_at is None:
            return None
        return (asyncio.get_running_loop().time() - self._heard_at) * 1e3

    @property
    def peers(self) -> list[ReplicaRecord]:
        """Records of the other coordinators, which share the replicas."""
        known = self._records["coordinator"]
        return [record for name, record in known.items() if name != self._own_name]

    def replicas(self, model: str, load: int, figures: Figures) -> list[SeenReplica]:
        """The whole fleet: coordinators, targets and drafts, each role by name. `model`, `load` and
        `figures` are those of this coordinator."""
        own = SeenReplica(
            role="coordinator", name=self._own_name, model=model, node=socket.gethostname(),
            device="", load=load, state="serving", here=True, figures=figures,
        )  # fmt: skip
        seen = [own, *(_seen(one, "serving") for one in self.peers)]
        for role, pool in self._pools.items():
            records = self._records[role]
            seen += (
                _seen(one, "joining", load=0)
                for name, one in records.items()
                if name not in pool.replicas
            )
            for name, replica in pool.replicas.items():
                unknown = ReplicaRecord(role=role, name=name, address="", host="", pid=0)
                seen.append(
                    _seen(
                        records.get(name, unknown),
                        "away" if replica.away else "serving",
                        model=replica.description.model,
                        load=len(replica.routes),
                        leaving=replica.leaving,
                    )
                )
        return sorted(seen, key=lambda one: (ROLES.index(one.role), one.name))


def _seen(record: ReplicaRecord, state: State, **better_known: Any) -> SeenReplica:
    record = replace(record, **better_known)
    return SeenReplica(
        role=record.role, name=record.name, model=record.model, node=record.host,
        device=record.device, load=record.load, state="leaving" if record.leaving else state,
        figures=record.figures,
    )  # fmt: skip
