"""What is done to a deployment: one thing at a time, and what it touched."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.figures import percentile
from deploy.launcher import Deployment
from outrider.fleet.registry import Role

from .load import Load

STOPPED_S = 5.0
"""How long a process stands still ..."""
REDIS_AWAY_S = 5.0
"""... and Redis."""
SETTLED_S = 1.0
"""Between a fleet that is whole again and the next fault."""
WHOLE_S = 60.0
"""By when it must be."""
KINDS: tuple[tuple[str, Role | None], ...] = (
    ("kill", "target"), ("kill", "draft"), ("kill", "coordinator"),
    ("stop", "target"), ("stop", "draft"), ("stop", "coordinator"),
    ("stop", None),
)  # fmt: skip


@dataclass
class Fault:
    """One that was done."""

    kind: str
    """`kill`, or `stop` (for a while)."""
    role: str
    """Of the replica, or `redis`."""
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
        self._kinds: list[tuple[str, Role | None]] = []
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
            fault = Fault(kind, role or "redis", "", at - began)
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

    async def _do(self, fault: Fault, role: Role | None) -> None:
        if role is None:
            redis = self._deployment.redis
            if redis is not None:
                os.kill(redis.pid, signal.SIGSTOP)
                await asyncio.sleep(REDIS_AWAY_S)
                os.kill(redis.pid, signal.SIGCONT)
            return
        one = self._random.choice([r for r in self._deployment.overview.of(role) if r.address])
        fault.replica, pid = one.name, one.places[0].pid
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
            while one.name in {other.name for other in self._deployment.overview.of(role)}:
                await asyncio.sleep(0.02)
        else:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)

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
