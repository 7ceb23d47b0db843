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
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from outrider.errors import ConfigError, OutriderError, StoreUnavailable
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ROLES, Role

from .ray_cluster import Actor, Cluster, retried
from .replica import Replica, raise_first, role_and_age
from .spec import FleetSpec
from .status import ReplicaView

_log = logging.getLogger(__name__)

LOOK_PERIOD_S: Final = 0.5
"""Between two looks at how many are wanted."""
FIRST_REST_S: Final = 1.0
"""Until a replica is started again that did not start, or died; it doubles with each failure ..."""
REST_S_MAX: Final = 30.0
"""... up to this ..."""
DOUBLINGS_MAX: Final = 5
"""... which it has reached by then."""
STABLE_S: Final = 30.0
"""A replica that served for so long and dies does not count as a failed start."""
HOPELESS_AFTER: Final = 4
"""Failures of a role, one after the other, of which no replica serves."""


ROLLING: Final[tuple[Role, ...]] = ("draft", "target", "coordinator")
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


class Fleet:
    """The replicas of one deployment."""

    def __init__(
        self,
        cluster: Cluster,
        spec: FleetSpec,
        registry: RedisRegistry,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when a replica begins to serve, or is gone."""
        self.spec = spec
        self._cluster = cluster
        self._registry = registry
        self._on_change = on_change
        self.wanted: dict[Role, int] = dict(spec.counts)
        self._replicas: dict[str, Replica] = {}
        self._num_started = self._num_told = 0
        self._failures = dict.fromkeys(ROLES, 0)
        self._not_before = dict.fromkeys(ROLES, 0.0)
        self.last_failures: dict[Role, str] = {}
        """Why a replica of a role did not start, until one does."""
        self._crowded: set[Role] = set()
        """Roles of which another replica has found no place: a stale one must leave first."""
        self._made_way: set[Role] = set()
        """Of these those of which one has left, and none has begun to serve since: meanwhile no
        other one leaves, as those that come may never serve."""
        self._lives: dict[str, asyncio.Task[None]] = {}
        """The tasks that start and watch each replica, by name ..."""
        self._leaving: set[asyncio.Task[None]] = set()
        """... and the ends of those that are not wanted."""
        self._changed = asyncio.Event()

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    def views(self) -> tuple[ReplicaView, ...]:
        """What others are told of them, the oldest first."""
        return tuple(one.view(self.spec.plans[one.role]) for one in self._replicas.values())

    def of(self, role: Role) -> list[Replica]:
        return [one for one in self._replicas.values() if one.role == role]

    async def place(self) -> None:
        """Finds a place for all replicas that are wanted at first. Raises as `Cluster.place`, and
        `StoreUnavailable`; then there are none."""
        await self._registry.want(self.wanted)
        self._num_started = await self._registry.started()
        replicas = [self._new(role) for role in ROLES for _ in range(self.wanted[role])]
        try:
            await self._place(replicas)
        except BaseException:
            await self._cluster.remove([actor for one in replicas for actor in one.ranks])
            self._replicas.clear()
            raise

    async def _place(self, replicas: Sequence[Replica]) -> None:
        demands = [replace(self.spec.demands[one.role], name=one.name) for one in replicas]
        placed = await self._cluster.place(demands, self.spec.config.startup_timeout_s)
        for one, ranks in zip(replicas, placed, strict=True):
            one.ranks = ranks
        self.spec = self._settled(self.spec)

    async def adopt(self) -> None:
        """Takes over the replicas that another fleet has left, and goes on with what it had
        begun; whatever does not serve yet is ended, to be started anew."""
        there = await self._cluster.replicas()
        await asyncio.gather(*(self._adopt(name, ranks) for name, ranks in there.items()))
        await self._cluster.free_groups(self._replicas)
        found = sorted(self._replicas.values(), key=lambda one: one.age)
        self._replicas = {one.name: one for one in found}
        await retried("what is wanted", self._recall)
        try:
            self.spec = self._settled(self.spec)
        except ConfigError as error:  # They serve all the same.
            _log.error("later ones may not be reached: %s", error)
        _log.info("taken over: %s", ", ".join(self._replicas) or "nothing")

    async def _adopt(self, name: str, ranks: Sequence[Actor]) -> None:
        self._num_started = max(self._num_started, role_and_age(name)[1] + 1)
        one = await Replica.adopted(name, ranks)
        if one is None:
            _log.warning("%s does not serve, and is ended", name)
            await self._cluster.remove(ranks)
        else:
            self._replicas[name] = one

    async def _recall(self) -> None:
        """What the other fleet had been told and has done. Until that is known nothing is done: a
        replica that is started could not be announced, and its name might not be its own."""
        wanted, num_started = await self._registry.wanted(), await self._registry.started()
        there = {role: len(self.of(role)) for role in ROLES if self.of(role)}
        self.wanted = self.spec.bounded(self.wanted | there | wanted)
        self._num_started = max(self._num_started, num_started)

    def _settled(self, spec: FleetSpec) -> FleetSpec:
        return spec.settled([
            (one.role, actor.place.node) for one in self.replicas for actor in one.ranks
        ])  # fmt: skip

    def check(self, spec: FleetSpec) -> None:
        """Raises `SettingError` for a spec that does not fit the machines that replicas are on."""
        self._settled(spec)

    def use(self, spec: FleetSpec) -> None:
        """Another spec: what it changes is replaced, one by one. Raises as `check`."""
        self.spec = self._settled(spec)
        self.last_failures.clear()
        self._forget_crowding()

    def _forget_crowding(self) -> None:
        self._crowded.clear()
        self._made_way.clear()
        self._changed.set()

    async def begin(self, *roles: Role) -> None:
        """Starts the replicas of these roles that have their places, at the same time. Raises what
        the first says that fails, a `ConfigError` before others."""
        starting = [self._begin(one) for role in roles for one in self.of(role)]
        raise_first(await asyncio.gather(*starting, return_exceptions=True))

    async def run(self) -> Role:
        """Keeps as many as are wanted, until there is none of a role that cannot be done without,
        and none can be started: returns that role. It can be asked to try again."""
        self._failures = dict.fromkeys(ROLES, 0)
        for one in self._replicas.values():
            if one.name in self._lives:
                continue
            if one.leaves:
                self._let_go(one)
            else:
                self._lives[one.name] = asyncio.create_task(self._live(one, self._watch))
        while True:
            await self._hear_wanted()
            self._step()
            for role in ("target", "coordinator"):
                if self._failures[role] >= HOPELESS_AFTER and not self.of(role):
                    return role
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_PERIOD_S):
                    await self._changed.wait()
            self._changed.clear()

    def _step(self) -> None:
        now = asyncio.get_running_loop().time()
        held_back = [role for role in ROLES if now < self._not_before[role]]
        if not any(one.address for one in self.of("target")):
            held_back.append("coordinator")  # It could say of no model what it is.
        in_place = {role for role in ROLES if self.spec.replaced_in_place(role)} | self._crowded
        crowded = self._crowded - self._made_way
        starts, leaves = next_steps(self.wanted, self.views(), held_back, in_place, crowded)
        for role in starts:
            one = self._new(role)
            self._lives[one.name] = asyncio.create_task(self._live(one, self._start))
        for name in leaves:
            one = self._replicas[name]
            if one.role in self._crowded:
                self._made_way.add(one.role)
            self._let_go(one)

    def _let_go(self, one: Replica) -> None:
        one.leaves = True
        self._on_change()
        task = asyncio.create_task(self._leave(one))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Stops all, coordinators before those that they call."""
        tasks = [*self._leaving, *self._lives.values()]
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

    async def _live(self, one: Replica, work: Callable[[Replica], Awaitable[None]]) -> None:
        """Runs `work` until the replica ends, and removes it."""
        is_its_own = True
        try:
            await work(one)
        except StoreUnavailable as error:
            _log.warning("%s did not start for want of Redis: %s", one.name, error)
            is_its_own = False
        except OutriderError as error:
            _log.error("%s did not start: %s", one.name, error)
            self.last_failures[one.role] = f"{one.name} did not start: {error}"
        except Exception:  # noqa: BLE001 (the fleet goes on, whatever one replica does)
            _log.exception("%s did not start", one.name)
        if one.leaves:
            return  # `_leave` does the rest.
        rest_s = FIRST_REST_S
        if is_its_own:
            num_doublings = min(self._failures[one.role], DOUBLINGS_MAX)
            rest_s = min(FIRST_REST_S * 2**num_doublings, REST_S_MAX)
            self._failures[one.role] += 1
        self._not_before[one.role] = asyncio.get_running_loop().time() + rest_s
        await self._remove(one)

    async def _start(self, one: Replica) -> None:
        try:
            await self._place([one])
        except ConfigError:
            if not one.ranks:
                self._crowded.add(one.role)
            raise
        await self._begin(one)
        self._made_way.discard(one.role)
        self.last_failures.pop(one.role, None)
        _log.info("%s serves at %s", one.name, one.address)
        self._tell_changed()
        await self._watch(one)

    async def _watch(self, one: Replica) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        error = await one.ended()
        if one.leaves:
            return
        _log.error("%s is gone, and is replaced: %s", one.name, error or "it has stopped")
        if loop.time() - began > STABLE_S:
            self._failures[one.role] = 0

    async def _leave(self, one: Replica) -> None:
        """Ends a replica once it is not used, or when the time is over; one that has not started
        yet at once."""
        grace_s = self.spec.config.stop_timeout_s
        try:
            if one.address:
                await one.drain(grace_s)
                await one.stop(grace_s)
            else:
                life = self._lives[one.name]
                life.cancel()
                await asyncio.wait([life])
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
            self._lives.pop(one.name, None)
            self._tell_changed()

    async def _hear_wanted(self) -> None:
        """What is wanted now. A registry that does not know, at first or because it has lost
        everything, is told; and so it is of what has been started."""
        try:
            wanted = await self._registry.wanted()
            if wanted.keys() != self.wanted.keys():
                await self._registry.want(self.wanted | wanted)
                self._num_told = 0
            if self._num_told != self._num_started:
                await self._registry.note_started(self._num_started)
                self._num_told = self._num_started
        except OutriderError as error:
            _log.info("what was wanted still is: %s", error)
            return
        found = self.spec.bounded(self.wanted | wanted)
        if found != self.wanted:
            _log.info("wanted: %s", ", ".join(f"{role}={found[role]}" for role in ROLES))
            self.wanted = found
            self._failures = dict.fromkeys(ROLES, 0)
            self._not_before = dict.fromkeys(ROLES, 0.0)
            self._forget_crowding()
            self._on_change()

    def _tell_changed(self) -> None:
        self._changed.set()
        self._on_change()
