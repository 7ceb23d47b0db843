"""One replica of a deployment: its actors, from the start of its service to its end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, cast

from outrider.engine.tensor_parallel.rank_process import RankAssignment
from outrider.engine.tensor_parallel.rank_rpc import Rendezvous
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.registry.registry import ROLES, Engagement, Role
from outrider.replica.process_setup import Place

from .ray_cluster import Actor


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica."""

    name: str
    role: Role
    address: str
    """HOST:PORT; empty while it does not serve."""
    leaves: bool = False
    """Whether it gets no more work, and will end."""
    stale: bool = False
    """Whether it was started by another spec than the one that holds."""
    places: tuple[Place, ...] = ()
    """Of its ranks, the one that serves first; empty while it does not serve."""
    http_address: str = ""
    """HOST:PORT where a coordinator answers by HTTP; empty where it does not."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All replicas, the oldest first, and how many there should be."""

    wanted: Mapping[Role, int]
    replicas: tuple[ReplicaView, ...]
    hopeless: Role | None
    """A role of which there is none, and none can be started."""
    upgrades: bool = False
    """Whether the spec has changed, and there has not been a whole fleet made by it yet."""
    failures: tuple[str, ...] = ()
    """Why replicas did not start that are still missing."""

    def of(self, role: Role) -> list[ReplicaView]:
        """The replicas of a role."""
        return [one for one in self.replicas if one.role == role]

    def late(self, what: str, after_s: float) -> Unavailable:
        """That something has not come about in this time, and why, as far as that is known."""
        reasons = "; ".join(self.failures) or "see `outrider status` and the logs that it names"
        return Unavailable(f"not {what} after {after_s:g} s: {reasons}")

    @property
    def num_stale(self) -> int:
        """Replicas that an upgrade has still to replace. One counts until it has ended and another
        one, made by the spec that holds, serves in its place."""
        if not self.upgrades:
            return 0
        total = 0
        for role in ROLES:
            num_old = sum(one.stale for one in self.of(role))
            num_new = sum(bool(one.address) and not one.stale for one in self.of(role))
            total += max(num_old, self.wanted.get(role, 0) - num_new)
        return total

    def addresses(self, role: Role, *, http: bool = False) -> list[str]:
        """Where those of a role answer that stay, by gRPC or by HTTP: each HOST:PORT, the oldest
        replica's first."""
        found = [
            one.http_address if http else one.address for one in self.of(role) if not one.leaves
        ]
        # Two coordinators have one address while one is replaced by the other.
        return list(dict.fromkeys(filter(None, found)))


_log = logging.getLogger(__name__)

ERROR_GRACE_S = 2.0
"""How long after one rank of a model fails to start another may, before the reason is told."""
STOP_CALL_TIMEOUT_S = 5.0
"""What an actor may take to stop beyond the time it was given for running requests."""
SILENCE_S = 30.0
"""What an actor may take to answer for its state: Ray keeps the call while its machine pauses, and
tells at once of one that has died."""
QUIET_S = 1.0
"""A leaving replica that was sent nothing for so long is sent no more."""


class Replica:
    """The actors that are one replica: the first rank, which serves, and the others."""

    def __init__(self, role: Role, age: int, slot: int, plan: str) -> None:
        """`age` counts the replicas that the deployment has started; `slot` is its place among
        those of its role that are there now; `plan` names what it is made from."""
        self.role: Role = role
        self.age = age
        self.name = f"{role}-{age}"
        self.slot = slot
        self.plan = plan
        self.ranks: Sequence[Actor] = ()
        self.address = ""
        """HOST:PORT, once it serves."""
        self.http_address = ""
        """The same for HTTP, of a coordinator."""
        self.leaves = False

    @classmethod
    async def adopted(cls, name: str, ranks: Sequence[Actor]) -> Self | None:
        """The replica of a name, which an earlier reconciler has started and of which these actors
        are there; None where it does not serve, or not with all its ranks."""
        if ranks[0].rank:
            return None
        found: Engagement
        try:
            found, *placed = await asyncio.gather(
                ranks[0].call("engagement", timeout_s=SILENCE_S),
                *(actor.find_place(SILENCE_S) for actor in ranks),
            )
        except Unavailable:
            return None
        member = found.member
        if member is None or not all(placed) or len(ranks) != found.num_ranks:
            return None
        one = cls(*role_and_age(name), member.slot, member.plan)
        one.ranks, one.leaves = ranks, found.leaving
        one.address, one.http_address = found.address, found.http_address
        return one

    @property
    def leader(self) -> Actor:
        """The rank that serves."""
        return self.ranks[0]

    def view(self, plan: str) -> ReplicaView:
        """What others are told of it; `plan` is the one that holds now."""
        return ReplicaView(
            self.name, self.role, self.address, self.leaves, stale=self.plan != plan,
            places=tuple(actor.place for actor in self.ranks) if self.address else (),
            http_address=self.http_address,
        )  # fmt: skip

    async def begin(self, config: object, log_directory: str, timeout_s: float) -> None:
        """Starts its service, and the other ranks of its model."""
        leader, *followers = self.ranks
        starts = [leader.call("start", config, log_directory, timeout_s=timeout_s)]
        if followers:
            on_node = Counter(actor.place.node for actor in self.ranks)
            rendezvous: Rendezvous = await leader.call(
                "open_rendezvous", len(self.ranks), on_node[leader.place.node], timeout_s
            )
            for actor in followers:
                seat = RankAssignment(rendezvous, actor.rank, on_node[actor.place.node])
                call = actor.call(
                    "start", config, seat, timeout_s, log_directory, timeout_s=timeout_s
                )
                starts.append(call)
        await _all_or_error(*starts)
        found: Engagement = await leader.call("engagement", timeout_s=timeout_s)
        self.address, self.http_address = found.address, found.http_address

    async def ended(self) -> OutriderError | None:
        """Returns once any of its ranks has ended, and why, in the words of the rank that said so;
        None where it was told to."""
        waiting = [asyncio.create_task(actor.call("wait")) for actor in self.ranks]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        errors = [
            OutriderError(f"{actor.name}: {error}")
            for actor, task in zip(self.ranks, waiting, strict=True)
            if task in done and (error := task.exception()) is not None
        ]
        return errors[0] if errors else None

    async def drain(self, timeout_s: float) -> None:
        """Announces that it leaves, and waits until nothing more is sent to it, at most so long.
        Sessions of a coordinator end while it stops."""
        if self.role == "coordinator":
            return
        try:
            await self.leader.call("leave", timeout_s=STOP_CALL_TIMEOUT_S)
            before = -1
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while (now := await self.leader.call("traffic")) != before:
                        before = now
                        await asyncio.sleep(QUIET_S)
        except Unavailable as error:
            _log.warning("%s did not drain: %s", self.name, error)

    async def stop(self, grace_s: float) -> None:
        """Lets what runs end within the time, and ends all ranks."""
        if self.ranks:
            await _stop(self.leader, grace_s)
        # They have ended with their leader, unless it died.
        await asyncio.gather(*(_stop(actor, grace_s) for actor in self.ranks[1:]))


def close_timeout_s(grace_s: float) -> float:
    """What ending all replicas in order may take: coordinators, and then those that they call; and
    before that whatever was about to be done."""
    return 2 * (grace_s + STOP_CALL_TIMEOUT_S) + STOP_CALL_TIMEOUT_S


def role_and_age(name: str) -> tuple[Role, int]:
    """Of a replica's name."""
    role, _, age = name.rpartition("-")
    return cast(Role, role), int(age)


async def _stop(actor: Actor, grace_s: float) -> None:
    try:
        await actor.call("stop", grace_s, timeout_s=grace_s + STOP_CALL_TIMEOUT_S)
    except OutriderError as error:
        _log.warning("the %s actor did not stop by itself: %s", actor.name, error)
    await actor.kill()


async def _all_or_error(*work: Awaitable[Any]) -> None:
    """Raises as soon as one of them fails: a `ConfigError` of any that fails within
    `ERROR_GRACE_S`, because ranks end when another does."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=ERROR_GRACE_S)
        raise_first([task.exception() for task in tasks if task.done()])
    finally:
        for task in tasks:
            task.cancel()


def raise_first(results: Sequence[object]) -> None:
    """Raises the first error of the results, a `ConfigError` before others."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: not isinstance(error, ConfigError)):
        raise error
