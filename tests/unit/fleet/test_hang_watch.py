"""Replicas that hang are replaced, and others are not."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from outrider.errors import StoreUnavailable, Unavailable
from outrider.fleet.hang_watch import ANSWER_S, CALLS, HANG_CHECK_S, LATE_CALLS, LATE_S, HangWatch
from outrider.registry.registry import LEASE_S, RENEWAL_S, ROLES, ReplicaRecord, Role
from tests.support.fleet_world import Sitter, World, playing

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
            await asyncio.sleep(LEASE_S + HANG_CHECK_S)
        others = fleet.all_names()
        hung, _ = world.names(role)
        others.discard(hung)
        fleet.stop(hung)
        hung_at = loop.time()
        async with asyncio.timeout(30):
            while hung not in world.machines.removed:
                await asyncio.sleep(0.01)
        took_s = loop.time() - hung_at
        assert took_s <= LEASE_S + HANG_CHECK_S + CALLS[role] * ANSWER_S + 0.1
        await asyncio.sleep(20)
        assert world.machines.starts == [role]
        assert len(fleet.all_names()) == 6
        assert others < fleet.all_names()
        assert f"{hung} is gone: it has hung" in caplog.text
        assert world.machines.removed == [hung]
        if is_adopted:
            renewing.cancel()


@pytest.mark.parametrize("role", ROLES)
async def test_a_new_reconciler_ends_a_hung_replica_before_it_stops_waiting_for_an_answer(
    role: Role,
) -> None:
    """The others are taken over, although none has a lease here."""
    async with announced(**TWO_EACH) as fleet:
        world, loop = fleet.world, asyncio.get_running_loop()
        hung, _ = world.names(role)
        others = fleet.all_names() - {hung}
        fleet.stop(hung)
        await world.die()
        began_at = loop.time()
        await world.come_back()
        took_s = loop.time() - began_at - 1  # `come_back` sleeps for this time.
        assert took_s <= LEASE_S + HANG_CHECK_S + CALLS[role] * ANSWER_S + 0.1
        assert world.machines.removed == [hung]
        assert fleet.all_names() > others
        assert world.machines.starts == [role]


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


@contextmanager
def calls_that_end_late(late_s: float) -> Iterator[None]:
    """Calls of `ping` have no answer, and end `late_s` after their time limit."""
    call = Sitter.call

    async def late(self: Sitter, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "ping":
            await asyncio.sleep(ANSWER_S + late_s)
            raise Unavailable("no answer") from TimeoutError()
        return await call(self, method, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sitter, "call", late)
        yield


async def test_silence_does_not_count_while_the_reconciler_itself_runs_late() -> None:
    """On a machine that is too busy, its time limits end late."""
    async with announced() as fleet:
        before = fleet.all_names()
        with calls_that_end_late(LATE_S + 0.1):
            fleet.silent |= before
            await asyncio.sleep(25)
            assert fleet.all_names() == before
        await asyncio.sleep(5)
        fleet.stop(fleet.world.names("draft")[0])
        await asyncio.sleep(20)
        assert fleet.world.machines.starts == ["draft"]


async def test_long_silence_counts_even_if_the_reconciler_always_runs_late() -> None:
    """Otherwise a hung replica would stay for ever. A long pause of the reconciler is one call."""
    async with announced() as fleet:
        hung = fleet.world.names("draft")[0]
        fleet.silent.add(hung)
        with calls_that_end_late(60):
            await asyncio.sleep(30)
        with calls_that_end_late(LATE_S + 0.1):
            await asyncio.sleep(45)
            assert not fleet.world.machines.starts
            await asyncio.sleep(LATE_CALLS * (ANSWER_S + LATE_S + 0.1))
        assert fleet.world.machines.starts == ["draft"]
        assert fleet.world.machines.removed == [hung]


async def test_a_check_is_one_request_to_redis() -> None:
    async with announced(**TWO_EACH) as fleet:
        world = fleet.world
        watch = HangWatch(world.registry, lambda: world.fleet.replicas)
        world.registry.requests.clear()
        await watch.check()
        assert len(world.registry.requests) == 1


async def test_an_unknown_error_of_the_registry_does_not_end_the_watch() -> None:
    async with announced() as fleet:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleet.world.registry, "leased", Mock(side_effect=RuntimeError("a bug")))
            await asyncio.sleep(5)
        fleet.stop(fleet.world.names("draft")[0])
        await asyncio.sleep(20)
        assert fleet.world.machines.starts == ["draft"]
        assert not fleet.world.running.done()


async def test_if_the_fleet_fails_the_watch_ends_too() -> None:
    """The reconciler then restarts."""
    async with announced() as fleet:
        world = fleet.world
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.fleet, "_step", Mock(side_effect=RuntimeError("a bug")))
            await asyncio.wait([world.running])
            read = Mock(side_effect=RuntimeError("read"))
            patch.setattr(world.registry, "leased", read)
            await asyncio.sleep(5)
        assert isinstance(world.running.exception(), ExceptionGroup)
        assert not read.called
