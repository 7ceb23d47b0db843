"""A fleet that returns, or that goes by another plan, with the replicas that are there."""

from __future__ import annotations

import asyncio

import pytest
from fleet_world import World, play

from deploy.fleet.replica import SILENCE_S, role_and_age
from outrider.errors import ConfigError, EngineLost, StoreUnavailable
from outrider.registry.registry import ROLES


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
        assert world.machines.groups == {*coordinators, *targets, *drafts}
        assert role_and_age(drafts[2]) > role_and_age(youngest)
        assert world.actor(drafts[2]).config.slot == slot
        assert not {*world.machines.removed} & {*coordinators, *targets, *drafts}
        world.actor(targets[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(5)
        assert len(world.names("target")) == 2, "those taken over are watched"

    play(scene, num_targets=2, target_port=7000)


async def one_that_loads(world: World) -> str:
    """The name of a draft that has its place, and does not serve yet."""
    world.machines.loading.clear()
    await world.registry.want({"draft": 2})
    await asyncio.sleep(2)
    [loading] = {one.name for one in world.fleet.of("draft")} - {*world.names("draft")}
    return loading


def test_what_does_not_serve_when_a_fleet_returns_is_ended_and_started_anew() -> None:
    """One that was loading, and one that does not answer."""

    async def scene(world: World) -> None:
        loading = await one_that_loads(world)
        await world.die()
        world.machines.loading.set()
        [silent, _] = world.names("target")
        world.actor(silent).awake.clear()
        await world.come_back()
        assert {*world.machines.removed} == {loading, silent}
        assert [len(world.names(role)) for role in ROLES] == [1, 2, 2]

    play(scene, num_targets=2)


def test_those_that_are_silent_for_a_while_are_waited_for_all_at_once() -> None:
    """As where their machines pause; what does not serve is ended meanwhile."""

    async def scene(world: World) -> None:
        loading = await one_that_loads(world)
        before = world.names("target")
        await world.die()
        world.machines.loading.set()
        for name in before:
            world.actor(name).awake.clear()
        coming = asyncio.create_task(world.come_back())
        await asyncio.sleep(SILENCE_S - 2)
        assert world.machines.removed == [loading]
        for name in before:
            world.actor(name).awake.set()
        await coming
        assert world.names("target") == before
        await world.die()
        for name in before:
            world.actor(name).awake.clear()
        async with asyncio.timeout(SILENCE_S + 2):
            await world.come_back()
        assert not {*world.names("target")} & {*before}

    play(scene, num_targets=3)


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
        assert await world.registry.started() == 5

    play(scene)


def test_what_another_plan_changes_is_replaced_one_by_one() -> None:
    """Of each role as many serve as are wanted, all the time; what the plan leaves alone stays."""

    async def scene(world: World) -> None:
        before = {role: world.names(role) for role in ROLES}
        await world.upgrade(max_model_len=999, grpc_port=7100)
        for _ in range(300):
            targets = world.fleet.of("target")
            assert sum(bool(one.address) for one in targets) >= 2
            assert sum(not one.leaves for one in targets) <= 3
            assert world.names("coordinator")
            await asyncio.sleep(0.1)
        assert world.names("draft") == before["draft"], "nothing changes for it"
        for role in ("target", "coordinator"):
            assert not {*world.names(role)} & {*before[role]}
            assert len(world.names(role)) == len(before[role])
        [coordinator] = world.names("coordinator")
        assert world.actor(coordinator).config.grpc_port == 7100
        assert {world.actor(name).config.max_model_len for name in world.names("target")} == {999}
        names = [world.names(role) for role in ROLES]
        await world.die()
        await world.come_back()
        await asyncio.sleep(5)
        assert [world.names(role) for role in ROLES] == names, "that plan holds"

    play(scene, num_targets=2, grpc_port=7000)


def test_a_coordinator_has_the_ports_of_the_one_that_it_replaces() -> None:
    """And starts before that one ends, so that somebody listens on each port all the time."""

    def ports(world: World) -> list[int]:
        names = world.names("coordinator")
        return sorted({world.actor(name).config.grpc_port for name in names})

    async def scene(world: World) -> None:
        for slots in ([7000, 7001], [7000, 7001, 7002]):
            await world.registry.want({"coordinator": len(slots)})
            await asyncio.sleep(10)
            assert ports(world) == slots
            old = world.names("coordinator")
            added = world.actor(old[-1]).config
            assert not added.takes_over_ports, "it has a port of its own, which must be free"
            await world.upgrade(deadline_ms=999 + len(slots))
            for _ in range(600):
                assert ports(world) == slots
                assert len(world.names("coordinator")) <= len(slots) + 1
                await asyncio.sleep(0.1)
            assert not {*world.names("coordinator")} & {*old}
            assert all(
                world.actor(one).config.takes_over_ports for one in world.names("coordinator")
            )
            assert len(world.names("coordinator")) == len(slots)

    play(scene, num_coordinators=2, grpc_port=7000)


def test_where_two_cannot_share_a_port_of_metrics_the_stale_coordinator_leaves_first() -> None:
    async def scene(world: World) -> None:
        [old] = world.names("coordinator")
        most = 0
        await world.upgrade(deadline_ms=999)
        for _ in range(300):
            most = max(most, len(world.fleet.of("coordinator")))
            await asyncio.sleep(0.1)
        assert most == 1
        assert world.names("coordinator") != [old]

    play(scene, telemetry="prometheus=9464")


def test_where_another_one_finds_no_place_the_stale_one_leaves_first() -> None:
    async def scene(world: World) -> None:
        old = world.names("target")
        world.machines.room = len(world.machines._there())
        await world.upgrade(max_num_seqs=7)
        await asyncio.sleep(60)
        assert len(world.names("target")) == 2
        assert not {*world.names("target")} & {*old}

    play(scene, num_targets=2)


@pytest.mark.parametrize("fails", [False, True])
def test_an_upgrade_goes_on_where_not_all_that_are_wanted_find_a_place(fails: bool) -> None:
    """One after the other. But where the plan's replicas have their places and do not start, no
    more than one is given up for them."""

    async def scene(world: World) -> None:
        [lost, *old] = world.names("target")
        world.machines.room = len(world.machines._there()) - 1
        world.actor(lost).end.set_exception(EngineLost("its machine has gone"))
        if fails:
            world.machines.failures["target"] = ConfigError("no such file")
        await world.upgrade(max_model_len=999)
        for _ in range(1200):
            assert len(world.names("target")) >= 2
            await asyncio.sleep(0.1)
        stay = {*world.names("target")} & {*old}
        assert len(stay) == (2 if fails else 0)
        assert len(world.names("target")) == (2 if fails else 3)

    play(scene, num_targets=4)


def test_replicas_of_other_ranks_than_the_plans_serve_until_they_are_replaced() -> None:
    async def scene(world: World) -> None:
        before = world.names("target")
        await world.upgrade(tensor_parallel_size=2)
        for _ in range(200):
            assert any(one.address for one in world.fleet.of("target"))
            await asyncio.sleep(0.1)
        [target] = world.names("target")
        assert [target] != before
        assert len(await world.machines.find("target", target)) == 2
        await world.upgrade(tensor_parallel_size=1)
        await asyncio.sleep(20)
        assert {target, f"{target}-rank-1"} <= {*world.machines.removed}

    play(scene, engine="transformers", model="m")
