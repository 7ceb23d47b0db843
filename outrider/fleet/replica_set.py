"""Starts missing replicas of a deployment, ends surplus replicas, and replaces dead and hung ones.

| state of a replica | what happens | when |
| --- | --- | --- |
| missing | placed and started | at once; after failures, with growing delays |
| one of its ranks has died | removed, and so missing | after at most `END_GRACE_S` |
| hung (`hang_watch.py`) | killed, and so missing | at once |
| surplus | drained (until quiet for `QUIET_S`), stopped | each may take `stop_timeout_s` |
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import random
from typing import Any, cast

from outrider.engine.tensor_parallel.rank_rpc import Rendezvous
from outrider.errors import (
    ConfigError,
    EngineLost,
    OutriderError,
    StoreUnavailable,
    TargetUnavailable,
    Unavailable,
)
from outrider.foundation.backoff import backoff
from outrider.limits import PROCESS_START_S
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ROLES, STARTS_LEASE_S, Engagement, Membership, Role, Starts
from outrider.replica.ray_actor import ActorLocation

from .hang_watch import HangWatch
from .ray_cluster import Actor, Cluster, retried
from .spec import FleetSpec
from .trial import Trial, TrialReport

_log = logging.getLogger(__name__)
ERROR_GRACE_S = 2.0
"""Time to wait for errors of other ranks after a rank has failed to start."""
END_GRACE_S = 0.5  # time to wait for errors of other ranks after a rank of a running replica ended
STOP_CALL_TIMEOUT_S = 5.0
"""Time that an actor may take to stop after its running requests have ended."""
SILENCE_S = 30.0
"""Time limit of an actor's answer to a new reconciler. Ray never reports that an actor has hung, or
that its machine is paused. The limit is longer than those of `hang_watch.py`, because an actor that
exceeds it is ended even if its lease runs. One without a lease is ended as soon as `HangWatch` says
so."""
QUIET_S = 1.0
"""A leaving replica counts as drained when it has received no requests for this time."""
CHECK_PERIOD_S = 0.5
DRAIN_CHECK_S = 1.0
"""Pause between two looks for nodes that Ray drains."""
FIRST_RETRY_DELAY_S = 1.0
"""Delay before the first retry of a failed start. Each further failure doubles the delay."""
RETRY_DELAY_S_MAX = 30.0
STABLE_S = 30.0
"""Once a replica has served for this time, earlier failures of its role no longer count."""
GIVE_UP_AFTER = 4
"""`serve` ends if a role other than draft fails this many times in a row and has no replica."""


@dataclass(frozen=True)
class ReplicaView:
    name: str
    role: Role
    address: str
    """HOST:PORT; empty while the replica does not serve."""
    leaves: bool = False
    """Whether the replica gets no new work and will end."""
    stale: bool = False
    """Whether the replica has old settings and will be replaced."""
    drained: bool = False
    """Whether a rank's node is drained by Ray. The replica leaves once another serves instead."""
    locations: tuple[ActorLocation, ...] = ()
    """Where the ranks run, the serving rank first; empty while the replica does not serve."""
    http_address: str = ""
    on_trial: bool = False
    """Whether this is a `Trial`'s replica. It is never stale, and `wanted` does not count it."""


@dataclass(frozen=True)
class Overview:
    """The state of a deployment."""

    wanted: Mapping[Role, int]
    replicas: tuple[ReplicaView, ...]
    """All replicas, the oldest first."""
    failed_role: Role | None
    """Target or coordinator, if this role has no replica and its new replicas fail to start."""
    upgrades: bool = False
    failures: tuple[str, ...] = ()
    """The latest failure of each role. It is removed when a new replica of the role serves."""
    trial: TrialReport | None = None
    """The running trial, or the latest trial since the reconciler (`reconciler.py`) started."""

    def of(self, role: Role) -> list[ReplicaView]:
        """The replicas of a role."""
        return [replica for replica in self.replicas if replica.role == role]

    def late(self, what: str, after_s: float) -> Unavailable:
        """The error of a command that waited `after_s` in vain for `what`: "serving" or "done"."""
        reasons = "; ".join(self.failures) or "see `outrider status` and the logs that it names"
        return Unavailable(f"not {what} after {after_s:g} s: {reasons}")

    @property
    def num_stale(self) -> int:
        """Number of replicas that an upgrade has yet to replace. For each role, this is
        max(stale replicas, wanted replicas - new replicas that serve)."""
        total = 0
        for role in ROLES if self.upgrades else ():
            replicas = self.of(role)
            num_new = sum(
                bool(replica.address and not (replica.stale or replica.on_trial))
                for replica in replicas
            )
            total += max(
                sum(replica.stale for replica in replicas), self.wanted.get(role, 0) - num_new
            )
        return total

    def addresses(self, role: Role, *, http: bool = False) -> list[str]:
        """The addresses of a role's replicas that do not leave, without duplicates. A coordinator
        and its replacement have the same address."""
        staying = (replica for replica in self.of(role) if not replica.leaves)
        addresses = (replica.http_address if http else replica.address for replica in staying)
        return list(dict.fromkeys(filter(None, addresses)))


class Replica:
    def __init__(self, spec: FleetSpec, member: Membership) -> None:
        """`spec` has the settings of the replica. The member's name is ROLE-N, where N counts all
        replicas that the deployment has started."""
        self.spec = spec
        self.member = member
        self.name = member.name
        self.role, _ = role_and_age(member.name)
        self.ranks: Sequence[Actor] = ()
        self.engagement = Engagement()
        """Empty while the replica does not serve."""
        self.leaves = False
        self.is_killed = False
        """Whether its actors are being killed. It then counts until they are gone."""
        self.task: asyncio.Task[None] | None = None
        """The task that starts and watches the replica, or that ends it."""
        self._hang: asyncio.Future[OutriderError] = asyncio.get_running_loop().create_future()
        """Done once the replica has hung."""

    @property
    def on_trial(self) -> bool:
        return bool(self.member.trial_share)

    @property
    def address(self) -> str:
        return self.engagement.address

    @property
    def ports(self) -> dict[str, int]:
        """The ports of a coordinator that serves, by the key of the port's setting."""
        addresses = {"grpc_port": self.address, "port": self.engagement.http_address}
        return {
            key: int(address.rpartition(":")[2]) for key, address in addresses.items() if address
        }

    def view(self, plan: str, draining: Collection[str] = ()) -> ReplicaView:
        locations = tuple(actor.location for actor in self.ranks) if self.address else ()
        return ReplicaView(
            self.name,
            self.role,
            self.address,
            leaves=self.leaves,
            stale=self.member.plan != plan and not self.on_trial,
            locations=locations,
            http_address=self.engagement.http_address,
            on_trial=self.on_trial,
            drained=any(rank.location.ray_node in draining for rank in self.ranks),
        )

    async def prepare(self, config: object) -> None:
        """Lets a coordinator do what it can before targets serve (`CoordinatorActor.prepare`)."""
        timeout_s = self.spec.config.model_timeout_s
        await self.ranks[0].call("prepare", config, self.spec.log_directory, timeout_s=timeout_s)

    async def begin(self, config: object) -> None:
        """Starts all ranks, and waits until the replica serves. The calls by name reach the classes
        in `Demand.classes`: `start` is the method of the role's actor (`ReplicaHost` or
        `CoordinatorActor`) on rank 0, and of `RankHost` on the other ranks."""
        log_directory, timeout_s = self.spec.log_directory, self.spec.config.model_timeout_s
        leader, *followers = self.ranks
        starts = [leader.call("start", config, log_directory, timeout_s=timeout_s)]
        if followers:
            on_node = Counter(actor.location.node for actor in self.ranks)
            rendezvous: Rendezvous = await leader.call(
                "open_rendezvous", len(self.ranks), on_node[leader.location.node], timeout_s
            )
            for actor in followers:
                seat = rendezvous, actor.rank, on_node[actor.location.node], timeout_s
                start = actor.call("start", config, *seat, log_directory, timeout_s=timeout_s)
                starts.append(start)
        await _all_or_error(*starts)
        self.engagement = await leader.call("engagement", timeout_s=timeout_s)

    async def ended(self) -> BaseException | None:
        """Waits until a rank ends, and then `END_GRACE_S` for errors of other ranks. The first
        error may only say that another rank was lost. Returns one error with the errors of all
        ranks that ended. Returns None if the replica was stopped. If the replica hangs, returns the
        error of `note_hang`."""
        waiting = [asyncio.create_task(actor.call("wait")) for actor in self.ranks]
        try:
            await asyncio.wait([*waiting, self._hang], return_when=asyncio.FIRST_COMPLETED)
            if self._hang.done():
                return self._hang.result()
            if pending := [task for task in waiting if not task.done()]:
                await asyncio.wait(pending, timeout=END_GRACE_S)
            ends = [task.exception() if task.done() else None for task in waiting]
        finally:
            for task in waiting:
                task.cancel()
        if len(ends) == 1 or not any(ends):
            return ends[0]
        return EngineLost("; ".join(f"rank {n}: {error}" for n, error in enumerate(ends) if error))

    async def adopt(self) -> bool:
        """Takes over the running replica whose actors are `ranks`. Returns False if it does not
        serve, lacks a rank, or hangs."""
        if self.ranks[0].rank:
            return False
        asking = asyncio.create_task(self._find())
        waiting: list[asyncio.Future[Any]] = [asking, self._hang]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            return False
        return asking.result()

    async def _find(self) -> bool:
        engagement: Engagement
        try:
            engagement, *placed = await asyncio.gather(
                self.ranks[0].call("engagement", timeout_s=SILENCE_S),
                *(actor.locate(SILENCE_S) for actor in self.ranks),
            )
        except Unavailable:
            return False
        if engagement.member is None or not all(placed) or len(self.ranks) != engagement.num_ranks:
            return False
        self.member, self.leaves = engagement.member, engagement.leaving
        self.engagement = engagement
        return True

    def note_hang(self, error: OutriderError) -> None:
        """Must be called once the replica has hung. Ends `adopt` and `ended`."""
        if not self._hang.done():
            self._hang.set_result(error)

    async def drain(self, timeout_s: float) -> None:
        """Announces that the replica leaves. Then waits for at most `timeout_s` until the replica
        receives no more requests. Does nothing for a coordinator: its `stop` waits for sessions."""
        if self.role == "coordinator":
            return
        try:
            await self.ranks[0].call("leave", timeout_s=STOP_CALL_TIMEOUT_S)
            before = -1
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while (now := await self.ranks[0].call("traffic")) != before:
                        before = now
                        await asyncio.sleep(QUIET_S)
        except Unavailable as error:
            _log.warning("%s did not drain: %s", self.name, error)

    async def stop(self, grace_s: float) -> None:
        for ranks in (self.ranks[:1], self.ranks[1:]):  # The leader is stopped first.
            await asyncio.gather(*(_stop(actor, grace_s) for actor in ranks))


def role_and_age(name: str) -> tuple[Role, int]:
    role, _, age = name.rpartition("-")
    return cast(Role, role), int(age)


async def _stop(actor: Actor, grace_s: float) -> None:
    try:
        await actor.call("stop", grace_s, timeout_s=grace_s + STOP_CALL_TIMEOUT_S)
    except OutriderError as error:
        _log.warning("the %s actor did not stop by itself: %s", actor.name, error)
    await actor.kill()


async def _all_or_error(*work: Awaitable[Any]) -> None:
    """Waits until all `work` has succeeded or a part has failed. After a failure, waits
    `ERROR_GRACE_S` for further errors, because the first error may only say that the connection to
    another rank was lost. Then raises like `raise_first`."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=ERROR_GRACE_S)
        raise_first([task.exception() for task in tasks if task.done()])
    finally:
        for task in tasks:
            task.cancel()


def raise_first(results: Sequence[object]) -> None:
    """Raises the first `ConfigError` among the results, otherwise the first error, if any."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: not isinstance(error, ConfigError)):
        raise error


def next_steps(
    wanted: Mapping[Role, int],
    fleet: Sequence[ReplicaView],
    held_back: Collection[Role] = (),
    in_place: Collection[Role] = (),
    without_room: Collection[Role] = (),
) -> tuple[list[Role], list[str]]:
    """Returns the role of each replica to start, and the names of replicas that must leave. `fleet`
    begins with the oldest replica. A *stale* replica has old settings.

    Missing replicas are started, except in roles that are `held_back`. Of surplus replicas, those
    that do not serve yet leave first, then stale replicas, then the youngest replicas.

    If no replica is missing, stale replicas are replaced one by one, role by role, drafts first. A
    new replica is started, and a stale replica leaves when the new replica serves. In the roles
    `in_place`, the stale replica ends before the new replica is started.

    The cluster has no room for missing replicas of the roles `without_room`. If such a role has
    several replicas, a stale replica leaves to make room.

    Drained replicas do not count. They leave once enough other replicas serve, and not earlier,
    because nothing can be started in the room that they leave."""
    starts: list[Role] = []
    leaves: list[str] = []
    stale = {
        replica.role
        for replica in fleet
        if replica.stale and not (replica.leaves or replica.drained)
    }
    rolled = next((role for role in reversed(ROLES) if role in stale), None)
    for role in ROLES:
        present = [
            replica for replica in reversed(fleet) if replica.role == role and not replica.leaves
        ]
        staying = [replica for replica in present if not replica.drained]
        staying.sort(key=lambda replica: (bool(replica.address), not replica.stale))
        num_more = wanted.get(role, 0) - len(staying)
        if role == rolled and all(replica.address for replica in staying):
            if num_more == 0:
                num_more = -1 if role in in_place else 1
            elif num_more > 0 and role in without_room and len(staying) > 1:
                num_more = -1
        elif role == rolled and num_more < 0:
            num_more += 1  # Keep one surplus replica, which will replace a stale replica.
        makes_room = any(
            replica.role == role and replica.stale and replica.leaves for replica in fleet
        )
        is_held = role in held_back or (role in in_place and makes_room)
        if num_more > 0 and not is_held:
            starts += [role] * num_more
        if num_more < 0:
            leaves += [replica.name for replica in staying[:-num_more]]
        if sum(bool(replica.address) for replica in staying) >= wanted.get(role, 0):
            leaves += [replica.name for replica in present if replica.drained]
    return starts, leaves


class RestartState:
    """The failures of a role since the last change of its wanted number or settings."""

    num_failures = 0
    not_before = 0.0
    reason = ""
    """Why the last replica died or failed to start; empty once a replica has started."""
    lacks_room = False
    """Whether the cluster lacks room for a new replica until a stale replica leaves."""
    has_made_room = False
    """Whether a stale replica has left to make room. Until a new replica serves, no other stale
    replica leaves. So if new replicas fail to start, the other stale replicas still serve."""

    @property
    def has_given_up(self) -> bool:
        return self.num_failures >= GIVE_UP_AFTER


class Fleet:
    def __init__(self, cluster: Cluster, spec: FleetSpec, registry: RedisRegistry) -> None:
        self.spec = spec
        self._cluster = cluster
        self._registry = registry
        self.wanted: dict[Role, int] = dict(spec.counts)
        self._replicas: dict[str, Replica] = {}
        self._num_started = 0
        self._restarts = {role: RestartState() for role in ROLES}
        self.trial: Trial | None = None
        self.trial_failure = ""
        self._last_start_s: dict[Role, float] = {}
        """Time in which the last replica of a role with the current model started to serve."""
        self._ports: dict[tuple[Role, int], dict[str, int]] = {}
        """By role and `Membership.index`: the last replica's ports. Its successor may use them."""
        self._changed = asyncio.Event()
        self._hangs = HangWatch(registry, self._serving)
        self._draining: Collection[str] = frozenset()
        """Ray's ids of the nodes that Ray drains."""

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    def _serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.address and not replica.leaves]

    def _views(self) -> tuple[ReplicaView, ...]:
        return tuple(
            replica.view(self.spec.plans[replica.role], self._draining) for replica in self.replicas
        )

    def overview(self, upgrades: bool, trial: TrialReport | None) -> Overview:
        views = self._views()
        return Overview({**self.wanted}, views, self.failed_role, upgrades, self.failures, trial)

    def of(self, role: Role) -> list[Replica]:
        return [replica for replica in self.replicas if replica.role == role]

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(restart.reason for restart in self._restarts.values() if restart.reason)

    @property
    def failed_role(self) -> Role | None:
        for role in ("target", "coordinator"):
            if self._restarts[role].has_given_up and not self.of(role):
                return role
        return None

    def starts(self, role: Role) -> Starts:
        """The replicas of a role that are being started or will be."""
        staying = [
            replica for replica in self.of(role) if not (replica.leaves or replica.is_killed)
        ]
        names = tuple(replica.name for replica in staying if not replica.address)
        num_there = sum(not replica.on_trial for replica in staying)
        restart, is_missing = self._restarts[role], num_there < self.wanted[role]
        return Starts(
            role,
            names,
            bool(names or is_missing) and not restart.has_given_up,
            restart.num_failures,
            self._last_start_s.get(role),
        )

    async def start(self) -> None:
        """Starts targets and drafts, and prepares coordinators. When all targets and drafts serve,
        starts coordinators. Raises the errors of replicas and of `Cluster.place`, and
        `StoreUnavailable`."""
        await self._registry.want(self.wanted)
        self._num_started = await self._registry.started()
        replicas = [self._new(role) for role in ROLES for _ in range(self.wanted[role])]
        await self._place(*replicas)
        coordinators = [replica for replica in replicas if replica.role == "coordinator"]
        begun = [self._begin(replica) for replica in replicas if replica not in coordinators]
        prepared = [
            replica.prepare(self.spec.replica_config(replica.role, replica.member))
            for replica in coordinators
        ]
        raise_first(await asyncio.gather(*begun, *prepared, return_exceptions=True))
        begun = [self._begin(replica) for replica in coordinators]
        raise_first(await asyncio.gather(*begun, return_exceptions=True))

    async def _place(self, *replicas: Replica) -> None:
        demands = [
            replace(replica.spec.demands[replica.role], name=replica.name) for replica in replicas
        ]
        room_s = self.spec.config.startup_timeout_s
        placed = await self._cluster.place(demands, room_s, PROCESS_START_S)
        for replica, ranks in zip(replicas, placed, strict=True):
            replica.ranks = ranks
        self.spec = self.settled(self.spec)

    async def adopt(self) -> None:
        """Takes over existing replicas that serve, and ends existing replicas that do not."""
        existing = await self._cluster.replicas()
        names = sorted(existing, key=lambda name: role_and_age(name)[1])
        candidates = [self._candidate(existing[name]) for name in names]
        watching = asyncio.create_task(HangWatch(self._registry, lambda: candidates).run())
        try:
            adopted = await asyncio.gather(*(candidate.adopt() for candidate in candidates))
        finally:
            watching.cancel()
        for candidate, is_adopted in zip(candidates, adopted, strict=True):
            if is_adopted:
                self._replicas[candidate.name] = candidate
                self._ports[candidate.role, candidate.member.index] = candidate.ports
            else:
                _log.warning("%s does not serve, and is ended", candidate.name)
                await self._cluster.remove(candidate.ranks)
        await self._cluster.free_groups(self._replicas)
        num_started = await retried("Redis cannot be read", self._registry.started)
        self._num_started = max([num_started, *(role_and_age(name)[1] + 1 for name in names)])
        starts = await retried("Redis cannot be read", self._registry.starts)
        self._last_start_s = {
            role: start.last_s for role, start in starts.items() if start.last_s is not None
        }
        self.wanted |= Counter(replica.role for replica in self.replicas if not replica.on_trial)
        await retried("the wanted numbers of replicas cannot be read", self._adopt_wanted)
        try:
            self.spec = self.settled(self.spec)
        except ConfigError as error:  # The existing replicas continue to serve.
            _log.error("new replicas may not be reachable: %s", error)
        _log.info("replicas taken over: %s", ", ".join(self._replicas) or "none")

    def _candidate(self, ranks: Sequence[Actor]) -> Replica:
        name = ranks[0].replica
        role, _ = role_and_age(name)
        replica = Replica(self.spec, self.spec.member(role, name, 0))
        replica.ranks = ranks
        return replica

    def settled(self, spec: FleetSpec) -> FleetSpec:
        return spec.settled(
            [
                (replica.role, actor.location.node)
                for replica in self.replicas
                for actor in replica.ranks
            ]
        )

    def use(self, spec: FleetSpec) -> None:
        """Uses new settings, so `run` replaces old replicas. Raises like `FleetSpec.settled`."""
        before, self.spec = self.spec, self.settled(spec)
        for role in ROLES:
            if before.model(role) != spec.model(role):
                self._last_start_s.pop(role, None)
        self._reset_restarts()

    def set_trial(self, trial: Trial | None) -> None:
        self.trial, self.trial_failure = trial, ""
        self._changed.set()

    @property
    def on_trial(self) -> Replica | None:
        spec = None if self.trial is None else self.trial.spec
        return next(
            (replica for replica in self.replicas if replica.spec is spec and not replica.leaves),
            None,
        )

    def _is_tried(self, replica: Replica) -> bool:
        """Whether a replica on trial stays. It stays while its trial runs. After a successful
        trial, it stays until another replica with the trial's settings serves."""
        plan = self.spec.plans[replica.role]
        serves = any(
            other.address and other.member.plan == plan and not other.on_trial
            for other in self.of(replica.role)
        )
        is_taken = replica.member.plan == plan and self.wanted[replica.role] > 0
        return replica is self.on_trial or (is_taken and not serves)

    def _reset_restarts(self) -> None:
        self._restarts = {role: RestartState() for role in ROLES}
        self._changed.set()

    async def run(self) -> None:
        """Runs for ever. If one part fails, the other ends, too."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._run())
            parts.create_task(self._hangs.run())
            parts.create_task(self._watch_drains())

    async def _run(self) -> None:
        for replica in self.replicas:
            self._follow(replica)
        while True:
            try:
                await self._adopt_wanted()
                await self._registry.announce_starts([self.starts(role) for role in ROLES])
            except OutriderError as error:
                _log.info("the wanted numbers of replicas cannot be read: %s", error)
            self._step()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_PERIOD_S):
                    await self._changed.wait()
            self._changed.clear()

    async def _watch_drains(self) -> None:
        """A task of its own, because the call may last as long as Ray's head does not answer."""
        while True:
            try:
                self._draining = await self._cluster.draining()
            except Unavailable as error:
                _log.info("nodes that are drained are not noticed: %s", error)
            await asyncio.sleep(DRAIN_CHECK_S)

    def _step(self) -> None:
        now = asyncio.get_running_loop().time()
        held_back = {role for role, restart in self._restarts.items() if now < restart.not_before}
        if not any(replica.address for replica in self.of("target")):
            held_back.add("coordinator")  # A coordinator does not start without a target.
        without_room = {role for role, restart in self._restarts.items() if restart.lacks_room}
        in_place = {role for role in ROLES if self.spec.replaced_in_place(role)} | without_room
        without_room = {role for role in without_room if not self._restarts[role].has_made_room}
        views = [replica for replica in self._views() if not replica.on_trial]
        starts, leaves = next_steps(self.wanted, views, held_back, in_place, without_room)
        for role in starts:
            self._follow(self._new(role))
        trial = None if self.on_trial or self.trial_failure else self.trial
        if trial is not None and trial.role not in held_back:
            self._follow(self._new(trial.role, trial))
        leaves += [
            replica.name
            for replica in self.replicas
            if replica.on_trial and not replica.leaves and not self._is_tried(replica)
        ]
        for name in leaves:
            replica = self._replicas[name]
            replica.leaves = True
            self._restarts[replica.role].has_made_room = self._restarts[replica.role].lacks_room
            self._follow(replica)

    def _follow(self, replica: Replica) -> None:
        work = self._leave(replica, replica.task) if replica.leaves else self._live(replica)
        replica.task = asyncio.create_task(work)

    async def close(self) -> None:
        tasks = [replica.task for replica in self.replicas if replica.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        grace_s = self.spec.config.stop_timeout_s
        for roles in (("coordinator",), ("target", "draft")):
            going = [replica for replica in self.replicas if replica.role in roles]
            await asyncio.gather(*(replica.stop(grace_s) for replica in going))
        self._replicas.clear()
        try:
            await self._registry.withdraw_starts()
        except StoreUnavailable as error:
            _log.warning("starts are announced for up to %g s more: %s", STARTS_LEASE_S, error)

    def _new(self, role: Role, trial: Trial | None = None) -> Replica:
        spec, share = (self.spec, 0.0) if trial is None else (trial.spec, trial.share)
        name = f"{role}-{self._num_started}"
        replica = Replica(spec, spec.member(role, name, self._free_index(role), share))
        self._num_started += 1
        self._replicas[replica.name] = replica
        return replica

    def _free_index(self, role: Role) -> int:
        """Returns the lowest free `Membership.index`. If the role keeps its ports and has stale
        replicas, returns the index of the youngest stale replica, which leaves next."""
        taken, stale = set(), []
        for replica in self.of(role):
            if self.spec.keeps_ports(role) and replica.member.plan != self.spec.plans[role]:
                stale.append(replica.member.index)
            else:
                taken.add(replica.member.index)
        left = [index for index in reversed(stale) if index not in taken]
        return left[0] if left else min({*range(len(taken) + 1)} - taken)

    async def _begin(self, replica: Replica) -> None:
        spec, index = self.settled(replica.spec), replica.member.index
        takes_over = sum(other.member.index == index for other in self.of(replica.role)) > 1
        # Without an old replica to hold the known ports, another process may have taken them. Then
        # this start fails, and the next start chooses other ports, because `pop` forgets these.
        known = self._ports.get if takes_over else self._ports.pop
        ports = known((replica.role, index), {}) if spec.keeps_ports(replica.role) else {}
        config = spec.replica_config(
            replica.role, replica.member, takes_over=takes_over, ports=ports
        )
        loop = asyncio.get_running_loop()
        began = loop.time()
        await replica.begin(config)
        if replica.spec.model(replica.role) == self.spec.model(replica.role):
            self._last_start_s[replica.role] = loop.time() - began
        self._ports[replica.role, index] = replica.ports

    async def _live(self, replica: Replica) -> None:
        """Starts a replica unless it already serves, waits until it ends, and removes it."""
        loop = asyncio.get_running_loop()
        began, what = math.inf, "did not start"
        error: BaseException | None
        try:
            if not replica.address:
                await self._start(replica)
            began, what = loop.time(), "is gone"
            error = await replica.ended()
        except Exception as caught:  # noqa: BLE001 (one replica must not stop the fleet)
            error = caught
        reason = f"{replica.name} {what}: {error or 'it has stopped'}"
        _log.error(reason, exc_info=None if isinstance(error, OutriderError) else error)
        is_its_own = not isinstance(error, StoreUnavailable | TargetUnavailable)
        if replica.on_trial and is_its_own:
            if replica is self.on_trial:
                self.trial_failure = reason
        else:
            restart = self._restarts[replica.role]
            restart.reason = reason
            if loop.time() - began > STABLE_S:
                restart.num_failures = 0
            delay_s = backoff(FIRST_RETRY_DELAY_S, RETRY_DELAY_S_MAX, restart.num_failures, random)
            restart.not_before = loop.time() + delay_s
            restart.num_failures += is_its_own
        await self._remove(replica)

    async def _start(self, replica: Replica) -> None:
        try:
            await self._place(replica)
        except ConfigError:
            self._restarts[replica.role].lacks_room |= not (replica.ranks or replica.on_trial)
            raise
        await self._begin(replica)
        restart = self._restarts[replica.role]
        restart.has_made_room, restart.reason = False, ""
        _log.info("%s serves at %s", replica.name, replica.address)
        self._changed.set()

    async def _leave(self, replica: Replica, life: asyncio.Task[None] | None) -> None:
        """Drains and ends a replica. `life` is the task that has started or watched the replica."""
        grace_s = self.spec.config.stop_timeout_s
        if life is not None:
            life.cancel()
            await asyncio.wait([life])
        try:
            if replica.address:
                await replica.drain(grace_s)
                await replica.stop(grace_s)
        except Exception:  # noqa: BLE001 (one replica must not stop the fleet)
            _log.exception("%s did not leave by itself", replica.name)
        _log.info("%s has left", replica.name)
        await self._remove(replica)

    async def _remove(self, replica: Replica) -> None:
        """Kills the actors. Retries while Ray's head does not answer, so no actor is forgotten."""
        replica.engagement, replica.is_killed = Engagement(), True
        try:
            await retried(
                f"{replica.name} cannot be killed", partial(self._cluster.remove, replica.ranks)
            )
        finally:
            self._replicas.pop(replica.name, None)
            self._changed.set()

    async def _adopt_wanted(self) -> None:
        """Reads the wanted numbers from Redis. Writes the numbers that Redis lacks, and the number
        of started replicas if Redis has another one, because it may have lost its data."""
        wanted, num_started = await self._registry.wanted_and_started()
        if wanted.keys() != self.wanted.keys():
            await self._registry.want(self.wanted | wanted)
        if num_started != self._num_started:
            await self._registry.note_started(self._num_started)
        bounded = self.spec.bounded(self.wanted | wanted)
        if bounded != self.wanted:
            _log.info("wanted replicas: %s", ", ".join(f"{role}={bounded[role]}" for role in ROLES))
            self.wanted = bounded
            self._reset_restarts()
