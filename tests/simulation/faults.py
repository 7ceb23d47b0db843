"""The greater faults: each affects a process that serves a session in flight, or is skipped.

| kind | what happens |
| --- | --- |
| `crash` | a target or a draft dies; the fleet starts another |
| `death` | a coordinator dies; the fleet starts another |
| `hang` | a replica is stopped for good; the fleet kills it, and starts another |
| `stuck_step` | a step of a target or a draft never ends; the fleet starts another |
| `pause` | a target or a draft is stopped for a while, and continues with its state |
| `stall` | a coordinator is stopped for a while; its clients' streams may break meanwhile |
| `hang_up` | all clients' streams of a coordinator break |
| `oust` | a coordinator's append reaches Redis just after another took over the session |
| `break` | all streams of a coordinator to a replica break, and are reopened |
| `cut_replica` | no messages between a coordinator and a replica |
| `cut_store` | no messages between a coordinator and Redis |
| `cut_registry` | no messages between a replica and Redis |
| `..._one_way` | the same in one direction |
| `slow_link` | messages in one direction between two processes have a low bandwidth |
| `loop_stall` | a process is stopped; then it handles arrivals before overdue timers |
| `clock_jump` | the wall clock of a host jumps, that of Redis by seconds, others by minutes |
| `redis_pause` | Redis is stopped for a while, then handles what arrived |
| `restart` | Redis dies and returns without the last tokens of a session |
| `flush` | Redis loses everything |
| `oom` | from some write on Redis refuses all commands that need memory, also inside a script |
| `full_store` | the same for much longer: Redis refuses all of them |
| `two_primaries` | a copy without the newest writes replaces Redis for some processes only |
| `lost_take_over` | Redis loses a take-over, and gives its epoch again |
| `abandon` | the fleet's process dies, and another one takes over the replicas |
| `head_loss` | Ray's head is away, in half of the cases the fleet's process with it |
| `scale` | another number of replicas is wanted |
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

from outrider.errors import InvariantError
from outrider.registry.registry import ROLES, Role
from tests.simulation.network import CALM, TRAVEL_S, Cut, SlowLink
from tests.simulation.processes import Process
from tests.simulation.redis_data import Snapshot
from tests.simulation.world import REPLICAS_MAX, World

Harm = tuple[str, Callable[[], Awaitable[None]]]
NUM_FAULTS = (3, 8)
"""Fewest and most faults in a seed, as far as its sessions last."""
BREAKS_AFTER_S = 5.0
"""A longer cut breaks streams on which something was sent, as TCP gives up."""
GAPS_S_MAX = (2.0, 0.1)
"""Longest gap between two faults while sessions make no progress; the second value makes them
almost simultaneous."""
DEATHS_MAX = 3
"""Per role and seed. A fourth in so short a time would count as a role that cannot be started."""
LOOKS_S_MAX = 20.0
"""Longest search for a process that a fault would affect."""
LOOK_S = 0.01
BANDWIDTH_LOG = math.log(300.0), math.log(30_000.0)
"""Range of the bandwidth of a slow link, log of bytes per second: a message of a kilobyte takes
seconds, or hardly any time."""
REDIS_JUMP_S_MAX = 5.0
"""Redis expires keys by its wall clock, so its jumps move expiry."""
FULL_S_MAX = 15.0
FULL_SHARE = 0.5
"""Share of the seeds in which Redis may be full for long."""
OUSTED_S_MAX = 8.0
HUNG_S_MAX = 60.0
"""Longest time until the fleet has killed a hung replica, also if Redis, Ray's head and the fleet's
own process are away meanwhile."""
LIKELY = 0.9
CUTS = ("cut_replica", "cut_store", "cut_registry")
GREATER = {
    "crash",
    "death",
    "hang",
    "stuck_step",
    "pause",
    "stall",
    "hang_up",
    "break",
    "scale",
    "abandon",
    "slow_link",
    "loop_stall",
    "clock_jump",
    "head_loss",
    "oust",
    "redis_pause",
    "restart",
    "flush",
    "two_primaries",
    "lost_take_over",
    "oom",
    "full_store",
    *CUTS,
    *(f"{kind}_one_way" for kind in CUTS),
}


class Faults:
    """The faults of one seed, one after the other or at the same time."""

    def __init__(self, world: World, flights: Any, kinds: Collection[str]) -> None:
        """`flights` knows the sessions in flight; only faults of these `kinds` are done."""
        self._world = world
        self._flights = flights
        self._kinds = kinds
        self._adversary = world.network.adversary
        self._rng = world.network.adversary.rng
        self._deaths: Counter[str] = Counter()
        self._under_way: list[asyncio.Task[None]] = []
        self._redis_goes = False
        """Whether Redis is about to die, or to be replaced."""
        self._may_be_full = self._rng.random() < FULL_SHARE
        """Whether Redis may still be full for long: twice would exceed what clients wait."""
        self._ousts = False
        """Whether a coordinator is being ousted: with two at once, none could take over."""

    async def run(self) -> None:
        """Injects faults, and returns when all are over and no more will come."""
        rng, total = self._rng, self._flights.num_planned
        marks = [rng.uniform(0.0, 0.6) * total for _ in range(rng.randint(*NUM_FAULTS))]
        for mark in sorted(marks):
            await self._wait(mark, rng.uniform(0.0, rng.choice(GAPS_S_MAX)))
            if not await self._do_one():
                break  # All further noise would only keep sessions from being read.
        for task in self._under_way:
            await task
        self._adversary.odds = CALM

    async def _wait(self, mark: float, seconds: float) -> None:
        """Waits until this many tokens have been shown, but no longer than `seconds`."""
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until and self._flights.num_shown < mark:
            if self._flights.all_over:
                return
            await asyncio.sleep(LOOK_S)

    async def _do_one(self) -> bool:
        """Returns whether a fault was possible."""
        rng, loop = self._rng, asyncio.get_running_loop()
        give_up_at = loop.time() + LOOKS_S_MAX
        while not self._flights.all_over and loop.time() < give_up_at:
            possible = [harm for harm in self._possible() if harm[0] in self._kinds]
            kinds = sorted({kind for kind, _ in possible})
            if kinds:
                kind = rng.choice(kinds)
                _, harm = rng.choice([one for one in possible if one[0] == kind])
                self._adversary.faults[kind] += 1
                self._under_way.append(asyncio.create_task(harm()))  # type: ignore[arg-type]
                await asyncio.sleep(0)  # Lets it begin, so that the next one sees it.
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def _possible(self) -> list[Harm]:
        world = self._world
        if not self._flights.running:
            return []
        busy = [node for node in world.nodes("coordinator") if node.calls]
        redis = world.redis.process
        found: list[Harm] = [("scale", self._scale), *self._of_redis(busy)]
        if world.machines.head.is_set():
            found.append(("head_loss", self._head_loss))
            if world.has_fleet:
                found.append(("abandon", self._abandon))
        found.append(("clock_jump", partial(self._jump, redis, REDIS_JUMP_S_MAX)))
        for one in busy:
            found.append(("hang_up", partial(self._call, world.break_calls, one)))
            if not one.process.is_still:
                found.append(("loop_stall", partial(self._hold_up, one.process)))
            if self._deaths["coordinator"] < DEATHS_MAX:
                found.append(("death", partial(self._die, one)))
                if not one.process.is_still:
                    found.append(("stall", partial(self._stall, one)))
                    found.append(("hang", partial(self._hang, one)))
            found.append(("clock_jump", partial(self._jump, one.process)))
            found += self._cuts("cut_store", one.process, redis)
            found += self._slow(one.process, redis)
        for actor in world.actors:
            node = actor.node
            if node.role == "coordinator":
                continue
            askers = [one for one in busy if one.has_session_at(node.name)]
            if not askers:
                continue
            if not node.process.is_still:
                found.append(("pause", partial(self._pause, node.process)))
                found.append(("loop_stall", partial(self._hold_up, node.process)))
            if self._deaths[node.role] < DEATHS_MAX:
                found.append(("crash", partial(self._die, node)))
                found.append(("stuck_step", partial(self._get_stuck, node)))
                if not node.process.is_still:
                    found.append(("hang", partial(self._hang, node)))
            found += self._cuts("cut_registry", node.process, redis)
            for one in askers:
                ends = one.process, node.process
                broken = partial(self._call, world.break_wires, *ends, reachable=True)
                found.append(("break", broken))
                found += self._slow(*ends)
                found += self._cuts("cut_replica", *ends)
        return found

    def _of_redis(self, busy: list[Any]) -> list[Harm]:
        redis = self._world.redis
        found: list[Harm] = []
        if not redis.process.is_dead:
            found.append(("flush", partial(self._call, redis.flush)))
        is_there = not (redis.process.is_still or self._redis_goes)
        if is_there:
            found += [
                ("restart", self._restart),
                ("redis_pause", partial(self._pause, redis.process)),
                ("two_primaries", self._two_primaries),
            ]
            if redis.primary.data.num_writes_left is None:
                found.append(("oom", self._oom))
                if self._may_be_full:
                    found.append(("full_store", self._full_store))
        if not self._ousts and len(list(self._world.nodes("coordinator"))) > 1:
            for one in busy:
                found.append(("oust", partial(self._oust, one)))
                if is_there:
                    found.append(("lost_take_over", partial(self._lost_take_over, one)))
        return found

    def _cuts(self, kind: str, a: Process, b: Process) -> list[Harm]:
        ways = [
            (kind, [(a, b), (b, a)]),
            (f"{kind}_one_way", [(a, b)]),
            (f"{kind}_one_way", [(b, a)]),
        ]
        return [(name, partial(self._cut, pairs, kind == "cut_replica")) for name, pairs in ways]

    async def _cut(self, pairs: list[tuple[Process, Process]], breaks: bool) -> None:
        rng, network = self._rng, self._world.network
        cut, lasts_s = Cut(pairs, loses=rng.random() < 0.5), rng.uniform(0.05, 8.0)
        network.cut(cut)
        await asyncio.sleep(min(lasts_s, BREAKS_AFTER_S))
        breaks = breaks and lasts_s > BREAKS_AFTER_S
        if breaks:
            self._world.break_wires(*pairs[0])
            await asyncio.sleep(lasts_s - BREAKS_AFTER_S)
        network.heal(cut)
        if breaks:
            self._world.mend_wires(*pairs[0])

    async def _call(self, act: Callable[..., None], *arguments: Any, **options: Any) -> None:
        act(*arguments, **options)

    async def _time(self, most_s: float, least_s: float = 0.05) -> None:
        await asyncio.sleep(self._rng.uniform(least_s, most_s))

    async def _pause(self, process: Process) -> None:
        process.stand_still()
        await self._time(6.0)
        process.go_on()

    async def _hang(self, node: Any) -> None:
        if node.process.is_still or not self._may_die(node):
            return
        node.process.stand_still()
        try:
            async with asyncio.timeout(HUNG_S_MAX):
                while not node.process.is_dead:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise InvariantError(f"{node.name} hangs, and was not replaced") from None

    async def _get_stuck(self, node: Any) -> None:
        if self._may_die(node):
            node.get_stuck()

    async def _stall(self, node: Any) -> None:
        """While it is stopped, its clients may have been told that it is gone. The fleet may kill
        it."""
        rng = self._rng
        if not self._may_die(node):
            return
        pausing = asyncio.create_task(self._pause(node.process))
        if rng.random() < 0.7:
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            self._world.break_calls(node)
        await pausing

    def _may_die(self, node: Any) -> bool:
        """Counts a death, unless there were too many."""
        if self._deaths[node.role] >= DEATHS_MAX:
            return False
        self._deaths[node.role] += 1
        return True

    async def _die(self, node: Any) -> None:
        if not self._may_die(node):
            return
        for actor in self._world.actors:
            if actor.node is node:
                actor.die()

    async def _scale(self) -> None:
        rng, wanted = self._rng, self._world.fleet.wanted
        role: Role = rng.choice(("coordinator", "target", "draft"))
        least = 0 if role == "draft" else 1
        counts = [n for n in range(least, REPLICAS_MAX + 1) if n != wanted[role]]
        await self._world.want({role: rng.choice(counts)})

    async def _abandon(self) -> None:
        await self._world.restart_fleet(self._rng.uniform(0.05, 3.0))

    async def _hold_up(self, process: Process) -> None:
        process.stand_still()
        await self._time(3.0)
        process.go_on_with_arrivals()

    async def _jump(self, process: Process, jump_s_max: float = 100.0) -> None:
        process.clock_jump_s += self._rng.uniform(-jump_s_max, jump_s_max)

    def _slow(self, a: Process, b: Process) -> list[Harm]:
        return [("slow_link", partial(self._slow_down, *pair)) for pair in ((a, b), (b, a))]

    async def _slow_down(self, sender: Process, receiver: Process) -> None:
        rng, network = self._rng, self._world.network
        link = SlowLink(sender, receiver, math.exp(rng.uniform(*BANDWIDTH_LOG)))
        network.slow_down(link)
        await self._time(6.0)
        network.speed_up(link)

    async def _head_loss(self) -> None:
        """Requests to it wait until it is back; replicas continue."""
        rng, world = self._rng, self._world
        world.machines.head.clear()
        away_s = rng.uniform(0.5, 8.0)
        if rng.random() < 0.5:
            await world.restart_fleet(away_s)
        else:
            await asyncio.sleep(away_s)
        world.machines.head.set()

    async def _restart(self) -> None:
        """Restarts Redis without what is stored from now on, once a session in flight has stored
        something."""
        redis = self._world.redis
        self._redis_goes = True
        snapshot = redis.primary.data.snapshot()
        await self._wait(self._flights.num_shown + 1, 1.0)
        redis.primary.die()
        await self._time(3.0, 0.0)
        redis.start_again(snapshot)
        self._redis_goes = False

    async def _two_primaries(self) -> None:
        """A copy without the newest writes becomes the primary of some processes. Others, at least
        one coordinator, write to the former primary until it is discarded."""
        rng, world = self._rng, self._world
        self._redis_goes = True
        snapshot = world.redis.primary.data.snapshot()
        await self._wait(self._flights.num_shown + 1, 1.0)
        coordinators = list(world.nodes("coordinator"))
        misled = {node.name for node in world.nodes(*ROLES) if rng.random() < 0.5}
        if coordinators:
            misled.add(rng.choice(coordinators).name)
            misled.discard(rng.choice(coordinators).name)
        misled |= {one.name for one in world.operators if rng.random() < 0.5}
        world.redis.split(snapshot, misled)
        for node in coordinators:
            if rng.random() < 0.5:
                world.break_calls(node)
        await self._time(6.0)
        world.redis.unite()
        self._redis_goes = False

    async def _lost_take_over(self, node: Any) -> None:
        """A coordinator takes over a session, and its client does not hear of it. Redis dies,
        preferably when the last token is stored and the end is not, and returns as before the
        take-over. Then the client finds another coordinator, to which Redis gives the same epoch,
        while the first one is stopped or before it can act."""
        world, redis = self._world, self._world.redis.process
        self._redis_goes = self._ousts = True
        away = Cut([(node.process, redis), (redis, node.process)], loses=True)
        world.network.cut(away)
        snapshot, taker = await self._until_taken_over(node)
        world.network.heal(away)
        if snapshot is not None and taker is not None:
            cut = Cut([(taker.process, world.clients)], loses=False)
            world.network.cut(cut)
            if self._rng.random() < LIKELY:
                await self._until_finishing(taker)
            stands_still = self._rng.random() < LIKELY and not taker.process.is_still
            stands_still = stands_still and self._may_die(taker)  # The fleet may kill it.
            if stands_still:
                taker.process.stand_still()
            world.redis.primary.die()
            if self._rng.random() < LIKELY:  # With its machine, which also runs the target.
                for one in list(world.nodes("target")):
                    if taker.has_session_at(one.name):
                        await self._die(one)
            await self._time(3.0, 0.0)
            world.redis.start_again(snapshot)
            await self._until_taken_over(taker, resists=stands_still)
            if stands_still:
                taker.process.go_on()
            world.network.heal(cut)
        self._redis_goes = self._ousts = False

    async def _until_finishing(self, owner: Any) -> None:
        """Waits until a session of an owner has its last token stored, but is not finished."""
        loop, history = asyncio.get_running_loop(), self._world.redis.history
        ending = loop.create_future()
        history.on_last_token = lambda name: (
            ending.done() or (ending.set_result(None) if name == owner.name else None)
        )
        try:
            async with asyncio.timeout(2.0):
                await ending
            await asyncio.sleep(1.5 * TRAVEL_S)  # Its message about the end is under way.
        except TimeoutError:
            pass
        finally:
            history.on_last_token = None

    async def _until_taken_over(
        self, node: Any, resists: bool = False
    ) -> tuple[Snapshot | None, Any]:
        """Breaks its clients' streams, and new ones if it `resists`, and waits until another
        coordinator takes over one of its sessions. Returns the state of the store just before, and
        that coordinator; None if it does not happen."""
        world, loop = self._world, asyncio.get_running_loop()
        data, owned = world.redis.primary.data, world.redis.owned()
        mine = {session_id for session_id, (_, owner) in owned.items() if owner == node.name}
        snapshot = data.snapshot()
        world.break_calls(node)
        until = loop.time() + OUSTED_S_MAX
        while loop.time() < until:
            before, owned = owned, world.redis.owned()
            if data is not world.redis.primary.data:  # It is another server.
                data, before = world.redis.primary.data, owned
            for session_id in sorted(mine & owned.keys()):
                epoch, owner = owned[session_id]
                if owner != node.name and epoch > before.get(session_id, (epoch, ""))[0]:
                    found = [one for one in world.nodes("coordinator") if one.name == owner]
                    return snapshot, found[0] if found else None
            snapshot = data.snapshot()
            await asyncio.sleep(LOOK_S)
            if resists:
                world.break_calls(node)
        return None, None

    async def _oust(self, node: Any) -> None:
        """Redis is slow to answer, so that the owner's next append has several tokens. It arrives
        after another coordinator has taken over and before that appends anything: only the epoch
        refuses it."""
        network, redis = self._world.network, self._world.redis.process
        slow = Cut([(redis, node.process)], loses=False)
        cut = Cut([(node.process, redis)], loses=False)
        self._ousts = True
        network.cut(slow)
        await self._time(0.1, 0.0)
        network.cut(cut)
        network.heal(slow)
        await asyncio.sleep(LOOK_S)
        await self._until_taken_over(node)
        network.heal(cut)
        self._ousts = False

    async def _oom(self) -> None:
        """Memory fills up, mostly in the middle of a script. Redis itself refuses only the first
        write of a script; a server that refuses any write must be tolerated, too."""
        spares_dirty = self._rng.random() < 0.25
        await self._fill(self._rng.randint(0, 8), spares_dirty, self._rng.uniform(0.05, 4.0))

    async def _full_store(self) -> None:
        """Longer than sessions decode without a commit, and than many have until their deadline."""
        self._may_be_full = False
        await self._fill(0, True, self._rng.uniform(4.0, FULL_S_MAX))

    async def _fill(self, num_writes_left: int, spares_dirty: bool, lasts_s: float) -> None:
        server = self._world.redis.primary
        server.data.num_writes_left = num_writes_left
        server.data.spares_dirty = spares_dirty
        await asyncio.sleep(lasts_s)
        server.data.num_writes_left = None
        self._world.network.adversary.faults["oom_refusal"] += server.data.num_refused
        server.data.num_refused = 0
