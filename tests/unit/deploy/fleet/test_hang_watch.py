"""Replicas that hang are replaced, and others are not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fleet_world import Sitter, World, playing

from deploy.fleet.hang_watch import ANSWER_S, CALLS, HANG_LOOK_S, LATE_S
from outrider.errors import StoreUnavailable, Unavailable
from outrider.registry.registry import LEASE_S, RENEWAL_S, ROLES, ReplicaRecord, Role

pytestmark = pytest.mark.virtual

PAUSE_S = 5.0
TWO_EACH = {"num_targets": 2, "num_drafts": 2, "num_coordinators": 2}


class Announced:
    """A world whose replicas renew their leases, except those in `silent`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.silent: set[str] = set()

    async def renew(self) -> None:
        while True:
            for role in ROLES:
                for name in self.world.names(role):
                    if name not in self.silent and self.world.registry.failure is None:
                        record = ReplicaRecord(role, name, f"{name}:1", "h", 7)
                        await self.world.registry.announce(record)
            await asyncio.sleep(RENEWAL_S)

    def stop(self, name: str) -> None:
        """As SIGSTOP."""
        self.silent.add(name)
        self.world.actor(name).hangs = True

    def go_on(self, name: str) -> None:
        self.silent.discard(name)
        self.world.actor(name).hangs = False

    def all_names(self) -> set[str]:
        return {name for role in ROLES for name in self.world.names(role)}


@asynccontextmanager
async def announced(**settings: Any) -> AsyncIterator[Announced]:
    async with playing(**settings) as world:
        made = Announced(world)
        renewing = asyncio.create_task(made.renew())
        await asyncio.sleep(LEASE_S)
        try:
            yield made
        finally:
            renewing.cancel()
            for actor in world.machines.actors:
                actor.hangs = False


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("is_adopted", [False, True])
async def test_a_replica_that_hangs_is_killed_and_replaced_once(
    role: Role, is_adopted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with announced(**TWO_EACH) as fleet:
        world, loop = fleet.world, asyncio.get_running_loop()
        if is_adopted:
            await world.die()
            await world.come_back()
            renewing = asyncio.create_task(fleet.renew())
            await asyncio.sleep(LEASE_S + HANG_LOOK_S)
        others = fleet.all_names()
        hung, _ = world.names(role)
        others.discard(hung)
        fleet.stop(hung)
        hung_at = loop.time()
        async with asyncio.timeout(30):
            while hung not in world.machines.removed:
                await asyncio.sleep(0.01)
        took_s = loop.time() - hung_at
        assert took_s <= LEASE_S + HANG_LOOK_S + CALLS[role] * ANSWER_S + 0.1
        await asyncio.sleep(20)
        assert world.machines.starts == [role]
        assert len(fleet.all_names()) == 6
        assert others < fleet.all_names()
        assert f"{hung} is gone: it has hung" in caplog.text
        assert world.machines.removed == [hung]
        if is_adopted:
            renewing.cancel()


@pytest.mark.parametrize("role", ROLES)
async def test_a_replica_that_cannot_reach_redis_or_is_slow_to_answer_stays(role: Role) -> None:
    async with announced(**TWO_EACH) as fleet:
        cut_off, slow = fleet.world.names(role)
        before = fleet.all_names()
        fleet.silent.add(cut_off)
        fleet.world.actor(slow).hangs = True  # It renews its lease.
        await asyncio.sleep(60)
        assert fleet.all_names() == before
        assert not fleet.world.machines.starts


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_pause_of_5_s_is_no_hang(role: Role) -> None:
    async with announced(**TWO_EACH) as fleet:
        paused, _ = fleet.world.names(role)
        for start_s in (0.0, 0.3, 0.6, 0.9):
            await asyncio.sleep(start_s)
            fleet.stop(paused)
            await asyncio.sleep(PAUSE_S)
            fleet.go_on(paused)
            await asyncio.sleep(10)
        assert paused in fleet.all_names()
        assert not fleet.world.machines.starts


async def test_while_redis_is_away_and_just_afterwards_no_lease_counts() -> None:
    """Replicas then need time to announce themselves. One that hung meanwhile is replaced."""
    async with announced(**TWO_EACH) as fleet:
        world = fleet.world
        hung = world.names("draft")[0]
        before = fleet.all_names()
        world.registry.failure = StoreUnavailable("away")
        for name in before:
            fleet.stop(name)
        await asyncio.sleep(10 * LEASE_S)
        assert fleet.all_names() == before
        world.registry.failure = None
        world.registry.forget()
        await asyncio.sleep(LEASE_S)
        for name in before - {hung}:
            fleet.go_on(name)
        await asyncio.sleep(20)
        assert before - fleet.all_names() == {hung}
        assert world.machines.starts == ["draft"]


async def test_silence_does_not_count_while_the_reconciler_itself_runs_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine that is too busy, its time limits end late."""
    call = Sitter.call
    late_s = LATE_S + 0.1

    async def late(self: Sitter, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "ping" and late_s:
            await asyncio.sleep(ANSWER_S + late_s)
            raise Unavailable("no answer") from TimeoutError()
        return await call(self, method, *arguments, **options)

    async with announced() as fleet:
        monkeypatch.setattr(Sitter, "call", late)
        before = fleet.all_names()
        fleet.silent |= before
        await asyncio.sleep(60)
        assert fleet.all_names() == before
        late_s = 0.0
        fleet.stop(fleet.world.names("draft")[0])
        await asyncio.sleep(20)
        assert fleet.world.machines.starts == ["draft"]
