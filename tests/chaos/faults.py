"""Faults in a deployment, one at a time, and what each affected.

| kind | of | what happens |
| --- | --- | --- |
| kill | a replica, a gateway, the reconciler | SIGKILL |
| kill | Redis' primary | SIGKILL; Sentinel promotes Redis' replica |
| stop | a replica, a gateway, Redis' primary | SIGSTOP for some seconds |
| hang | a replica | SIGSTOP for good; the fleet kills and replaces it |
| lose | a node | all its processes are killed; another node joins |
| cut | a replica, Redis' primary | all its connections break at once |
| hold | a replica, Redis' primary | for some seconds no data passes to or from it |
| lose | Ray's head | its server (GCS) is killed, and returns some seconds later |
| pair | redis+coordinator | the primary and a coordinator are killed at once |
| no | fault | nothing, for comparison: waits with other causes |

While Redis' primary is stopped or held, Sentinel promotes the replica. Then there are two
primaries, until the old one is killed and another replica started, as for one that was killed at
once."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import psutil

from outrider.errors import Unavailable
from outrider.fleet.launcher import Deployment
from outrider.fleet.ray_cluster import RECONCILER
from outrider.fleet.reconciler import find_reconciler
from outrider.fleet.replica_set import Overview, ReplicaView
from outrider.registry.registry import ROLES, Role
from tests.chaos.gateways import Gateways
from tests.chaos.load import Load
from tests.chaos.machines import NUM_NODES, Machines

STOPPED_S: Final = 5.0
TWO_PRIMARIES_S: Final = 2.0
"""A stopped primary of Redis is killed this long after another primary was promoted."""
SHOWN_S: Final = 1.0
"""A wait for tokens may be an effect of a fault if it begins within this time after the fault."""
PAST_S: Final = 60.0
WHOLE_S: Final = 90.0
"""Within this time, all wanted replicas must serve again."""
POLL_S: Final = 0.05
REDIS, NODE, HEAD, GATEWAY = "redis", "node", "head", "gateway"
KILLS: Final = (*(("kill", role) for role in (*ROLES, GATEWAY, RECONCILER, REDIS)),)
STOPS: Final = (*(("stop", role) for role in (*ROLES, GATEWAY, REDIS)),)
HANGS: Final = (*(("hang", role) for role in ROLES),)
OTHERS: Final = (
    *HANGS,
    ("lose", NODE),
    ("lose", HEAD),
    *((kind, role) for kind in ("cut", "hold") for role in (*ROLES, REDIS)),
)
PAIR: Final = "pair"
PAIRS: Final[dict[str, tuple[str, str]]] = {"redis+coordinator": (REDIS, "coordinator")}
"""By name, processes that are killed at the same moment. Requests may fail then, and are counted
separately."""
TILT: Final = "tilt"
"""The excuse of requests in flight while Sentinel promotes nothing (`redis_servers.PROMOTED_S`)."""
OTHERS_PER_ROUND: Final = 3
"""Number of other faults for each round of all kills and stops."""
NOTHING: Final = ("no", "fault")
KINDS: Final = (*KILLS, *STOPS, *OTHERS)
FULL_MINUTES: Final = 10.0
"""Shorter runs have too few requests for a 99th percentile."""
KILLS_AND_STOPS_MIN: Final = 60
ADDED_S_MAX: Final = {"kill draft": 0.3, "kill target": 3.0, "kill coordinator": 4.0}
"""For each fault, the most that it may add to the 99th percentile of waits for tokens while a
replica is spare."""
GONE_S_MAX: Final[dict[str, float]] = {"coordinator": 6.0, "target": 9.0, "draft": 9.0}
"""Longest time from a hang until the fleet has killed the hung replica: the reconciler's limits of
5 and 8 s, and 1 s for the kill and for the error of `Fault.gone_s`."""
REPLACED_S_MAX: Final = 30.0
"""Longest time from a hang until another replica serves in place of the hung one."""
HANG_GAP_S_MAX: Final = 6.0
"""Longest wait for tokens due to a hang."""


@dataclass
class Fault:
    kind: str
    role: str
    """Role of the replica, `gateway`, `redis`, `reconciler`, `node`, `head`, or a pair's name."""
    at_s: float
    replica: str = ""
    num_touched: int = 0
    """Number of requests in flight when the fault began, or that came before it was over."""
    longest_gap_s: float = 0.0
    """Longest wait for tokens of these requests."""
    gone_s: float = 0.0
    """Time from a hang until the fleet had killed the hung replica: its process is gone, and the
    deployment's overview lacks it. The overview may be 0.5 s old (`NEWS_PERIOD_S`), and is looked
    at every `POLL_S`, so this time is up to 0.55 s too long. Coordinators stop using a hung target
    or draft earlier, which `longest_gap_s` shows."""
    replaced_s: float = 0.0
    """Time from a hang until another replica served in place of the hung one."""


class Adversary:
    """Injects faults one after the other."""

    def __init__(
        self, machines: Machines, deployment: Deployment, gateways: Gateways, load: Load, seed: int
    ) -> None:
        self._machines = machines
        self._deployment = deployment
        self._gateways = gateways
        self._load = load
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._deck: list[tuple[str, str]] = []
        self._others: list[tuple[str, str]] = []
        self._num_tilts = 0
        self.faults: list[Fault] = []
        self.gaps: dict[tuple[str, str], list[float]] = {}
        """The longest wait for tokens of each affected request, by kind and role of the fault."""

    async def run(self, number: int, until: float, only: Sequence[tuple[str, str]] = ()) -> None:
        """Injects faults up to this number or for this time; if `only` has any, just these. Raises
        `TimeoutError` if the fleet does not recover, or if tokens are missing."""
        while self._num_done() < number and self._loop.time() < until:
            kind, role = await self._next(only)
            at = self._loop.time()
            fault = Fault(kind, role, round(at - self._began, 2))
            await self._do(fault)
            await self._see(fault, at, self._loop.time() + SHOWN_S)
        await _until(lambda: is_whole(self._deployment.overview))

    def _has_tilted(self) -> bool:
        """Whether Sentinel began a TILT since the last call."""
        before, self._num_tilts = self._num_tilts, self._machines.redis.num_tilts
        return self._num_tilts > before

    def _num_done(self) -> int:
        return sum((one.kind, one.role) != NOTHING for one in self.faults)

    async def _see(self, fault: Fault, begin: float, over: float) -> None:
        """Records the effects of a fault, once all requests from before its end get tokens again.
        Raises `TimeoutError` if they do not."""
        await asyncio.sleep(over - self._loop.time())
        touched = [one for one in self._load.asked if one.overlaps(begin, over)]
        excuse = fault.role if fault.kind == PAIR else TILT if self._has_tilted() else ""
        for one in touched:
            one.excuse = one.excuse or excuse
        await _until(lambda: all(one.is_past(over) for one in touched), PAST_S)
        gaps = [one.gap(begin, over) for one in touched]
        fault.num_touched = len(touched)
        fault.longest_gap_s = round(max(gaps, default=0.0), 3)
        self.gaps.setdefault((fault.kind, fault.role), []).extend(gaps)
        self.faults.append(fault)

    async def _next(self, only: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Chooses the next fault, once Redis has its replica again. Its role has a spare replica.
        Kills and stops are equally frequent. Raises `TimeoutError` if the fleet or Redis does not
        recover."""
        await self._machines.redis.until_whole(WHOLE_S)
        async with asyncio.timeout(WHOLE_S):
            while True:
                if not self._deck:
                    pairs = () if only else ((PAIR, name) for name in PAIRS)
                    deck = (*(only or (*KILLS, *STOPS, *self._some_others())), *pairs, NOTHING)
                    self._deck = self._random.sample(deck, len(deck))
                for place, (_, role) in enumerate(self._deck):
                    if self._victims(role):
                        return self._deck.pop(place)
                if is_whole(self._deployment.overview):
                    self._deck.clear()  # Each node has replicas of all roles.
                await asyncio.sleep(POLL_S)

    def _some_others(self) -> list[tuple[str, str]]:
        found = []
        for _ in range(OTHERS_PER_ROUND):
            if not self._others:
                self._others = self._random.sample(OTHERS, len(OTHERS))
            found.append(self._others.pop())
        return found

    def _victims(self, role: str) -> Sequence[ReplicaView | int]:
        """Number of the role's replicas, or of nodes, if one of them may be missing. For other
        roles any value."""
        overview = self._deployment.overview
        serving = [one for one in overview.replicas if one.address and not one.leaves]
        if role == NODE:
            if not is_whole(overview):
                return []
            return [
                index
                for index in range(NUM_NODES)
                if self._roles_without(index, serving) == set(ROLES)
            ]
        if role in PAIRS:
            return [0] if all(self._victims(one) for one in PAIRS[role]) else []
        if role == HEAD:  # Without a head no replica can be started.
            return [0] if is_whole(overview) else []
        if role in (REDIS, RECONCILER, GATEWAY, NOTHING[1]):
            return [0]
        found = [one for one in serving if one.role == role]
        return found if len(found) >= overview.wanted[found[0].role] > 1 else []

    def _roles_without(self, node: int, serving: Sequence[ReplicaView]) -> set[Role]:
        lost = set(self._machines.processes(node))
        return {
            one.role
            for one in serving
            if lost.isdisjoint(location.pid for location in one.locations)
        }

    async def _do(self, fault: Fault) -> None:
        if (fault.kind, fault.role) == NOTHING:
            return
        if fault.kind == PAIR:
            each = (Fault("kill", role, fault.at_s) for role in PAIRS[fault.role])
            await asyncio.gather(*(self._do(one) for one in each))
            return
        if fault.role == HEAD:
            await self._machines.kill_head(STOPPED_S)
            await self._reconciler_pid()
            return
        if fault.role == GATEWAY:
            address = self._random.choice(self._gateways.addresses)
            if fault.kind == "kill":
                await self._gateways.kill(address)
            else:
                await self._gateways.pause(address, STOPPED_S)
            return
        victims = self._victims(fault.role)
        one = self._random.choice(victims)
        if fault.role == NODE:
            lost = set(self._machines.processes(one))
            await self._machines.lose_node(one)
            await self._until_gone(lost)
            return
        redis = self._machines.redis
        pid, address = redis.primary.pid, redis.primary_address
        if isinstance(one, ReplicaView):
            fault.replica, pid, address = one.name, one.locations[0].pid, one.address
        elif fault.role == RECONCILER:
            pid = await self._reconciler_pid()
        if fault.kind == "cut":
            self._machines.proxy.cut(address)
        elif fault.kind == "hold":
            self._machines.proxy.hold(address)
            await asyncio.sleep(STOPPED_S)
            self._machines.proxy.release(address)
        elif fault.kind == "hang":
            await self._hang(fault, pid)
        elif fault.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            with suppress(ProcessLookupError):  # The fleet may have replaced it as hung.
                os.kill(pid, signal.SIGCONT)
        elif fault.role != REDIS:
            os.kill(pid, signal.SIGKILL)
            await self._until_gone({pid})
        if fault.role == REDIS and fault.kind != "cut":
            if fault.kind != "kill":
                await asyncio.sleep(TWO_PRIMARIES_S)
            await redis.replace(address)

    async def _hang(self, fault: Fault, pid: int) -> None:
        """Stops a replica's process, and waits until the process is gone and all wanted replicas
        serve."""
        began = self._loop.time()
        os.kill(pid, signal.SIGSTOP)
        await self._until_gone({pid})
        await _until(lambda: not psutil.pid_exists(pid) or _is_zombie(pid))
        fault.gone_s = round(self._loop.time() - began, 2)
        await _until(lambda: is_whole(self._deployment.overview))
        fault.replaced_s = round(self._loop.time() - began, 2)

    async def _until_gone(self, pids: Set[int]) -> None:
        """Waits until the fleet has noticed that these processes are gone. Otherwise the next fault
        would take the spare."""
        await _until(
            lambda: pids.isdisjoint(
                location.pid
                for one in self._deployment.overview.replicas
                for location in one.locations
            )
        )

    async def _reconciler_pid(self) -> int:
        """Waits for the replica if it was just lost."""
        async with asyncio.timeout(WHOLE_S):
            while True:
                found = await find_reconciler(f"outrider-{self._deployment.name}")
                with suppress(Unavailable):
                    if found is not None:
                        return int((await found.call("ping")).pid)
                await asyncio.sleep(POLL_S)

    def _hangs(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for role in ROLES:
            hangs = [one for one in self.faults if (one.kind, one.role) == ("hang", role)]
            if hangs:
                found[role] = {
                    "num_hangs": len(hangs),
                    "gone_s_max": max(one.gone_s for one in hangs),
                    "replaced_s_max": max(one.replaced_s for one in hangs),
                    "gap_s_max": max(one.longest_gap_s for one in hangs),
                }
        return found

    def report(self) -> dict[str, Any]:
        """Waits of affected requests by kind and role, how much longer they are than without a
        fault, and every fault."""
        usual_s = np.percentile(self.gaps.get(NOTHING) or [0.0], 99)
        counts = dict.fromkeys(self.gaps, 0)
        for fault in self.faults:
            counts[fault.kind, fault.role] += 1
        return {
            "num_faults": self._num_done(),
            "num_kills_and_stops": sum(
                n for (kind, _), n in counts.items() if kind in ("kill", "stop", "lose", PAIR)
            ),
            "gaps": {
                f"{kind} {role}": {
                    "num_faults": counts[kind, role],
                    "num_touched": len(gaps),
                    "p50_s": round(np.percentile(gaps, 50), 3),
                    "p99_s": round(np.percentile(gaps, 99), 3),
                    "added_p99_s": round(np.percentile(gaps, 99) - usual_s, 3),
                }
                for (kind, role), gaps in sorted(self.gaps.items())
                if gaps
            },
            "hangs": self._hangs(),
            "faults": [asdict(fault) for fault in self.faults],
        }


def missed_in_hangs(report: Mapping[str, Any], expected: Sequence[str]) -> list[str]:
    """The roles whose goals for hung replicas were missed. Of the `expected` roles, a replica must
    have hung."""
    limits = {"replaced_s_max": REPLACED_S_MAX, "gap_s_max": HANG_GAP_S_MAX}
    wrong = []
    for role in ROLES:
        if (found := report["hangs"].get(role)) is None:
            is_missed = role in expected
        else:
            of_role = limits | {"gone_s_max": GONE_S_MAX[role]}
            is_missed = any(found[name] > limit_s for name, limit_s in of_role.items())
        if is_missed:
            wrong.append(f"hang {role}")
    return wrong


def missed(report: Mapping[str, Any]) -> list[str]:
    """The other goals that were missed. A goal that was not measured counts as missed."""
    found = [
        fault
        for fault, added_s_max in ADDED_S_MAX.items()
        if fault not in report["gaps"] or report["gaps"][fault]["added_p99_s"] > added_s_max
    ]
    if report["num_kills_and_stops"] < KILLS_AND_STOPS_MIN:
        found.append("kills and stops")
    return found


async def _until(condition: Callable[[], bool], limit_s: float = WHOLE_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(POLL_S)


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_whole(overview: Overview) -> bool:
    return all(
        sum(bool(one.address) for one in overview.of(role)) >= count
        for role, count in overview.wanted.items()
    )
