"""Who is in a pool while replicas come to the registry, leave it and are forgotten by it. On a
virtual clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from memory_registry import MemoryRegistry
from session_links import TOY, ScriptedLink, described

from coordinator.routing.discovery import READ_PERIOD_S, REFUSED_S, Discovery
from coordinator.routing.replica_pool import ReplicaPool
from outrider.errors import Incompatible, StoreUnavailable
from outrider.registry.registry import LEASE_S, RENEWAL_S, Figures, ReplicaRecord, Role

pytestmark = pytest.mark.virtual

SOON_S = READ_PERIOD_S + 0.1
"""By then the roster has looked once more."""


def record(name: str, role: Role = "target", **fields: Any) -> ReplicaRecord:
    return ReplicaRecord(role=role, name=name, address=f"{name}:1", host="h", pid=7, **fields)


class World:
    """A registry, and a pool of targets that is kept in step with it."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry()
        self.pool = ReplicaPool("target")
        self.pool.first = TOY
        self.drafts = ReplicaPool("draft", self.pool)
        self.fleet = Discovery("a", self.pool, self.drafts, self.registry, self._link)
        self.following = asyncio.create_task(self.fleet.run())
        self.prepared: dict[str, ScriptedLink] = {}
        """By address: links other than such as answer at once."""
        self.links: list[tuple[str, ScriptedLink]] = []
        """Those that were made, with their addresses."""
        self._renewing: dict[str, asyncio.Task[None]] = {}
        self.says: dict[str, ReplicaRecord] = {}
        """What those say that say something else than `record`."""

    def _link(self, role: str, address: str) -> ScriptedLink:
        link = self.prepared.get(address) or ScriptedLink()
        self.links.append((address, link))
        return link

    @property
    def addresses(self) -> list[str]:
        return [address for address, _ in self.links]

    def live(self, *names: str) -> None:
        """These say their names from now on, as announcers do."""
        for name in names:
            self._renewing[name] = asyncio.create_task(self._renew(name))

    def die(self, name: str) -> None:
        """It says nothing any more, to anybody."""
        self.fall_silent(name)
        for address, link in self.links:
            if address == f"{name}:1":
                link.away_until = math.inf

    def fall_silent(self, name: str) -> None:
        """It says its name no more."""
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


async def test_who_is_announced_joins_at_its_address_and_stays(world: World) -> None:
    world.live("a")
    await asyncio.sleep(SOON_S)
    assert list(world.pool.replicas) == ["a"]
    world.live("b")
    await asyncio.sleep(SOON_S)
    assert list(world.pool.replicas) == ["a", "b"]
    await asyncio.sleep(10 * LEASE_S)
    assert list(world.pool.replicas) == ["a", "b"]
    assert world.addresses == ["a:1", "b:1"]


async def test_one_that_says_that_it_leaves_gets_no_more_sessions(world: World) -> None:
    """It stays for those that it has, until it is announced no more."""
    await world.registry.announce(record("a"))
    await asyncio.sleep(SOON_S)
    assert world.pool.num_present == 1
    await world.registry.announce(record("a", leaving=True))
    await asyncio.sleep(SOON_S)
    assert world.pool.num_present == 0
    assert list(world.pool.replicas) == ["a"]
    await world.registry.withdraw("target", "a")
    world.links[0][1].away_until = math.inf
    await asyncio.sleep(LEASE_S + 2 * SOON_S)
    assert list(world.pool.replicas) == []


async def test_one_that_leaves_and_has_weights_of_its_own_joins_to_be_left(world: World) -> None:
    """A coordinator that comes in the middle of an upgrade is asked for sessions of both.
    Such as leave and have weights that others have do not join."""
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
    assert world.pool.num_present == 1
    assert world.pool.newest(TOY.weights)
    found = world.pool.find(b"", TOY.weights)
    assert found is not None
    assert found.name == "a"


async def test_silence_as_long_as_a_lease_takes_a_replica_out(world: World) -> None:
    """Counted from when the registry last had it, which is up to a lease behind its last word."""
    world.live("a", "b")
    await asyncio.sleep(10 + SOON_S)
    world.die("a")  # Its last word was at 10, the registry's of it at 12.5.
    await asyncio.sleep(LEASE_S + 1.5)
    assert list(world.pool.replicas) == ["a", "b"]
    await asyncio.sleep(1.5)
    assert list(world.pool.replicas) == ["b"]
    assert [link.is_closed for _, link in world.links] == [True, False]


async def test_one_that_only_the_registry_does_not_hear_stays(world: World) -> None:
    """For as long as it answers when it is asked, once a lease."""
    world.live("a")
    await asyncio.sleep(SOON_S)
    world.fall_silent("a")
    await asyncio.sleep(5 * LEASE_S)
    assert list(world.pool.replicas) == ["a"]
    world.links[0][1].away_until = math.inf
    await asyncio.sleep(LEASE_S + SOON_S)
    assert list(world.pool.replicas) == []


async def test_one_whose_address_another_one_has_is_gone_though_that_one_answers(
    world: World,
) -> None:
    """As where replicas of one machine take the ports of those that died: the old name does not
    stay beside the new one."""
    await world.registry.announce(record("a"))
    await asyncio.sleep(SOON_S)
    world.live("b")
    world.says["b"] = replace(record("b"), address="a:1")
    await asyncio.sleep(2 * LEASE_S)
    assert list(world.pool.replicas) == ["b"]
    await asyncio.sleep(2 * LEASE_S)
    assert list(world.pool.replicas) == ["b"]


async def test_one_that_was_there_from_the_beginning_is_followed_too(world: World) -> None:
    """It is not joined anew, and taken out where the registry does not have it."""
    gone = ScriptedLink()
    await world.pool.join_all({"a": ScriptedLink(), "b": gone})
    gone.away_until = math.inf
    world.live("a")
    await asyncio.sleep(LEASE_S)
    assert list(world.pool.replicas) == ["a", "b"]
    await asyncio.sleep(2 * SOON_S)
    assert list(world.pool.replicas) == ["a"]
    assert world.links == []


async def test_one_that_cannot_join_is_asked_again_after_a_while(world: World) -> None:
    link = world.prepared["a:1"] = described(replace(TOY, vocab_size=7))
    world.live("a")
    await asyncio.sleep(SOON_S)
    assert link.is_closed
    world.prepared.clear()
    await asyncio.sleep(REFUSED_S - 0.2)
    assert world.addresses == ["a:1"]
    assert list(world.pool.replicas) == []
    await asyncio.sleep(SOON_S)
    assert world.addresses == ["a:1", "a:1"]
    assert list(world.pool.replicas) == ["a"]


async def test_while_the_registry_is_away_nothing_changes(world: World) -> None:
    world.live("a", "b")
    await asyncio.sleep(SOON_S)
    for _ in range(2):
        world.registry.failure = StoreUnavailable("no answer")
        await asyncio.sleep(10 * LEASE_S)
        assert world.pool.num_present == 2
        world.registry.failure = None
        await asyncio.sleep(2 * LEASE_S)
        assert world.pool.num_present == 2


async def test_a_registry_that_comes_back_empty_takes_nobody_out_at_once(world: World) -> None:
    """Who lives has a lease's time to say its name again; who does not is out then."""
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


async def test_a_coordinator_begins_once_a_target_can_have_said_its_name(world: World) -> None:
    """As after a registry has lost everything."""
    loop = asyncio.get_running_loop()
    world.following.cancel()
    await asyncio.sleep(0)
    await world.fleet.begin()
    assert (loop.time(), list(world.pool.replicas)) == (pytest.approx(LEASE_S), [])
    loop.call_later(RENEWAL_S, world.live, "a")
    await world.fleet.begin()
    assert LEASE_S + RENEWAL_S <= loop.time() <= LEASE_S + RENEWAL_S + READ_PERIOD_S
    assert list(world.pool.replicas) == ["a"]


async def test_what_leaves_is_no_measure_for_what_comes(world: World) -> None:
    """A coordinator that begins in the middle of an upgrade: the target that leaves would answer
    first, and the new one not go with it."""
    world.following.cancel()
    await asyncio.sleep(0)
    world.pool.first = None
    new = replace(TOY, vocab_size=7)
    world.prepared["b:1"] = described(new)
    await world.registry.announce(record("a", leaving=True, weights=TOY.weights))
    await world.registry.announce(record("b", weights=new.weights))
    await world.fleet.begin()
    assert (list(world.pool.replicas), world.pool.first) == (["b"], new)


async def test_a_coordinator_does_not_begin_without_a_draft_because_none_fits(
    world: World,
) -> None:
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
    with pytest.raises(Incompatible, match="does not show"):
        await world.fleet.begin()


async def test_the_fleet_is_shown_as_the_registry_and_the_pools_know_it(world: World) -> None:
    """Away and leaving is what the pool has found; one that is no member yet is joining. Of itself
    a coordinator knows better than its last announcement."""
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
        "a": ("serving", 5, True), "c": ("serving", 3, False), "t1": ("serving", 0, False),
        "t2": ("away", 2, False), "t9": ("joining", 0, False), "t10": ("leaving", 0, False),
    }  # fmt: skip
    assert (shown["a"].model, shown["a"].figures) == ("served", own)
    first = shown["t1"]
    assert (first.model, first.node, first.device, first.figures.busy) == ("toy", "h", "cpu", 0.5)
    assert (shown["t2"].node, world.fleet.heard_ms_ago) == ("", pytest.approx(100.0))
