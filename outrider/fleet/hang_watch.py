"""Finds hung replicas. The process of a hung replica still exists, so Ray reports nothing.

A replica has hung if both hold:

- Its lease in the registry has ended, although Redis has answered this process for `LEASE_S`.
- After that, it has not answered `CALLS` calls by Ray, each within `ANSWER_S`.

A replica that is slow, or cannot reach Redis, answers a call, because its event loop runs. If the
machine is so busy that this process itself runs late, silence proves nothing, and does not count.
This says nothing of other machines. A replica that has not answered `LATE_CALLS` calls has hung,
even if this process always runs late.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outrider.errors import OutriderError, Unavailable
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import LEASE_S, Role

from .ray_cluster import Actor, repeated

_log = logging.getLogger(__name__)
HANG_CHECK_S = 0.25
"""Pause between two reads of the registry."""
ANSWER_S = 1.0
"""Time limit of each call."""
LATE_S = 0.5
"""If a call ends later than this after its time limit, this process runs late."""
CALLS: Mapping[Role, int] = {"coordinator": 2, "target": 5, "draft": 5}
"""Number of calls without an answer after which a replica has hung. Clients wait until a hung
coordinator is killed. For a hung target or draft, nobody waits: coordinators stop using it after
one call that it does not answer."""
LATE_CALLS = 20
"""Number of calls without an answer after which a replica has hung although this process runs
late. They take about 30 s. Calls are counted, not time, because this process may be paused."""


class Watched(Protocol):
    """A replica with a lease."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def ranks(self) -> Sequence[Actor]: ...
    def note_hang(self, error: Unavailable) -> None: ...


class HangWatch:
    def __init__(self, registry: RedisRegistry, replicas: Callable[[], Sequence[Watched]]) -> None:
        """`replicas` returns the replicas that should have a lease now."""
        self._registry = registry
        self._replicas = replicas
        self._trusted_from = math.inf
        """Time from which a missing lease raises doubt; infinite while Redis does not answer."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """By name, the replicas that are being asked whether they hang."""

    async def run(self) -> None:
        """Calls `check` every `HANG_CHECK_S`."""
        try:
            await repeated(self.check, HANG_CHECK_S, "hung replicas are not noticed")
        finally:
            for task in self._asking.values():
                task.cancel()

    async def check(self) -> None:
        """Reads the registry once, and begins to ask each replica without a lease."""
        watched = self._replicas()
        try:
            leased = await self._registry.leased([(one.role, one.name) for one in watched])
        except OutriderError as error:
            if self._trusted_from < math.inf:
                _log.info("hung replicas are not noticed while Redis does not answer: %s", error)
            self._trusted_from = math.inf
            return
        now = asyncio.get_running_loop().time()
        self._trusted_from = min(self._trusted_from, now + LEASE_S)
        if now < self._trusted_from:
            return
        for replica in watched:
            if replica.name not in leased and replica.name not in self._asking:
                self._begin(replica)

    def _begin(self, replica: Watched) -> None:
        name = replica.name
        self._asking[name] = asyncio.create_task(self._ask(replica))
        self._asking[name].add_done_callback(lambda _: self._asking.pop(name))

    async def _ask(self, replica: Watched) -> None:
        """Asks a replica until it answers, or has hung, or has died."""
        loop = asyncio.get_running_loop()
        num_calls = num_silences = 0
        while num_silences < CALLS[replica.role] and num_calls < LATE_CALLS:
            asked_at = loop.time()
            num_calls += 1
            try:
                await replica.ranks[0].call("ping", timeout_s=ANSWER_S)
                return
            except Unavailable as error:
                if not isinstance(error.__cause__, TimeoutError):
                    return
            num_silences += loop.time() - asked_at <= ANSWER_S + LATE_S
        replica.note_hang(Unavailable(f"it has hung: no lease, and no answer to {num_calls} calls"))
