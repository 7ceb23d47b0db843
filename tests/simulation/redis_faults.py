"""Greater faults of Redis: see the table in `faults.py`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from outrider.registry.registry import ROLES
from tests.simulation.adversary import TRAVEL_S
from tests.simulation.network import Cut
from tests.simulation.redis_data import Snapshot
from tests.simulation.redis_host import RedisServer
from tests.simulation.world import World

Harm = tuple[str, Callable[[], Awaitable[None]]]
"""A kind, and what does it."""
REDIS_FAULTS = (
    "oust", "unheard_take_over", "redis_pause", "restart", "flush", "two_primaries",
    "lost_take_over", "oom",
)  # fmt: skip
PAUSE_S_MAX = 6.0
AWAY_S_MAX = 3.0
DECIDES_S_MAX = 0.1
"""For so long an owner that is ousted decides tokens of which the last are not stored."""
OUSTED_S_MAX = 8.0
"""Within this another coordinator takes over."""
LOST_TAIL_S_MAX = 1.0
SPLIT_S_MAX = 6.0
ENDING_S_MAX = 2.0
"""Within this a session that was taken over has stored its last token."""
FULL_S_MAX = 4.0
WRITES_BEFORE_FULL_MAX = 8
LIKELY = 0.9
LOOK_S = 0.01


class RedisFaults:
    """Those of one seed."""

    def __init__(self, world: World, flights: Any, kill: Callable[[Any], Awaitable[None]]) -> None:
        """`kill` ends a node, if that is not once too often."""
        self._world = world
        self._flights = flights
        self._kill = kill
        self._rng = world.network.adversary.rng
        self._redis_goes = False
        """Whether it is about to die, or to be replaced."""
        self._ousts = False
        """Whether a coordinator is being ousted: of two, none could take over."""

    def possible(self, busy: list[Any]) -> list[Harm]:
        """What would hit a session of these coordinators now."""
        redis = self._world.redis
        found: list[Harm] = []
        if not redis.process.is_dead:
            found.append(("flush", self._flush))
        is_there = not (redis.process.is_still or self._redis_goes)
        if is_there:
            found += [
                ("restart", self._restart),
                ("redis_pause", self._redis_pause),
                ("two_primaries", self._two_primaries),
            ]
            if redis.primary.data.num_writes_left is None:
                found.append(("oom", self._oom))
        if not self._ousts and len(list(self._world.nodes("coordinator"))) > 1:
            for one in busy:
                found.append(("oust", lambda one=one: self._oust(one)))
                found.append(("unheard_take_over", lambda one=one: self._unheard_take_over(one)))
                if is_there:
                    found.append(("lost_take_over", lambda one=one: self._lost_take_over(one)))
        return found

    async def _flush(self) -> None:
        self._world.redis.flush()

    async def _redis_pause(self) -> None:
        process = self._world.redis.process
        process.stand_still()
        await asyncio.sleep(self._rng.uniform(0.05, PAUSE_S_MAX))
        process.go_on()

    async def _restart(self) -> None:
        """What is stored from now on is lost, once a session in flight has stored something."""
        redis = self._world.redis
        self._redis_goes = True
        snapshot = redis.primary.data.snapshot()
        await self._progress()
        await self._start_again(snapshot)
        self._redis_goes = False

    async def _progress(self) -> None:
        """Until a token more has been shown, but not for long."""
        shown, loop = self._flights.num_shown, asyncio.get_running_loop()
        until = loop.time() + LOST_TAIL_S_MAX
        while loop.time() < until and self._flights.num_shown == shown:
            await asyncio.sleep(LOOK_S)

    async def _start_again(self, snapshot: Snapshot) -> None:
        redis = self._world.redis
        redis.primary.die()
        await asyncio.sleep(self._rng.uniform(0.0, AWAY_S_MAX))
        redis.start_again(snapshot)

    async def _two_primaries(self) -> None:
        """A copy that lacks the newest writes becomes the primary of some processes. Others, one
        coordinator at least, write to the one before, until that is thrown away."""
        rng, world = self._rng, self._world
        self._redis_goes = True
        snapshot = world.redis.primary.data.snapshot()
        await self._progress()
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
        await asyncio.sleep(rng.uniform(0.05, SPLIT_S_MAX))
        world.redis.unite()
        self._redis_goes = False

    async def _lost_take_over(self, node: Any) -> None:
        """A coordinator takes a session over, and its client hears nothing of it. Redis dies, at
        best when the last token is stored and the end is not, and comes back with what it had
        before the take-over. Then the client finds another coordinator, to which Redis gives the
        same epoch, while the first one stands still or before it can."""
        world = self._world
        self._redis_goes = self._ousts = True
        snapshot, taker = await self._moved(node)
        if snapshot is not None and taker is not None:
            cut = Cut([(taker.process, world.clients)], loses=False)
            world.network.cut(cut)
            if self._rng.random() < LIKELY:
                await self._until_finishing(taker)
            stands_still = self._rng.random() < LIKELY and not taker.process.is_still
            if stands_still:
                taker.process.stand_still()
            world.redis.primary.die()
            if self._rng.random() < LIKELY:  # With its machine, on which the target is, too.
                for one in list(world.nodes("target")):
                    if taker.has_session_at(one.name):
                        await self._kill(one)
            await asyncio.sleep(self._rng.uniform(0.0, AWAY_S_MAX))
            world.redis.start_again(snapshot)
            await self._until_taken_over(taker, resists=stands_still)
            if stands_still:
                taker.process.go_on()
            world.network.heal(cut)
        self._redis_goes = self._ousts = False

    async def _moved(self, node: Any) -> tuple[Snapshot | None, Any]:
        """Keeps a coordinator from Redis until another one has a session of it: see
        `_until_taken_over`."""
        redis, network = self._world.redis.process, self._world.network
        cut = Cut([(node.process, redis), (redis, node.process)], loses=True)
        network.cut(cut)
        found = await self._until_taken_over(node)
        network.heal(cut)
        return found

    async def _until_finishing(self, owner: Any) -> None:
        """Until a session of an owner has its last token stored, but is not finished."""
        loop, history = asyncio.get_running_loop(), self._world.redis.history
        ending = loop.create_future()
        history.on_last_token = lambda name: (
            ending.done() or (ending.set_result(None) if name == owner.name else None)
        )
        try:
            async with asyncio.timeout(ENDING_S_MAX):
                await ending
            await asyncio.sleep(1.5 * TRAVEL_S)  # It has heard that, and says that it has ended.
        except TimeoutError:
            pass
        finally:
            history.on_last_token = None

    async def _until_taken_over(
        self, node: Any, resists: bool = False
    ) -> tuple[Snapshot | None, Any]:
        """Breaks its clients' streams, and new ones where it `resists`, and waits until another
        coordinator takes a session of it over. Returns what was stored just before, and that one;
        None where it does not happen."""
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
        when another one has taken over and appended nothing yet: it would fit, were it not for
        the epoch."""
        network, redis = self._world.network, self._world.redis.process
        slow = Cut([(redis, node.process)], loses=False)
        cut = Cut([(node.process, redis)], loses=False)
        self._ousts = True
        network.cut(slow)
        await asyncio.sleep(self._rng.uniform(0.0, DECIDES_S_MAX))
        network.cut(cut)
        network.heal(slow)
        await asyncio.sleep(LOOK_S)
        await self._until_taken_over(node)
        network.heal(cut)
        self._ousts = False

    async def _unheard_take_over(self, node: Any) -> None:
        """Another coordinator takes a session over, and Redis answers with an error. Its clients
        ask others from then on."""
        world, server = self._world, self._world.redis.primary
        others = [one for one in world.nodes("coordinator") if one is not node]
        if not others:
            return
        taker, heard = self._rng.choice(others), asyncio.Event()
        self._ousts = True
        server.unheard = (taker.process, heard.set)
        world.barred = {one.name for one in world.nodes("coordinator") if one is not taker}
        world.break_calls(node)
        try:
            async with asyncio.timeout(OUSTED_S_MAX):
                await heard.wait()
            world.barred = {taker.name}
            world.break_calls(taker)
        except TimeoutError:
            world.barred = set()
        server.unheard = None
        self._ousts = False

    async def _oom(self) -> None:
        """The memory fills up, mostly in the midst of a script. Redis itself refuses no more than
        the first write of a script; also a server that refuses each is borne."""
        server: RedisServer = self._world.redis.primary
        server.data.num_writes_left = self._rng.randint(0, WRITES_BEFORE_FULL_MAX)
        server.data.spares_dirty = self._rng.random() < 0.25
        await asyncio.sleep(self._rng.uniform(0.05, FULL_S_MAX))
        server.data.num_writes_left = None
        self._world.network.adversary.faults["oom_refusal"] += server.data.num_refused
        server.data.num_refused = 0


def log_uniform(rng: Any, least: float, most: float) -> float:
    """Equally likely in each order of magnitude."""
    return math.exp(rng.uniform(math.log(least), math.log(most)))
