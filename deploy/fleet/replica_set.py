"""The replicas of a deployment: as many as are wanted, and others in the place of those that die.

| a replica | becomes | when |
| --- | --- | --- |
| is missing | placed, started | at once; later and later while starting fails |
| dies, or a rank of it | removed | at once: then it is missing |
| is not wanted | left, then stopped | once nothing is sent to it, or `stop_timeout_s` later |

How many are wanted is kept in Redis, where coordinators read it, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import random

from outrider.backoff import backoff
from outrider.errors import ConfigError, OutriderError, StoreUnavailable
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ROLES, Role

from .ray_cluster import Cluster, retried
from .replica import Replica, ReplicaView, raise_first, role_and_age
from .spec import FleetSpec

_log = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.5
"""Between two looks at how many are wanted."""
FIRST_REST_S = 1.0
"""Until a replica is started again that did not start, or died; it doubles with each failure ..."""
REST_S_MAX = 30.0
"""... up to this."""
STABLE_S = 30.0
"""A replica that served for so long and dies does not count as a failed start."""
HOPELESS_AFTER = 4
"""Failures of a role, one after the other, of which no replica serves."""


ROLLING: tuple[Role, ...] = ("draft", "target", "coordinator")
"""Whose stale replicas are replaced first, and then."""


def next_steps(
    wanted: Mapping[Role, int],
    fleet: Sequence[ReplicaView],
    held_back: Collection[Role] = (),
    in_place: Collection[Role] = (),
    crowded: Collection[Role] = (),
) -> tuple[list[Role], list[str]]:
    """The roles of the replicas to start, and the names of those that are to leave. Pure. `fleet`
    begins with the oldest. As many starts as replicas are missing, but none of a
    role that is `held_back`; of those that are too many such as do not serve yet leave first, then
    stale ones, then the youngest.

    Where none is missing, one that is stale is replaced, of one role after the other: another one
    is started, and the stale one leaves once that serves; or, of a role whose replicas are replaced
    `in_place`, it leaves first, and another one is started once it has gone. So it does of a
    `crowded` role even where some are missing, as there is no place for them: but never the last
    that is there."""
    starts: list[Role] = []
    leaves: list[str] = []
    stale = {one.role for one in fleet if one.stale and not one.leaves}
    rolled = next((role for role in ROLLING if role in stale), None)
    for role in ROLES:
        stay = [one for one in reversed(fleet) if one.role == role and not one.leaves]
        stay.sort(key=lambda one: (bool(one.address), not one.stale))
        num_more = wanted.get(role, 0) - len(stay)
        if role == rolled and all(one.address for one in stay):
            if num_more == 0:
                num_more = -1 if role in in_place else 1
            elif num_more > 0 and role in crowded and len(stay) > 1:
                num_more = -1
        elif role == rolled and num_more < 0:
            num_more += 1  # The one that comes in the place of another.
        makes_room = any(one.role == role and one.stale and one.leaves for one in fleet)
        is_held = role in held_back or (role in in_place and makes_room)
        if num_more > 0 and not is_held:
            starts += [role] * num_more
        if num_more < 0:
            leaves += [one.name for one in stay[:-num_more]]
    return starts, leaves


class Trouble:
    """What hinders a role since its number or the spec has changed."""

    def __init__(self) -> None:
        self.num_failures = 0
        """Of starts, one after the other."""
        self.not_before = 0.0
        """When the next one is due."""
        self.reason = ""
        """Why a replica did not start, until one does."""
        self.crowded = False
        """Whether another replica has found no place: a stale one must leave first."""
        self.made_way = False
        """Whether one has left for that, and none has begun to serve since: meanwhile no other one
        leaves, as those that come may never serve."""


class Fleet:
    """The replicas of one deployment."""

    def __init__(self, cluster: Cluster, spec: FleetSpec, registry: RedisRegistry) -> None:
        self.spec = spec
        self._cluster = cluster
        self._registry = registry
        self.wanted: dict[Role, int] = dict(spec.counts)
        self._replicas: dict[str, Replica] = {}
        self._num_started = 0
        self._troubles = {role: Trouble() for role in ROLES}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """What starts and watches each replica, or ends it, by name."""
        self._changed = asyncio.Event()

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    def views(self) -> tuple[ReplicaView, ...]:
        """What others are told of them, the oldest first."""
        return tuple(one.view(self.spec.plans[one.role]) for one in self._replicas.values())

    def of(self, role: Role) -> list[Replica]:
        return [one for one in self._replicas.values() if one.role == role]

    @property
    def failures(self) -> tuple[str, ...]:
        """Why replicas did not start that are still missing."""
        return tuple(one.reason for one in self._troubles.values() if one.reason)

    @property
    def hopeless(self) -> Role | None:
        """A role of which there is none, and none can be started. It is tried again."""
        return next(
            (
                role for role in ("target", "coordinator")
                if self._troubles[role].num_failures >= HOPELESS_AFTER and not self.of(role)
            ),
            None,
        )  # fmt: skip

    async def start(self) -> None:
        """Starts all replicas that are wanted at first: the coordinators once the others serve.
        Raises what the first says that fails, a `ConfigError` before others; `Cluster.place` what
        finds no place; and `StoreUnavailable`."""
        await self._registry.want(self.wanted)
        self._num_started = await self._registry.started()
        replicas = [self._new(role) for role in ROLES for _ in range(self.wanted[role])]
        await self._place(*replicas)
        for roles in (("target", "draft"), ("coordinator",)):
            starting = [self._begin(one) for one in replicas if one.role in roles]
            raise_first(await asyncio.gather(*starting, return_exceptions=True))

    async def _place(self, *replicas: Replica) -> None:
        demands = [replace(self.spec.demands[one.role], name=one.name) for one in replicas]
        placed = await self._cluster.place(demands, self.spec.config.startup_timeout_s)
        for one, ranks in zip(replicas, placed, strict=True):
            one.ranks = ranks
        self.spec = self.settled(self.spec)

    async def adopt(self) -> None:
        """Takes over the replicas that another fleet has left, and goes on with what it had
        begun; whatever does not serve yet is ended, to be started anew."""
        there = await self._cluster.replicas()
        found = await asyncio.gather(*map(Replica.adopted, there, there.values()))
        by_age = {role_and_age(name)[1]: name for name in there}
        adopted = {one.name: one for one in found if one is not None}
        for _, name in sorted(by_age.items()):
            if name in adopted:
                self._replicas[name] = adopted[name]
            else:
                _log.warning("%s does not serve, and is ended", name)
                await self._cluster.remove(there[name])
        self._num_started = max(by_age, default=-1) + 1
        await self._cluster.free_groups(self._replicas)
        await retried("what is wanted", self._recall)
        try:
            self.spec = self.settled(self.spec)
        except ConfigError as error:  # They serve all the same.
            _log.error("later ones may not be reached: %s", error)
        _log.info("taken over: %s", ", ".join(self._replicas) or "nothing")

    async def _recall(self) -> None:
        """What the other fleet had been told and has done. Until that is known nothing is done: a
        replica that is started could not be announced, and its name might not be its own."""
        wanted, num_started = await self._registry.wanted(), await self._registry.started()
        there = {role: len(self.of(role)) for role in ROLES if self.of(role)}
        self.wanted = self.spec.bounded(self.wanted | there | wanted)
        self._num_started = max(self._num_started, num_started)

    def settled(self, spec: FleetSpec) -> FleetSpec:
        """A spec for the machines that replicas are on. Raises `SettingError` where it does not
        fit."""
        return spec.settled([
            (one.role, actor.place.node) for one in self.replicas for actor in one.ranks
        ])  # fmt: skip

    def use(self, spec: FleetSpec) -> None:
        """Another spec: what it changes is replaced, one by one. Raises as `settled`."""
        self.spec = self.settled(spec)
        self._forget_troubles()

    def _forget_troubles(self) -> None:
        self._troubles = {role: Trouble() for role in ROLES}
        self._changed.set()

    async def run(self) -> None:
        """Keeps as many as are wanted."""
        for one in self.replicas:
            self._follow(one)
        while True:
            await self._hear_wanted()
            self._step()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_PERIOD_S):
                    await self._changed.wait()
            self._changed.clear()

    def _step(self) -> None:
        now = asyncio.get_running_loop().time()
        held_back = {role for role, trouble in self._troubles.items() if now < trouble.not_before}
        if not any(one.address for one in self.of("target")):
            held_back.add("coordinator")  # It could say of no model what it is.
        crowded = {role for role, one in self._troubles.items() if one.crowded}
        in_place = {role for role in ROLES if self.spec.replaced_in_place(role)} | crowded
        crowded = {role for role in crowded if not self._troubles[role].made_way}
        starts, leaves = next_steps(self.wanted, self.views(), held_back, in_place, crowded)
        for role in starts:
            self._follow(self._new(role))
        for name in leaves:
            one = self._replicas[name]
            one.leaves = True
            self._troubles[one.role].made_way = self._troubles[one.role].crowded
            self._follow(one)

    def _follow(self, one: Replica) -> None:
        before = self._tasks.get(one.name)
        work = self._leave(one, before) if one.leaves else self._live(one)
        self._tasks[one.name] = asyncio.create_task(work)

    async def close(self) -> None:
        """Stops all, coordinators before those that they call."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        grace_s = self.spec.config.stop_timeout_s
        for roles in (("coordinator",), ("target", "draft")):
            going = [one for one in self._replicas.values() if one.role in roles]
            await asyncio.gather(*(one.stop(grace_s) for one in going))
        self._replicas.clear()

    def _new(self, role: Role) -> Replica:
        one = Replica(role, self._num_started, self._free_slot(role), self.spec.plans[role])
        self._num_started += 1
        self._replicas[one.name] = one
        return one

    def _free_slot(self, role: Role) -> int:
        """The lowest; of a role that keeps its ports that of the stale replica that leaves next, if
        there is one."""
        taken, stale = set(), []
        for one in self.of(role):
            if self.spec.keeps_ports(role) and one.plan != self.spec.plans[role]:
                stale.append(one.slot)  # The oldest first; the youngest leaves first.
            else:
                taken.add(one.slot)
        left = [slot for slot in reversed(stale) if slot not in taken]
        return left[0] if left else min({*range(len(taken) + 1)} - taken)

    async def _begin(self, one: Replica) -> None:
        spec = self.spec
        takes_over = any(other is not one and other.slot == one.slot for other in self.of(one.role))
        config = spec.replica_config(one.role, one.name, one.slot, takes_over=takes_over)
        await one.begin(config, spec.log_directory, spec.config.model_timeout_s)

    async def _live(self, one: Replica) -> None:
        """Starts a replica that does not serve yet, watches it until it ends, and removes it."""
        loop = asyncio.get_running_loop()
        began, is_its_own, reason = math.inf, True, ""
        try:
            if not one.address:
                await self._start(one)
            began = loop.time()
            error = await one.ended()
            _log.error("%s is gone, and is replaced: %s", one.name, error or "it has stopped")
        except StoreUnavailable as error:
            _log.warning("%s did not start for want of Redis: %s", one.name, error)
            is_its_own = False
        except OutriderError as error:
            reason = f"{one.name} did not start: {error}"
            _log.error(reason)
        except Exception:  # noqa: BLE001 (the fleet goes on, whatever one replica does)
            _log.exception("%s did not start", one.name)
        trouble = self._troubles[one.role]
        trouble.reason = reason or trouble.reason
        if loop.time() - began > STABLE_S:
            trouble.num_failures = 0
        attempt = trouble.num_failures if is_its_own else 0
        trouble.num_failures += is_its_own
        trouble.not_before = loop.time() + backoff(FIRST_REST_S, REST_S_MAX, attempt, random)
        await self._remove(one)

    async def _start(self, one: Replica) -> None:
        try:
            await self._place(one)
        except ConfigError:
            self._troubles[one.role].crowded |= not one.ranks
            raise
        await self._begin(one)
        trouble = self._troubles[one.role]
        trouble.made_way, trouble.reason = False, ""
        _log.info("%s serves at %s", one.name, one.address)
        self._changed.set()

    async def _leave(self, one: Replica, life: asyncio.Task[None] | None) -> None:
        """Ends a replica once it is not used, or when the time is over; one that has not started
        yet at once."""
        grace_s = self.spec.config.stop_timeout_s
        if life is not None:
            life.cancel()
            await asyncio.wait([life])
        try:
            if one.address:
                await one.drain(grace_s)
                await one.stop(grace_s)
        except Exception:  # noqa: BLE001 (the fleet goes on, whatever one replica does)
            _log.exception("%s did not leave by itself", one.name)
        _log.info("%s has left", one.name)
        await self._remove(one)

    async def _remove(self, one: Replica) -> None:
        """Gives back what a replica had; only then may another have its ports."""
        one.address = one.http_address = ""
        try:
            await self._cluster.remove(one.ranks)
        finally:
            self._replicas.pop(one.name, None)
            if self._tasks.get(one.name) is asyncio.current_task():  # Else it leaves meanwhile.
                del self._tasks[one.name]
            self._changed.set()

    async def _hear_wanted(self) -> None:
        """What is wanted now. A registry that does not know, at first or because it has lost
        everything, is told. It is told each time how many were started: it may lose the latest."""
        try:
            wanted = await self._registry.wanted()
            if wanted.keys() != self.wanted.keys():
                await self._registry.want(self.wanted | wanted)
            await self._registry.note_started(self._num_started)
        except OutriderError as error:
            _log.info("what was wanted still is: %s", error)
            return
        found = self.spec.bounded(self.wanted | wanted)
        if found != self.wanted:
            _log.info("wanted: %s", ", ".join(f"{role}={found[role]}" for role in ROLES))
            self.wanted = found
            self._forget_troubles()
