"""How many replicas there are: as many as are wanted, whatever dies. Without Ray, on a virtual
clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.blueprint import Blueprint
from deploy.cluster import Actor, Demand
from deploy.fleet import HOPELESS_AFTER, Fleet
from deploy.placement import plan_placement
from deploy.replica import role_and_age
from outrider.clock import run_virtually
from outrider.config import load_config
from outrider.errors import ConfigError, EngineLost, StoreUnavailable, Unavailable
from outrider.fleet.membership import Engagement
from outrider.fleet.registry import ROLES, MemoryRegistry, Role
from outrider.hosting import Place

SETTINGS = {"engine": "emulated:vocab_size=10", "draft_model": "emulated", "stop_timeout_s": 5}


class Sitter(Actor):
    """An actor that serves until it is told how it ends."""

    def __init__(self, demand: Demand, rank: int, cluster: Machines) -> None:
        super().__init__(demand, None, rank)
        self._place = Place(1, "here")
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []
        self.num_items = 0
        self.silent = False
        self._cluster = cluster

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self.calls.append(method)
        if method == "start":
            self._cluster.starts.append(self.role)
        if method == "wait":
            await asyncio.shield(self.end)
        if method == "start":
            await self._cluster.loading.wait()
        if method == "start" and (error := self._cluster.failures.get(self.role)):
            raise error
        if method == "start" and not self.rank:
            self.config = arguments[0]
            return f"{self.name}:1"
        if method == "traffic":
            return SimpleNamespace(num_items=self.num_items)
        if method == "engagement":
            if self.silent:
                raise Unavailable("it does not answer")
            address = f"{self.name}:1" if hasattr(self, "config") else ""
            slot = self.config.slot if address else 0
            return Engagement(address=address, slot=slot, leaving="leave" in self.calls)
        return self._place if method == "ping" else None

    async def kill(self) -> None:
        self.calls.append("kill")


class Machines:
    """What `Cluster` does for a fleet, and what it was asked."""

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        """By role: what its actors raise when they start."""
        self.full = False
        self.actors: list[Sitter] = []
        self.removed: list[str] = []
        self.placing, self.loading = asyncio.Event(), asyncio.Event()
        """Whether places are found, and models loaded."""
        self.placing.set()
        self.loading.set()
        self.starts: list[str] = []
        """Roles whose actors were started behind the first ones."""

    async def place(
        self, demands: Sequence[tuple[Demand, type, type]], timeout_s: float
    ) -> list[Actor]:
        if self.full:
            raise ConfigError("there is no place")
        await self.placing.wait()
        made = [
            Sitter(demand, rank, self) for demand, *_ in demands for rank in range(demand.num_ranks)
        ]
        self.actors += made
        return list(made)

    async def remove(self, actors: Sequence[Actor]) -> None:
        self.removed += [actor.name for actor in actors]

    def _there(self) -> list[Sitter]:
        """Whose processes have not ended."""
        return [one for one in self.actors if one.name not in self.removed and not one.end.done()]

    async def replicas(self) -> list[str]:
        return sorted({actor.demand.name for actor in self._there()})

    async def find(self, demand: Demand) -> list[Actor]:
        found = [actor for actor in self._there() if actor.demand.name == demand.name]
        return sorted(found, key=lambda actor: actor.rank)


class World:
    """A fleet that runs."""

    def __init__(self, **settings: Any) -> None:
        self.machines, self.registry = Machines(), MemoryRegistry()
        config = load_config(SETTINGS | settings, {})
        blueprint = Blueprint(
            placement=plan_placement(config, {"CPU": 64}), deployment="d", log_directory="",
            local=True,
        )  # fmt: skip
        self.blueprint = blueprint
        self.fleet = self._fleet()
        self.running: asyncio.Task[Role] | None = None

    def _fleet(self) -> Fleet:
        cluster: Any = self.machines
        return Fleet(cluster, self.blueprint, self.registry)

    async def start(self) -> None:
        self.others = asyncio.all_tasks()
        await self.fleet.place()
        await self.fleet.begin("target", "draft")
        await self.fleet.begin("coordinator")
        self.running = asyncio.create_task(self.fleet.run())
        await asyncio.sleep(1)
        self.machines.starts.clear()

    async def die(self) -> None:
        """The process of the fleet ends, and with it whatever it was doing."""
        running = asyncio.all_tasks() - {asyncio.current_task()} - self.others
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def come_back(self) -> None:
        """Another one takes over."""
        self.fleet = self._fleet()
        await self.fleet.adopt()
        self.running = asyncio.create_task(self.fleet.run())
        await asyncio.sleep(1)

    def names(self, role: Role) -> list[str]:
        return [one.name for one in self.fleet.of(role) if one.address]

    def actor(self, name: str) -> Sitter:
        return next(actor for actor in self.machines.actors if actor.name == name)

    async def close(self) -> None:
        if self.running is not None:
            self.running.cancel()
        for actor in self.machines.actors:
            if not actor.end.done():
                actor.end.set_result(None)
        await self.fleet.close()


def play(scene: Callable[[World], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        world = World(**settings)
        try:
            await world.start()
            await scene(world)
        finally:
            await world.close()

    run_virtually(main())


def test_there_are_as_many_as_are_wanted_at_first_and_later() -> None:
    async def scene(world: World) -> None:
        assert [len(world.names(role)) for role in ("coordinator", "target", "draft")] == [1, 2, 1]
        assert await world.registry.wanted() == {"coordinator": 1, "target": 2, "draft": 1}
        await world.registry.want({"draft": 3, "coordinator": 2})
        await asyncio.sleep(2)
        assert [len(world.names(role)) for role in ("coordinator", "target", "draft")] == [2, 2, 3]
        await world.registry.want({"draft": 0, "target": 1})
        await asyncio.sleep(5)
        assert [len(world.names(role)) for role in ("coordinator", "target", "draft")] == [2, 1, 0]

    play(scene, num_targets=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_that_dies_with_any_of_its_ranks_is_replaced(rank: int) -> None:
    """What is left of it is ended, its place given back, and another takes its ports."""

    async def scene(world: World) -> None:
        [name] = world.names("target")
        dying = world.actor(f"{name}-rank-{rank}" if rank else name)
        dying.end.set_exception(EngineLost("no memory"))
        await asyncio.sleep(0.01)
        assert world.machines.removed == [name, f"{name}-rank-1"]
        await asyncio.sleep(5)
        [other] = world.names("target")
        assert other != name
        ports = [world.actor(one).config.port for one in (name, other)]
        assert ports == [7000, 7000]

    play(scene, engine="transformers", model="m", tensor_parallel_size=2, target_port=7000)


def test_one_that_is_not_wanted_stops_when_nothing_is_sent_to_it() -> None:
    """The youngest leaves. It is told so first, and stays for as long as it is asked anything, but
    no longer than `stop_timeout_s`."""

    async def scene(world: World) -> None:
        old, young = world.names("target")
        await world.registry.want({"target": 1})
        leaving, steps = world.actor(young), 0
        while "stop" not in leaving.calls and steps < 40:
            leaving.num_items += steps < 8
            await asyncio.sleep(0.25)
            steps += 1
        assert 8 <= steps <= 20
        assert leaving.calls.index("leave") < leaving.calls.index("traffic")
        await asyncio.sleep(0.5)
        assert leaving.calls[-2:] == ["stop", "kill"]
        assert world.names("target") == [old]
        await world.registry.want({"target": 2})
        await asyncio.sleep(2)
        busy = world.actor(world.names("target")[1])
        await world.registry.want({"target": 1})
        for _ in range(40):
            busy.num_items += 1
            await asyncio.sleep(0.25)
        assert "stop" in busy.calls

    play(scene, num_targets=2)


def test_starting_is_tried_again_more_and_more_seldom() -> None:
    async def scene(world: World) -> None:
        world.machines.failures["draft"] = Unavailable("no memory")
        await world.registry.want({"draft": 2})
        await asyncio.sleep(20)
        assert 4 <= world.machines.starts.count("draft") <= 7
        assert len(world.names("draft")) == 1
        del world.machines.failures["draft"]
        await asyncio.sleep(30)
        assert len(world.names("draft")) == 2
        assert world.running is not None
        assert not world.running.done()

    play(scene)


def test_one_that_is_not_wanted_any_more_never_starts() -> None:
    """Neither while it waits for a place nor while its model loads; nothing is left of it."""

    async def scene(world: World) -> None:
        for hold in (world.machines.placing, world.machines.loading):
            hold.clear()
            await world.registry.want({"draft": 2})
            await asyncio.sleep(2)
            assert len(world.fleet.of("draft")) == 2
            await world.registry.want({"draft": 1})
            await asyncio.sleep(2)
            hold.set()
            await asyncio.sleep(5)
            assert len(world.fleet.of("draft")) == len(world.names("draft")) == 1
        assert len(world.machines.removed) == 1, "one had a place"
        assert world.fleet.wanted["draft"] == 1

    play(scene)


def test_what_nobody_expects_counts_as_a_failed_start() -> None:
    async def scene(world: World) -> None:
        world.machines.failures["draft"] = RuntimeError("a bug")
        await world.registry.want({"draft": 2})
        await asyncio.sleep(5)
        assert world.machines.starts.count("draft") >= 2
        del world.machines.failures["draft"]
        await asyncio.sleep(20)
        assert len(world.names("draft")) == 2

    play(scene)


def test_a_fleet_without_a_target_that_none_can_replace_is_hopeless() -> None:
    async def scene(world: World) -> None:
        world.machines.failures["target"] = ConfigError("no such file")
        world.actor(world.names("target")[0]).end.set_exception(EngineLost("gone"))
        assert world.running is not None
        assert await asyncio.wait_for(world.running, 60) == "target"
        assert world.machines.starts.count("target") == HOPELESS_AFTER - 1

    play(scene)


def test_what_was_wanted_stays_while_the_registry_is_away() -> None:
    async def scene(world: World) -> None:
        world.registry.failure = StoreUnavailable("away")
        world.actor(world.names("draft")[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(5)
        assert len(world.names("draft")) == 1

    play(scene)


def test_a_registry_that_has_lost_what_was_wanted_is_told() -> None:
    async def scene(world: World) -> None:
        await world.registry.want({"draft": 2})
        await asyncio.sleep(2)
        world.registry.forget()
        await asyncio.sleep(2)
        assert await world.registry.wanted() == {"coordinator": 1, "target": 1, "draft": 2}
        assert len(world.names("draft")) == 2

    play(scene)


def test_one_that_never_starts_is_tried_for_ever() -> None:
    async def scene(world: World) -> None:
        world.machines.full = True
        await world.registry.want({"draft": 2})
        await asyncio.sleep(20 * 3600)
        world.machines.full = False
        await asyncio.sleep(60)
        assert len(world.names("draft")) == 2

    play(scene)


def test_no_coordinator_is_started_before_there_is_a_target() -> None:
    async def scene(world: World) -> None:
        world.machines.full = True
        for role in ("target", "coordinator"):
            world.actor(world.names(role)[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(2)
        assert not world.fleet.of("coordinator")
        world.machines.full = False
        await asyncio.sleep(10)
        assert world.machines.starts == ["target", "coordinator"]

    play(scene)


def test_names_go_on_where_a_deployment_of_the_same_name_ended() -> None:
    """And as many are wanted as its settings say, whatever the earlier one was told."""

    async def main() -> None:
        world = World()
        await world.registry.want({"draft": 3, "target": 1, "coordinator": 2})
        await world.registry.count_started(9)
        await world.start()
        assert [world.names(role) for role in ROLES] == [
            ["coordinator-9"],
            ["target-10"],
            ["draft-11"],
        ]
        await world.close()

    run_virtually(main())


def test_all_are_started_or_none() -> None:
    """Nothing is left of those that did start where another cannot."""

    async def main() -> None:
        world = World()
        world.machines.failures["draft"] = ConfigError("no such file")
        with pytest.raises(ConfigError, match="no such file"):
            await world.start()
        await world.fleet.close()
        assert all(actor.calls[-1] == "kill" for actor in world.machines.actors)

    run_virtually(main())


def test_a_fleet_that_returns_goes_on_with_the_replicas_that_are_there() -> None:
    """None is started or ended; later ones have other names, though the youngest has died
    meanwhile, and ports that are free."""

    async def scene(world: World) -> None:
        await world.registry.want({"draft": 3})
        await asyncio.sleep(2)
        before = [world.names(role) for role in ROLES]
        await world.die()
        youngest = max(world.names("draft"), key=role_and_age)
        slot = world.actor(youngest).config.slot
        world.actor(youngest).end.set_result(None)
        world.machines.starts.clear()
        await world.come_back()
        [coordinators, targets, drafts] = [world.names(role) for role in ROLES]
        assert [coordinators, targets] == before[:2]
        assert drafts[:2] == [name for name in before[2] if name != youngest]
        assert world.machines.starts == ["draft"]
        assert role_and_age(drafts[2]) > role_and_age(youngest)
        assert world.actor(drafts[2]).config.slot == slot
        assert not {*world.machines.removed} & {*coordinators, *targets, *drafts}
        world.actor(targets[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(5)
        assert len(world.names("target")) == 2, "those taken over are watched"

    play(scene, num_targets=2, target_port=7000)


def test_what_does_not_serve_when_a_fleet_returns_is_ended_and_started_anew() -> None:
    """One that was loading, and one that does not answer."""

    async def scene(world: World) -> None:
        world.machines.loading.clear()
        await world.registry.want({"draft": 2})
        await asyncio.sleep(2)
        [loading] = {one.name for one in world.fleet.of("draft")} - {*world.names("draft")}
        await world.die()
        world.machines.loading.set()
        [silent, _] = world.names("target")
        world.actor(silent).silent = True
        await world.come_back()
        assert {*world.machines.removed} == {loading, silent}
        assert [len(world.names(role)) for role in ROLES] == [1, 2, 2]

    play(scene, num_targets=2)


def test_one_that_was_leaving_leaves_when_a_fleet_returns() -> None:
    async def scene(world: World) -> None:
        stays, leaves = world.names("target")
        await world.registry.want({"target": 1})
        await asyncio.sleep(0.7)
        assert world.actor(leaves).calls[-1] != "kill"
        await world.die()
        await world.come_back()
        await asyncio.sleep(5)
        assert world.names("target") == [stays]
        assert world.machines.removed == [leaves]

    play(scene, num_targets=2)


def test_a_fleet_that_returns_without_its_registry_waits_for_it() -> None:
    """It knows neither how many are wanted nor which names were given. A registry that has lost
    everything is told of what is there."""

    async def scene(world: World) -> None:
        await world.registry.want({"draft": 3})
        await asyncio.sleep(2)
        await world.die()
        world.registry.failure = StoreUnavailable("away")
        coming = asyncio.create_task(world.come_back())
        await asyncio.sleep(5)
        assert not coming.done()
        world.registry.forget()
        world.registry.failure = None
        await coming
        assert len(world.names("draft")) == 3
        assert not world.machines.removed
        assert await world.registry.wanted() == {"coordinator": 1, "target": 1, "draft": 3}
        assert await world.registry.num_started() == 5

    play(scene)
