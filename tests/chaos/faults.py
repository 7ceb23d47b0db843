"""What is done to a deployment: one thing at a time, and what it touched."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.figures import percentile
from deploy.cluster import RECONCILER
from deploy.launcher import Deployment
from deploy.reconciler import find_reconciler
from outrider.errors import check
from outrider.fleet.registry import ROLES

from .load import Load

STOPPED_S = 5.0
"""How long a process stands still ..."""
REDIS_AWAY_S = 5.0
"""... and Redis."""
RETURNED_S = 2.0
"""By then a Redis or a reconciler that was killed is back."""
SETTLED_S = 1.0
"""Between a fleet that is whole again and the next fault."""
SCALED_MAX = 3
"""Replicas of a role that are ever wanted."""
WHOLE_S = 60.0
"""By when it must be."""
REDIS = "redis"
KINDS = (
    ("kill", "target"), ("kill", "draft"), ("kill", "coordinator"), ("kill", RECONCILER),
    ("kill", REDIS), ("stop", "target"), ("stop", "draft"), ("stop", "coordinator"),
    ("stop", REDIS),
)  # fmt: skip


@dataclass
class Fault:
    """One that was done."""

    kind: str
    """`kill`, or `stop` (for a while)."""
    role: str
    """Of the replica, or `redis`, or `reconciler`."""
    replica: str
    at_s: float
    """Since the run began."""
    num_touched: int = 0
    """Requests that were in flight."""
    longest_gap_s: float = 0.0
    """Wait for tokens of any of these."""
    whole_after_s: float = 0.0
    """Until there were as many replicas as are wanted."""


class Adversary:
    """Does faults, one after the other, each kind as often as the others."""

    def __init__(self, deployment: Deployment, load: Load, seed: int) -> None:
        self._deployment = deployment
        self._load = load
        self._random = random.Random(seed)
        self._kinds: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.gaps: dict[tuple[str, str], list[float]] = {}
        """By kind and role: of each request that was touched, the longest."""

    async def run(self, number: int, began: float, until: float) -> None:
        """Until there were so many, or the time is over. Raises `TimeoutError` for a fleet that
        does not become whole again."""
        loop = asyncio.get_running_loop()
        while len(self.faults) < number and loop.time() < until:
            if not self._kinds:
                self._kinds = self._random.sample(KINDS, len(KINDS))
            kind, role = self._kinds.pop()
            at = loop.time()
            fault = Fault(kind, role, "", at - began)
            touched = [one for one in self._load.asked if one.in_flight(at)]
            await self._do(fault, role)
            await self._whole()
            fault.whole_after_s = round(loop.time() - at, 2)
            await asyncio.sleep(SETTLED_S)
            gaps = [one.gap(at, at + fault.whole_after_s) for one in touched]
            fault.at_s, fault.num_touched = round(fault.at_s, 2), len(touched)
            fault.longest_gap_s = round(max(gaps, default=0.0), 3)
            self.gaps.setdefault((kind, fault.role), []).extend(gaps)
            self.faults.append(fault)

    async def scale(self, until: float, period_s: float) -> None:
        """Other numbers of replicas, again and again, each role in turn; then as many as before."""
        loop, registry = asyncio.get_running_loop(), self._deployment.registry
        began, first = loop.time(), dict(self._deployment.overview.wanted)
        for role in itertools.cycle(ROLES):
            if loop.time() >= until:
                break
            now = self._deployment.overview.wanted[role]
            count = self._random.choice([n for n in range(1, SCALED_MAX + 1) if n != now])
            at = loop.time()
            fault = Fault("scale", role, f"{now} to {count}", round(at - began, 2))
            touched = [one for one in self._load.asked if one.in_flight(at)]
            await registry.want({role: count})
            await asyncio.sleep(period_s)
            gaps = [one.gap(at, at + period_s) for one in touched]
            fault.num_touched = len(touched)
            fault.longest_gap_s = round(max(gaps, default=0.0), 3)
            self.gaps.setdefault((fault.kind, fault.role), []).extend(gaps)
            self.faults.append(fault)
        await registry.want(first)

    async def _do(self, fault: Fault, role: str) -> None:
        pid, stopped_s = await self._victim(fault, role)
        if fault.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            return
        os.kill(pid, signal.SIGKILL)
        if role in (REDIS, RECONCILER):
            await asyncio.sleep(RETURNED_S)
        while fault.replica in {one.name for one in self._deployment.overview.replicas}:
            await asyncio.sleep(0.02)

    async def _victim(self, fault: Fault, role: str) -> tuple[int, float]:
        """A process, and how long it is to stand still if it is to."""
        if role == REDIS:
            redis = self._deployment.redis
            check(redis is not None, "the deployment has a Redis of its own")
            return redis.pid, REDIS_AWAY_S
        if role == RECONCILER:
            reconciler = await find_reconciler(f"outrider-{self._deployment.name}")
            check(reconciler is not None, "there is a reconciler")
            return (await reconciler.call("ping")).pid, STOPPED_S
        serving = [one for one in self._deployment.overview.replicas if one.address]
        one = self._random.choice([one for one in serving if one.role == role])
        fault.replica = one.name
        return one.places[0].pid, STOPPED_S

    async def _whole(self) -> None:
        async with asyncio.timeout(WHOLE_S):
            while not self._deployment.overview.is_whole:
                await asyncio.sleep(0.05)

    def report(self) -> dict[str, Any]:
        """By kind and role the gaps of requests that were touched, and every fault."""
        return {
            "gaps": {
                f"{kind} {role}": {
                    "num_touched": len(gaps),
                    "p50_s": round(percentile(gaps, 50), 3),
                    "p99_s": round(percentile(gaps, 99), 3),
                }
                for (kind, role), gaps in sorted(self.gaps.items())
                if gaps
            },
            "faults": [asdict(fault) for fault in self.faults],
        }
