"""Keeps the pools in step with the registry, and shows the fleet.

A replica joins once it says itself what it runs, and that fits. It is left when it says that it
leaves, and taken out when the registry has not had it for as long as a lease, in which one that
lives says its name again even to a registry that has lost everything, and it does not answer
either, or another one answers at its address. While the registry is away nothing changes. One that
leaves already joins, to be left, where no other with its weights is known: sessions that began with
them have nowhere else to go.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from coordinator.routing.replica_pool import PROBE_TIMEOUT_S, ReplicaPool
from outrider.errors import Incompatible, OutriderError
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import LEASE_S, NO_FIGURES, ROLES, Figures, ReplicaRecord, Role
from outrider.transport.link import Link

_log = logging.getLogger(__name__)

READ_PERIOD_S = 0.5
"""Between two looks at the registry."""
REFUSED_S = 10.0
"""A replica that could not join is asked again after so long."""

State = Literal["serving", "away", "leaving", "joining"]
"""`away`: it could not be reached; `leaving`: it ends soon; `joining`: it is announced, and has not
said yet what it runs, or does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReplica:
    """One replica, as this coordinator sees it."""

    role: Role
    name: str
    model: str
    node: str
    """Machine that it runs on; empty where that is not known."""
    device: str
    load: int
    """Sessions: of a coordinator all that it runs, of others those that this coordinator has
    there."""
    state: State
    here: bool = False
    """Whether it is the coordinator that says this."""
    figures: Figures = NO_FIGURES


class Discovery:
    """Follows the registry, keeps the pools in step with it, and puts together what it had when it
    was last read, and what this coordinator has found out by itself: nothing is asked of anybody,
    however many look."""

    def __init__(
        self,
        own_name: str,
        targets: ReplicaPool,
        drafts: ReplicaPool,
        registry: RedisRegistry | None = None,
        link: Callable[[Role, str], Link] | None = None,
    ) -> None:
        """`own_name` is what the coordinator is called in the registry. `link(role, address)` leads
        to a replica; nothing is sent before it is asked something."""
        self._own_name = own_name
        self._pools: dict[Role, ReplicaPool] = {"target": targets, "draft": drafts}
        self._registry: Any = registry
        self._link: Any = link
        self._records: dict[Role, dict[str, ReplicaRecord]] = {role: {} for role in ROLES}
        self._heard_at: float | None = None
        self._heard: dict[str, tuple[float, str]] = {}
        """Of each that is in a pool, when the registry had it, s of the loop's clock, and where it
        was then."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Replicas that are being asked whether they join, or whether they are there."""
        self._not_before: dict[str, float] = {}
        self._refused: dict[str, OutriderError] = {}
        """By role, why the last one that could not join could not."""
        self._away = False

    async def begin(self) -> None:
        """Returns once replicas that are announced have been asked whether they join, the drafts
        behind the targets. Waits for a target up to a lease, in which one that lives says its name
        again even to a registry that has lost everything. Raises `Incompatible` where none of a
        role fits."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LEASE_S
        while not self._pools["target"].replicas and loop.time() < until:
            await self.look()
            await asyncio.gather(*self._tasks.values())
            if not self._pools["target"].replicas:
                await asyncio.sleep(READ_PERIOD_S)
        await self.look()
        await asyncio.gather(*self._tasks.values())
        for role, pool in self._pools.items():
            error = self._refused.get(role)
            if isinstance(error, Incompatible) and not pool.replicas:
                raise error

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
            found = {role: await self._registry.records(role) for role in ROLES}
        except OutriderError as error:
            if not self._away:
                _log.warning("replicas may come and go unseen: %s", error)
            self._away = True
        else:
            self.hear(found)

    def hear(self, found: Mapping[Role, Sequence[ReplicaRecord]]) -> None:
        """What the registry has of these roles now."""
        self._heard_at = now = asyncio.get_running_loop().time()
        if self._away:
            # None of them could say its name meanwhile.
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
                and pool.may_join
                and not (record.leaving and pool.first is None)  # The others must go with it.
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
        """Takes out a replica that is announced no more, unless it answers: it may be the one that
        does not reach the registry. Who answers at the address of another one is that one."""
        replica = pool.replicas.get(name)
        if replica is None:
            return
        if not (is_replaced or replica.away) and await replica.answers(PROBE_TIMEOUT_S):
            self._heard[name] = asyncio.get_running_loop().time(), self._heard[name][1]
        else:
            _log.warning("the %s %s is announced no more: it is taken out", pool.role, name)
            await pool.leave(name)

    async def _join(self, pool: ReplicaPool, record: ReplicaRecord) -> None:
        try:
            link = self._link(pool.role, record.address)
            await pool.join(record.name, link, record.trial_share)
            if record.leaving:  # Its sessions may have nowhere else to go.
                pool.retire(record.name)
            _log.info("the %s %s has joined", pool.role, record.name)
        except OutriderError as error:
            _log.warning("the %s %s cannot join: %s", pool.role, record.name, error)
            self._refused[pool.role] = error
            self._not_before[record.name] = asyncio.get_running_loop().time() + REFUSED_S

    @property
    def heard_ms_ago(self) -> float | None:
        """How long ago the registry was read; None where there is none."""
        if self._heard_at is None:
            return None
        return (asyncio.get_running_loop().time() - self._heard_at) * 1e3

    @property
    def peers(self) -> list[ReplicaRecord]:
        """The other coordinators, which share the replicas, and so their time."""
        known = self._records["coordinator"]
        return [record for name, record in known.items() if name != self._own_name]

    def replicas(self, model: str, load: int, figures: Figures) -> list[SeenReplica]:
        """All of them: coordinators, targets, drafts, each role by name. This coordinator serves
        `model`, runs `load` sessions, and says these `figures` of itself."""
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
