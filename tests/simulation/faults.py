"""The greater faults: each hits somebody whom a session in flight has to do with, or is not done.

| kind | what happens |
| --- | --- |
| `crash` | a target or a draft dies; the fleet starts another |
| `death` | a coordinator dies, likewise |
| `pause` | a target or a draft stands still, then goes on with what it had |
| `stall` | a coordinator does; its clients' streams may break meanwhile |
| `hang_up` | all clients' streams of a coordinator break |
| `oust` | the same, and what it sends to Redis comes just after another took a session over |
| `break` | all streams of a coordinator to a replica do, and are opened anew |
| `unheard_take_over` | one takes a session over without hearing so; its clients ask others |
| `cut_replica` | nothing goes between a coordinator and a replica |
| `cut_store` | nothing goes between a coordinator and Redis |
| `cut_registry` | nothing goes between a replica and Redis |
| `..._one_way` | the same in one direction |
| `slow_link` | messages from one to the other, or to Redis, take their size over a bandwidth |
| `loop_stall` | a process stands still; then it handles what has arrived before overdue timers |
| `clock_jump` | the wall clock of a host jumps, that of Redis by seconds, others by minutes |
| `redis_pause` | Redis stands still, then does what it was asked |
| `restart` | Redis dies and comes back without the last tokens of a session |
| `flush` | Redis loses everything |
| `oom` | from some write on Redis refuses all that need memory, also within a script |
| `two_primaries` | a copy without the newest writes takes Redis' place, while some use the other |
| `lost_take_over` | Redis loses a take-over, and gives the epoch once more |
| `abandon` | the fleet's process dies, and another one takes the replicas over |
| `head_loss` | Ray's head is away, in half of the cases the fleet's process with it |
| `scale` | another number of replicas is wanted |
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import Any

from outrider.registry.registry import Role
from tests.simulation.adversary import CALM
from tests.simulation.network import Cut, SlowLink
from tests.simulation.processes import Process
from tests.simulation.redis_faults import (
    LOOK_S,
    PAUSE_S_MAX,
    REDIS_FAULTS,
    Harm,
    RedisFaults,
    log_uniform,
)
from tests.simulation.world import REPLICAS_MAX, World

NUM_FAULTS = (3, 8)
"""In a seed, at least and at most, as far as its sessions last."""
CUT_S_MAX = 8.0
BREAKS_AFTER_S = 5.0
"""Of a cut: then TCP gives a stream up, on which something was sent."""
GAP_S_MAX = 2.0
"""Between two faults, if sessions make no progress ..."""
BURST_S_MAX = 0.1
"""... or of those that come at once."""
DEATHS_MAX = 3
"""Of a role in a seed. A fourth in so short a time would count as a role that cannot be started."""
ABANDONED_S_MAX = 3.0
LOOKS_S_MAX = 60.0
"""For so long somebody is looked for whom a fault would hit."""
HEADLESS_S_MAX = 8.0
STALL_S_MAX = 3.0
SLOW_S_MAX = 6.0
BANDWIDTH_LEAST, BANDWIDTH_MOST = 300.0, 30_000.0
"""Bytes per second of a slow link: a message of a kilobyte takes seconds, or hardly any time."""
HOST_JUMP_S_MAX = 100.0
REDIS_JUMP_S_MAX = 5.0
"""Redis keeps the time by its wall clock, so that all that expires does so earlier or later."""

CUTS = ("cut_replica", "cut_store", "cut_registry")
GREATER = {
    "crash", "death", "pause", "stall", "hang_up", "break", "scale", "abandon", "slow_link",
    "loop_stall", "clock_jump", "head_loss", *REDIS_FAULTS,
    *CUTS, *(f"{kind}_one_way" for kind in CUTS),
}  # fmt: skip
"""All kinds."""


class Faults:
    """The faults of one seed, one after the other or at the same time."""

    def __init__(self, world: World, flights: Any, kinds: Collection[str]) -> None:
        """`flights` knows the sessions in flight; only faults of these `kinds` are done."""
        self._world = world
        self._flights = flights
        self._kinds = kinds
        self._adversary = world.network.adversary
        self._deaths: Counter[str] = Counter()
        self._redis = RedisFaults(world, flights, self._die)
        self._under_way: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Does harm, and returns when all of it is over and nothing more will happen."""
        rng = self._adversary.rng
        num = rng.randint(*NUM_FAULTS)
        total = self._flights.num_planned
        marks = sorted(rng.uniform(0.0, 0.6) * total for _ in range(num))
        for mark in marks:
            gap_s_max = rng.choice((GAP_S_MAX, BURST_S_MAX))
            await self._wait(mark, rng.uniform(0.0, gap_s_max))
            await self._do_one()
        for task in self._under_way:
            await task
        self._adversary.odds = CALM

    async def _wait(self, mark: float, seconds: float) -> None:
        """Until so many tokens have been shown, but not for longer than that."""
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until and self._flights.num_shown < mark:
            if self._flights.all_over:
                return
            await asyncio.sleep(LOOK_S)

    async def _do_one(self) -> None:
        rng, loop = self._adversary.rng, asyncio.get_running_loop()
        give_up_at = loop.time() + LOOKS_S_MAX
        while not self._flights.all_over and loop.time() < give_up_at:
            possible = [harm for harm in self._possible() if harm[0] in self._kinds]
            kinds = sorted({kind for kind, _ in possible})
            if kinds:
                kind = rng.choice(kinds)
                _, harm = rng.choice([one for one in possible if one[0] == kind])
                self._adversary.faults[kind] += 1
                self._under_way.append(asyncio.create_task(harm()))  # type: ignore[arg-type]
                await asyncio.sleep(0)  # Has it begin, so that the next one knows of it.
                return
            await asyncio.sleep(LOOK_S)

    def _possible(self) -> list[Harm]:
        """What would hit a session in flight now."""
        world = self._world
        if not self._flights.running:
            return []
        busy = [node for node in world.nodes("coordinator") if node.calls]
        redis = world.redis.process
        found: list[Harm] = [("scale", self._scale), *self._redis.possible(busy)]
        if world.machines.has_head:
            found.append(("head_loss", self._head_loss))
            if world.has_fleet:
                found.append(("abandon", self._abandon))
        found.append(("clock_jump", lambda: self._jump(redis, REDIS_JUMP_S_MAX)))
        for one in busy:
            found.append(("hang_up", lambda one=one: self._hang_up(one)))
            if not one.process.is_still:
                found.append(("stall", lambda one=one: self._stall(one)))
                found.append(("loop_stall", lambda one=one: self._hold_up(one.process)))
            if self._deaths["coordinator"] < DEATHS_MAX:
                found.append(("death", lambda one=one: self._die(one)))
            found.append(("clock_jump", lambda one=one: self._jump(one.process)))
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
                found.append(("pause", lambda node=node: self._pause(node.process)))
                found.append(("loop_stall", lambda node=node: self._hold_up(node.process)))
            if self._deaths[node.role] < DEATHS_MAX:
                found.append(("crash", lambda node=node: self._die(node)))
            found += self._cuts("cut_registry", node.process, redis)
            for one in askers:
                found.append(("break", lambda one=one, node=node: self._break(one, node)))
                found += self._slow(one.process, node.process)
                found += self._cuts("cut_replica", one.process, node.process)
        return found

    def _cuts(self, kind: str, a: Process, b: Process) -> list[Harm]:
        ways = [(kind, [(a, b), (b, a)]), (f"{kind}_one_way", [(a, b)]),
                (f"{kind}_one_way", [(b, a)])]  # fmt: skip
        return [
            (name, lambda name=name, pairs=pairs: self._cut(pairs, kind == "cut_replica"))
            for name, pairs in ways
        ]

    async def _cut(self, pairs: list[tuple[Process, Process]], breaks: bool) -> None:
        rng, network = self._adversary.rng, self._world.network
        cut, lasts_s = Cut(pairs, loses=rng.random() < 0.5), rng.uniform(0.05, CUT_S_MAX)
        network.cut(cut)
        await asyncio.sleep(min(lasts_s, BREAKS_AFTER_S))
        breaks = breaks and lasts_s > BREAKS_AFTER_S
        if breaks:
            self._world.break_wires(*pairs[0])
            await asyncio.sleep(lasts_s - BREAKS_AFTER_S)
        network.heal(cut)
        if breaks:
            self._world.mend_wires(*pairs[0])

    async def _pause(self, process: Process) -> None:
        process.stand_still()
        await asyncio.sleep(self._adversary.rng.uniform(0.05, PAUSE_S_MAX))
        process.go_on()

    async def _stall(self, node: Any) -> None:
        """As long as it stands still its clients may have been told that it is gone."""
        rng = self._adversary.rng
        pausing = asyncio.create_task(self._pause(node.process))
        if rng.random() < 0.7:
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            await self._hang_up(node)
        await pausing

    async def _hang_up(self, node: Any) -> None:
        self._world.break_calls(node)

    async def _break(self, coordinator: Any, replica: Any) -> None:
        self._world.break_wires(coordinator.process, replica.process, reachable=True)

    async def _die(self, node: Any) -> None:
        if self._deaths[node.role] >= DEATHS_MAX:
            return
        self._deaths[node.role] += 1
        for actor in self._world.actors:
            if actor.node is node:
                actor.die()

    async def _scale(self) -> None:
        rng, wanted = self._adversary.rng, self._world.fleet.wanted
        role: Role = rng.choice(("coordinator", "target", "draft"))
        least = 0 if role == "draft" else 1
        counts = [n for n in range(least, REPLICAS_MAX + 1) if n != wanted[role]]
        await self._world.want({role: rng.choice(counts)})

    async def _abandon(self) -> None:
        await self._world.restart_fleet(self._adversary.rng.uniform(0.05, ABANDONED_S_MAX))

    async def _hold_up(self, process: Process) -> None:
        process.stand_still()
        await asyncio.sleep(self._adversary.rng.uniform(0.05, STALL_S_MAX))
        process.go_on_with_arrivals()

    async def _jump(self, process: Process, jump_s_max: float = HOST_JUMP_S_MAX) -> None:
        process.clock_jump_s += self._adversary.rng.uniform(-jump_s_max, jump_s_max)

    def _slow(self, a: Process, b: Process) -> list[Harm]:
        return [
            ("slow_link", lambda pair=pair: self._slow_down(*pair)) for pair in ((a, b), (b, a))
        ]

    async def _slow_down(self, sender: Process, receiver: Process) -> None:
        rng, network = self._adversary.rng, self._world.network
        link = SlowLink(sender, receiver, log_uniform(rng, BANDWIDTH_LEAST, BANDWIDTH_MOST))
        network.slow_down(link)
        await asyncio.sleep(rng.uniform(0.05, SLOW_S_MAX))
        network.speed_up(link)

    async def _head_loss(self) -> None:
        """Whatever asks for it waits until it is back; replicas go on."""
        rng, world = self._adversary.rng, self._world
        world.machines.lose_head()
        away_s = rng.uniform(0.5, HEADLESS_S_MAX)
        if rng.random() < 0.5:
            await world.restart_fleet(away_s)
        else:
            await asyncio.sleep(away_s)
        world.machines.return_head()
