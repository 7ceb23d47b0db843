"""Replicas that announce themselves, leave, and disappear from the registry."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from coordinator.routing.discovery import READ_PERIOD_S, REFUSED_S, Discovery, Registered
from coordinator.routing.replica_pool import ReplicaPool, SessionRoute
from outrider.errors import Incompatible, LinkLost, StoreUnavailable, Unavailable
from outrider.interfaces.messages import ReplicaDescription
from outrider.registry.registry import (
    LEASE_S,
    RENEWAL_S,
    STARTS_LEASE_S,
    Figures,
    ReplicaRecord,
    Role,
    Starts,
)
from tests.support.memory_registry import MemoryRegistry
from tests.support.session_links import TOY, ScriptedLink, context_of, described, session

pytestmark = pytest.mark.virtual

SOON_S = READ_PERIOD_S + 0.1
"""By then the registry was read once more."""


def record(name: str, role: Role = "target", **fields: Any) -> ReplicaRecord:
    return ReplicaRecord(role=role, name=name, address=f"{name}:1", host="h", pid=7, **fields)


class World:
    """A registry, and a pool of targets that follows it."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry()
        self.pool = ReplicaPool("target")
        self.pool.first = TOY
        self.drafts = ReplicaPool("draft", self.pool)
        registered = Registered(self.registry, self._link, self._link)
        self.fleet = Discovery("a", self.pool, self.drafts, registered)
        self.following = asyncio.create_task(self.fleet.run())
        self.prepared: dict[str, ScriptedLink] = {}
        """By address, links to use in place of ones that answer at once."""
        self.links: list[tuple[str, ScriptedLink]] = []
        """All links that were made, with their addresses."""
        self._renewing: dict[str, asyncio.Task[None]] = {}
        self.says: dict[str, ReplicaRecord] = {}
        """By name, records that differ from `record`."""

    def _link(self, address: str) -> ScriptedLink:
        link = self.prepared.get(address) or ScriptedLink()
        self.links.append((address, link))
        return link

    def live(self, *names: str) -> None:
        """Starts to announce these replicas, and to renew their records."""
        for name in names:
            self._renewing[name] = asyncio.create_task(self._renew(name))

    def die(self, name: str) -> None:
        """Ends a replica: it neither renews its record nor answers."""
        self.fall_silent(name)
        for address, link in self.links:
            if address == f"{name}:1":
                link.away_until = math.inf

    def fall_silent(self, name: str) -> None:
        """Stops renewing a replica's record."""
        self._renewing.pop(name).cancel()

    async def _renew(self, name: str) -> None:
        while True:
            if self.registry.failure is None:
                await self.registry.announce(self.says.get(name, record(name)))
            await asyncio.sleep(RENEWAL_S)

    async def close(self) -> None:
        for task in [self.following, *self._renewing.values()]:
            task.cancel()
        await self.pool.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.close()


async def test_what_other_coordinators_run_is_known(world: World) -> None:
    def load() -> int:
        return sum(peer.load for peer in world.fleet.peers)

    for name, one in (("a", 5), ("b", 7), ("c", 11)):
        await world.registry.announce(record(name, "coordinator", load=one))
    await asyncio.sleep(SOON_S)
    assert load() == 18
    world.registry.failure = StoreUnavailable("away")
    await asyncio.sleep(SOON_S)
    assert load() == 18
    world.registry.failure = None
    await asyncio.sleep(LEASE_S)
    assert load() == 0


async def test_a_leaving_replica_gets_no_more_sessions(world: World) -> None:
    await world.registry.announce(record("a"))
    await asyncio.sleep(SOON_S)
    assert len(world.pool.present) == 1
    await world.registry.announce(record("a", leaving=True))
    await asyncio.sleep(SOON_S)
    assert len(world.pool.present) == 0
    assert list(world.pool.replicas) == ["a"]
    await world.registry.withdraw("target", "a")
    world.links[0][1].away_until = math.inf
    await asyncio.sleep(LEASE_S + 2 * SOON_S)
    assert list(world.pool.replicas) == []


async def test_a_leaving_replica_joins_if_no_other_has_its_weights(world: World) -> None:
    """A coordinator that starts during an upgrade may have to resume sessions of both weights."""
    world.prepared["b:1"] = ScriptedLink()
    world.prepared["b:1"].description = replace(TOY, weights_fingerprint="new")
    world.live("b")
    await asyncio.sleep(SOON_S)
    leaving = record("a", leaving=True, weights=TOY.weights)
    await world.registry.announce(leaving)
    known = world.prepared["b:1"].description.weights
    await world.registry.announce(record("c", leaving=True, weights=known))
    await asyncio.sleep(SOON_S)
    assert list(world.pool.replicas) == ["b", "a"]
    assert len(world.pool.present) == 1
    assert world.pool.newest(TOY.weights)
    route = SessionRoute[Any, Any](world.pool, context_of(session(), weights=TOY.weights))
    assert route.replica == "a"


async def test_a_replica_that_cannot_reach_the_registry_stays(world: World) -> None:
    """As long as it answers when asked, once per lease."""
    world.live("a")
    await asyncio.sleep(SOON_S)
    world.fall_silent("a")
    await asyncio.sleep(5 * LEASE_S)
    assert list(world.pool.replicas) == ["a"]
    world.links[0][1].away_until = math.inf
    await asyncio.sleep(LEASE_S + SOON_S)
    assert list(world.pool.replicas) == []
    assert world.links[0][1].is_closed


class HangingLink(ScriptedLink):
    """After `hangs`, its replica neither answers nor closes its connections."""

    hangs = False

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        if self.hangs:
            await asyncio.sleep(timeout_s)
            raise Unavailable("no answer")
        return await super().describe(timeout_s)


async def test_a_hung_replica_gets_no_sessions_after_5_s_and_returns_when_it_answers(
    world: World,
) -> None:
    """Its sessions are told, so that they go on elsewhere."""
    loop = asyncio.get_running_loop()
    link = world.prepared["a:1"] = HangingLink()
    world.live("a", "b")
    await asyncio.sleep(SOON_S)
    routes = [SessionRoute[Any, Any](world.pool, context_of(session(name=n))) for n in "01234567"]
    there = [route for route in routes if route.replica == "a"]
    waiting = [asyncio.create_task(route.take(60.0)) for route in there]
    world.fall_silent("a")
    link.hangs, hung_at = True, loop.time()
    while "a" in world.pool.replicas:
        await asyncio.sleep(0.01)
    assert LEASE_S - RENEWAL_S < loop.time() - hung_at < 5.0
    for one in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(one, LinkLost)
    assert there
    world.prepared["a:1"] = ScriptedLink()
    world.live("a")
    await asyncio.sleep(SOON_S)
    assert {*world.pool.replicas} == {"a", "b"}


async def test_a_replica_whose_address_has_a_new_owner_is_removed(world: World) -> None:
    """Although the new one answers there, as when a replica takes the port of one that died."""
    await world.registry.announce(record("a"))
    await asyncio.sleep(SOON_S)
    world.live("b")
    world.says["b"] = replace(record("b"), address="a:1")
    await asyncio.sleep(2 * LEASE_S)
    assert list(world.pool.replicas) == ["b"]
    await asyncio.sleep(2 * LEASE_S)
    assert list(world.pool.replicas) == ["b"]


async def test_a_replica_known_from_the_start_is_followed_too(world: World) -> None:
    gone = ScriptedLink()
    for name, link in (("a", ScriptedLink()), ("b", gone)):
        await world.pool.join(name, link)
    gone.away_until = math.inf
    world.live("a")
    await asyncio.sleep(LEASE_S)
    assert list(world.pool.replicas) == ["a", "b"]
    await asyncio.sleep(2 * SOON_S)
    assert list(world.pool.replicas) == ["a"]
    assert world.links == []


async def test_a_replica_that_cannot_join_is_tried_again(world: World) -> None:
    link = world.prepared["a:1"] = described(replace(TOY, vocab_size=7))
    world.live("a")
    await asyncio.sleep(SOON_S)
    assert link.is_closed
    world.prepared.clear()
    await asyncio.sleep(REFUSED_S - 0.2)
    assert [address for address, _ in world.links] == ["a:1"]
    assert list(world.pool.replicas) == []
    await asyncio.sleep(SOON_S)
    assert [address for address, _ in world.links] == ["a:1", "a:1"]
    assert list(world.pool.replicas) == ["a"]


async def test_a_registry_that_comes_back_empty_removes_no_replica_at_once(world: World) -> None:
    """Nor does one that is away. Live replicas may announce themselves again for a lease."""
    world.live("a", "b")
    await asyncio.sleep(SOON_S)
    world.registry.failure = StoreUnavailable("no answer")
    world.die("a")
    world.die("b")
    await asyncio.sleep(10 * LEASE_S)
    world.registry.failure = None
    await asyncio.sleep(LEASE_S - SOON_S)
    assert list(world.pool.replicas) == ["a", "b"]
    world.live("b")
    await asyncio.sleep(3 * SOON_S)
    assert list(world.pool.replicas) == ["b"]


async def test_a_pool_learns_what_is_being_started_until_the_announcement_ends(
    world: World,
) -> None:
    """While the registry cannot be read, the last announcement holds."""
    announced = [Starts("target", ("target-3",), expected=True), Starts("draft")]
    await world.registry.announce_starts(announced)
    await asyncio.sleep(SOON_S)
    assert [world.pool.starts, world.drafts.starts] == announced
    world.registry.failure = StoreUnavailable("away")
    await asyncio.sleep(2 * STARTS_LEASE_S)
    assert world.pool.starts == announced[0]
    world.registry.failure = None
    await asyncio.sleep(SOON_S)
    assert world.pool.starts == Starts("target")


async def test_a_read_of_the_registry_is_two_requests(world: World) -> None:
    world.following.cancel()
    await world.registry.announce(record("a"))
    world.registry.requests.clear()
    await world.fleet.refresh()
    assert len(world.registry.requests) == 2


async def test_a_start_waits_for_a_target_to_announce_itself(world: World) -> None:
    """At most for a lease, as after the registry lost its data."""
    loop = asyncio.get_running_loop()
    world.following.cancel()
    await asyncio.sleep(0)
    await world.fleet.begin()
    assert (loop.time(), list(world.pool.replicas)) == (pytest.approx(LEASE_S), [])
    loop.call_later(RENEWAL_S, world.live, "a")
    await world.fleet.begin()
    assert LEASE_S + RENEWAL_S <= loop.time() <= LEASE_S + RENEWAL_S + READ_PERIOD_S
    assert list(world.pool.replicas) == ["a"]


async def test_a_leaving_target_is_not_the_one_that_others_must_fit(world: World) -> None:
    """During an upgrade it may answer first, and the new one need not fit it."""
    world.following.cancel()
    await asyncio.sleep(0)
    world.pool.first = None
    new = replace(TOY, vocab_size=7)
    world.prepared["b:1"] = described(new)
    await world.registry.announce(record("a", leaving=True, weights=TOY.weights))
    await world.registry.announce(record("b", weights=new.weights))
    await world.fleet.begin()
    assert (list(world.pool.replicas), world.pool.first) == (["b"], new)


async def test_a_start_fails_if_there_are_drafts_and_none_fits(world: World) -> None:
    world.following.cancel()
    await asyncio.sleep(0)
    await world.registry.announce(record("a"))
    await world.registry.announce(record("d", "draft"))
    await world.registry.announce(record("e", "draft"))
    misfit = replace(TOY, reads_features=True)
    world.prepared = {"d:1": described(misfit), "e:1": ScriptedLink()}
    await world.fleet.begin()
    assert list(world.drafts.replicas) == ["e"]
    await world.drafts.leave("e")
    world.prepared["e:1"] = described(misfit)
    with pytest.raises(Incompatible, match="does not send"):
        await world.fleet.begin()


async def test_a_start_does_not_need_a_draft(world: World) -> None:
    world.following.cancel()
    await asyncio.sleep(0)
    await world.registry.announce(record("a"))
    await world.registry.announce(record("d", "draft"))
    world.prepared["d:1"] = described(away_until=math.inf)
    await world.fleet.begin()
    assert (list(world.pool.replicas), list(world.drafts.replicas)) == (["a"], [])


async def test_the_fleet_is_listed_from_the_registry_and_the_pools(world: World) -> None:
    """About itself a coordinator knows more than its last record."""
    await world.pool.join("t2", ScriptedLink())
    world.prepared["t9:1"] = described(away_until=math.inf)
    for one in (
        record("t1", device="cpu", figures=Figures(busy=0.5), model="m"),
        record("t9"),
        record("t10", leaving=True, weights=TOY.weights),
        record("a", role="coordinator", load=99),
        record("c", role="coordinator", load=3),
    ):
        await world.registry.announce(one)
    await asyncio.sleep(SOON_S)
    world.pool.replicas["t2"].away = True
    world.pool.replicas["t2"].routes = dict.fromkeys("xy")  # type: ignore[arg-type]
    own = Figures(tokens_per_second=80.0)
    shown = {one.name: one for one in world.fleet.replicas("served", 5, own)}
    assert {name: (one.state, one.load, one.here) for name, one in shown.items()} == {
        "a": ("serving", 5, True),
        "c": ("serving", 3, False),
        "t1": ("serving", 0, False),
        "t2": ("away", 2, False),
        "t9": ("joining", 0, False),
        "t10": ("leaving", 0, False),
    }
    assert (shown["a"].model, shown["a"].figures) == ("served", own)
    first = shown["t1"]
    assert (first.model, first.node, first.device, first.figures.busy) == ("toy", "h", "cpu", 0.5)
    assert (shown["t2"].node, world.fleet.heard_ms_ago) == ("", pytest.approx(100.0))
