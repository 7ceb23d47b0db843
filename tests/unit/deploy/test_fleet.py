"""How many replicas there are: as many as are wanted, whatever dies."""

from __future__ import annotations

import asyncio
import re

import pytest
from fleet_world import World, play

from deploy.fleet.replica_set import HOPELESS_AFTER
from outrider.clock import run_virtually
from outrider.errors import ConfigError, EngineLost, StoreUnavailable, Unavailable
from outrider.registry.registry import ROLES


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
        assert re.fullmatch(
            r"draft-\d+ did not start: no memory", world.fleet.last_failures["draft"]
        )
        del world.machines.failures["draft"]
        await asyncio.sleep(30)
        assert len(world.names("draft")) == 2
        assert not world.fleet.last_failures
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
        async with asyncio.timeout(60):
            assert await world.running == "target"
        assert world.machines.starts.count("target") == HOPELESS_AFTER - 1

    play(scene)


def test_a_fleet_is_not_hopeless_for_want_of_a_registry() -> None:
    """In which what has started would have to be announced."""

    async def scene(world: World) -> None:
        world.machines.failures["target"] = StoreUnavailable("away")
        world.actor(world.names("target")[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(60)
        assert world.running is not None
        assert not world.running.done()
        world.machines.failures.clear()
        await asyncio.sleep(3)
        assert len(world.names("target")) == 1

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
        await world.registry.note_started(9)
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
