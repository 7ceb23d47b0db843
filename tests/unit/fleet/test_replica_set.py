"""The fleet keeps the wanted numbers of replicas when replicas, ranks or the reconciler die."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import (
    ConfigError,
    EngineLost,
    StoreUnavailable,
    TargetUnavailable,
    Unavailable,
)
from outrider.fleet.hang_watch import ANSWER_S, CALLS
from outrider.fleet.replica_set import (
    CHECK_PERIOD_S,
    END_GRACE_S,
    FIRST_RETRY_DELAY_S,
    GIVE_UP_AFTER,
    RETRY_DELAY_S_MAX,
    ReplicaView,
    next_steps,
    role_and_age,
)
from outrider.limits import PROCESS_START_S
from outrider.registry.registry import ROLES, STARTS_LEASE_S, Role, Starts
from outrider.replica.ray_actor import ActorLocation
from tests.support.fleet_world import Sitter, World, playing

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_replica_that_dies_with_any_of_its_ranks_is_replaced(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(
        engine="transformers", model="m", tensor_parallel_size=2, target_port=7000
    ) as world:
        [name] = world.names("target")
        dying = world.actor(f"{name}-rank-{rank}" if rank else name)
        dying.end.set_exception(EngineLost("no memory"))
        await asyncio.sleep(0.2)
        assert not world.machines.removed
        if rank == 0:  # Only the end of the other rank says why a rank was lost.
            world.actor(f"{name}-rank-1").end.set_exception(Unavailable("killed"))
        await asyncio.sleep(0.4)
        assert world.machines.removed == [name, f"{name}-rank-1"]
        reason = "rank 1: no memory" if rank else "rank 0: no memory; rank 1: killed"
        assert f"{name} is gone: {reason}" in caplog.messages
        await asyncio.sleep(5)
        [other] = world.names("target")
        assert other != name
        assert [world.actor(one).config.port for one in (name, other)] == [7000, 7000]


async def test_a_replica_on_a_drained_node_leaves_once_another_serves() -> None:
    """Replicas on other nodes stay, and an upgrade may begin."""
    async with playing(num_targets=2) as world:
        old, other = world.names("target")
        world.actor(old).location = ActorLocation(1, "here", "there")
        world.machines.drained = {"there"}
        most = 0
        for _ in range(100):
            await asyncio.sleep(0.1)
            assert len(world.names("target")) >= 2
            most = max(most, len(world.names("target")))
        assert (old not in world.names("target"), other in world.names("target")) == (True, True)
        assert (most, len(world.names("target"))) == (3, 2)
        assert world.machines.starts == ["target"]


async def test_a_replica_on_a_drained_node_stays_while_no_other_node_has_room() -> None:
    async with playing() as world:
        (old,) = world.names("target")
        world.actor(old).location = ActorLocation(1, "here", "there")
        world.machines.room, world.machines.drained = len(world.machines.actors), {"there"}
        await asyncio.sleep(120)
        assert world.names("target") == [old]
        assert world.fleet.failed_role is None
        assert world.fleet.overview(upgrades=True, trial=None).num_stale == 0
        world.machines.room += 1
        await asyncio.sleep(60)
        assert len(world.names("target")) == 1
        assert world.names("target") != [old]


async def test_one_that_is_not_wanted_stops_when_nothing_is_sent_to_it() -> None:
    async with playing(num_targets=2) as world:
        old, young = world.names("target")
        await world.registry.want({"target": 1})
        leaving, steps = world.actor(young), 0
        while "stop" not in leaving.calls and steps < 40:
            leaving.num_items += steps < 8
            await asyncio.sleep(0.25)
            steps += 1
        assert 8 <= steps <= 20
        assert leaving.calls.index("leave") < leaving.calls.index("traffic")
        assert world.names("target") == [old]
        await world.registry.want({"target": 2})
        await asyncio.sleep(2)
        busy = world.actor(world.names("target")[1])
        await world.registry.want({"target": 1})
        for _ in range(40):
            busy.num_items += 1
            await asyncio.sleep(0.25)
        assert "stop" in busy.calls


@pytest.mark.parametrize("error", [Unavailable("no memory"), RuntimeError("a bug")])
async def test_starting_is_tried_again_more_and_more_seldom(error: Exception) -> None:
    async with playing() as world:
        world.machines.failures["draft"] = error
        await world.registry.want({"draft": 2})
        await asyncio.sleep(20)
        assert 4 <= world.machines.starts.count("draft") <= 7
        assert len(world.names("draft")) == 1
        if isinstance(error, Unavailable):
            [said] = world.fleet.failures
            assert re.fullmatch(r"draft-\d+ did not start: no memory", said)
        del world.machines.failures["draft"]
        await asyncio.sleep(30)
        assert len(world.names("draft")) == 2
        assert not world.fleet.failures
        assert not world.running.done()


async def test_a_process_that_never_starts_is_given_up_soon() -> None:
    """It may have died unnoticed. Requests wait for the target, but not longer than 600 s."""
    async with playing() as world:
        world.machines.placing.clear()
        world.actor(world.names("target")[0]).end.set_exception(EngineLost("gone"))
        room_s = world.spec.config.startup_timeout_s
        await asyncio.sleep(room_s + PROCESS_START_S + 2 * FIRST_RETRY_DELAY_S)
        [reason] = world.fleet.failures
        assert "did not start" in reason
        world.machines.placing.set()
        await asyncio.sleep(RETRY_DELAY_S_MAX)
        assert len(world.names("target")) == 1


async def test_one_that_is_not_wanted_any_more_never_starts() -> None:
    async with playing() as world:
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


async def test_a_fleet_without_a_target_that_none_can_replace_has_failed() -> None:
    async with playing() as world:
        world.machines.failures["target"] = ConfigError("no such file")
        world.actor(world.names("target")[0]).end.set_exception(EngineLost("gone"))
        async with asyncio.timeout(60):
            while world.fleet.failed_role is None:
                await asyncio.sleep(0.1)
        assert world.fleet.failed_role == "target"
        assert world.machines.starts.count("target") == GIVE_UP_AFTER - 1


async def test_a_replica_is_killed_once_the_head_answers_again() -> None:
    """A forgotten replica would run for ever."""
    async with playing() as world:
        [name] = world.names("draft")
        world.machines.failure = Unavailable("away")
        world.actor(name).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(5)
        assert world.machines.removed == []
        world.machines.failure = None
        await asyncio.sleep(5)
        assert world.machines.removed == [name]
        assert len(world.names("draft")) == 1


async def test_a_coordinator_that_finds_no_target_does_not_make_the_fleet_fail() -> None:
    """The only target may take longer to start than four attempts of the coordinator."""
    async with playing() as world:
        world.machines.failures["coordinator"] = TargetUnavailable("no target is known")
        world.actor(world.names("coordinator")[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(120)
        assert world.fleet.failed_role is None
        world.machines.failures.clear()
        await asyncio.sleep(60)
        assert len(world.names("coordinator")) == 1


async def test_what_was_wanted_stays_while_the_registry_is_away_or_has_lost_it() -> None:
    async with playing() as world:
        await world.registry.want({"draft": 2})
        await asyncio.sleep(2)
        world.registry.failure = StoreUnavailable("away")
        world.actor(world.names("draft")[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(5)
        assert len(world.names("draft")) == 2
        world.registry.failure = None
        world.registry.forget()
        await asyncio.sleep(2)
        assert await world.registry.wanted() == {"coordinator": 1, "target": 1, "draft": 2}
        await world.registry.note_started(world.fleet._num_started - 1)  # A write was lost.
        await asyncio.sleep(2)
        assert await world.registry.started() == world.fleet._num_started > 0
        assert len(world.names("draft")) == 2


async def test_the_number_of_started_replicas_is_written_only_if_redis_has_another() -> None:
    async with playing() as world:
        world.registry.requests.clear()
        await asyncio.sleep(10)
        assert not any("HSET" in names for names in world.registry.requests)
        world.actor(world.names("draft")[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(10)
        assert sum("HSET" in names for names in world.registry.requests) == 1
        assert await world.registry.started() == world.fleet._num_started == 4


async def test_what_is_being_started_is_announced() -> None:
    """With the time that the last start took, also after a restart of the reconciler."""
    async with playing(model="m", engine="transformers") as world:
        loop, machines = asyncio.get_running_loop(), world.machines

        async def announced() -> Starts:
            await asyncio.sleep(CHECK_PERIOD_S + 0.1)
            return (await world.registry.starts())["target"]

        assert await announced() == Starts("target", last_s=0.0)
        machines.loading.clear()
        world.actor(world.names("target")[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(END_GRACE_S)
        waits = await announced()
        assert (waits.names, waits.expected) == ((), True), "a pause before it is started"
        await asyncio.sleep(2 * FIRST_RETRY_DELAY_S)
        began = loop.time()
        [name] = (await announced()).names
        await asyncio.sleep(30)
        machines.loading.set()
        found = await announced()
        assert (found.names, found.expected) == ((), False)
        assert found.last_s == pytest.approx(loop.time() - began, abs=3)
        await world.die()
        await asyncio.sleep(STARTS_LEASE_S / 2)
        await world.come_back()
        assert await announced() == replace(found, num_failures=0)
        assert world.names("target") == [name]
        machines.loading.clear()
        world.fleet.use(world._plan(max_num_seqs=9))
        assert (await announced()).last_s == found.last_s
        world.fleet.use(world._plan(model="other"))
        assert (await announced()).last_s is None, "another model may take longer"
        assert (await world.registry.starts())["draft"].last_s == 0.0
        machines.loading.set()


async def test_a_replica_that_is_being_killed_is_not_starting() -> None:
    async with playing() as world:
        world.machines.failure = Unavailable("away")
        world.actor(world.names("target")[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(5)
        assert world.fleet.of("target")
        found = (await world.registry.starts())["target"]
        assert (found.names, found.expected) == ((), True)
        world.machines.failure = None


async def test_a_fleet_that_is_closed_announces_no_starts() -> None:
    async with playing() as world:
        assert await world.registry.starts()
    assert await world.registry.starts() == {}


async def test_a_fleet_can_be_closed_while_redis_is_away() -> None:
    async with playing() as world:
        world.registry.failure = StoreUnavailable("away")
    assert not world.fleet.replicas


async def test_a_target_that_fails_again_and_again_is_not_expected() -> None:
    async with playing() as world:
        world.machines.failures["target"] = ConfigError("no such file")
        world.actor(world.names("target")[0]).end.set_exception(EngineLost("gone"))
        expected = True
        async with asyncio.timeout(60):
            while expected:
                await asyncio.sleep(0.1)
                found = (await world.registry.starts())["target"]
                expected = found.expected or not found.num_failures
        assert found.num_failures == GIVE_UP_AFTER
        del world.machines.failures["target"]
        await asyncio.sleep(2 * RETRY_DELAY_S_MAX)
        assert (await world.registry.starts())["draft"] == Starts("draft", last_s=0.0)
        assert len(world.names("target")) == 1


async def test_coordinators_are_prepared_while_the_first_targets_load() -> None:
    world = World(num_coordinators=2)
    world.machines.loading.clear()
    starting = asyncio.create_task(world.fleet.start())
    await asyncio.sleep(1)
    calls = {one.name: one.calls for one in world.machines.actors}
    assert calls == {
        "coordinator-0": ["prepare"],
        "coordinator-1": ["prepare"],
        "target-2": ["start"],
        "draft-3": ["start"],
    }
    world.machines.loading.set()
    await starting
    assert calls["coordinator-1"] == ["prepare", "start", "engagement"]


async def test_no_coordinator_is_started_before_there_is_a_target() -> None:
    async with playing() as world:
        world.machines.room = 0
        for role in ("target", "coordinator"):
            world.actor(world.names(role)[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(2)
        assert not world.fleet.of("coordinator")
        world.machines.room = 99
        await asyncio.sleep(10)
        assert world.machines.starts == ["target", "coordinator"]


async def test_a_fleet_that_returns_goes_on_with_the_replicas_that_are_there() -> None:
    async with playing(num_targets=2, target_port=7000) as world:
        await world.registry.want({"draft": 3})
        await asyncio.sleep(2)
        before = [world.names(role) for role in ROLES]
        await world.die()
        youngest = max(world.names("draft"), key=role_and_age)
        index = world.actor(youngest).config.replica_index
        world.actor(youngest).end.set_result(None)
        world.machines.starts.clear()
        await world.come_back()
        [coordinators, targets, drafts] = [world.names(role) for role in ROLES]
        assert [coordinators, targets] == before[:2]
        assert drafts[:2] == [name for name in before[2] if name != youngest]
        assert world.machines.starts == ["draft"]
        assert world.machines.groups == {*coordinators, *targets, *drafts}
        assert role_and_age(drafts[2]) > role_and_age(youngest)
        assert world.actor(drafts[2]).config.replica_index == index
        assert not {*world.machines.removed} & {*coordinators, *targets, *drafts}
        world.actor(targets[0]).end.set_exception(EngineLost("gone"))
        await asyncio.sleep(5)
        assert len(world.names("target")) == 2, "those taken over are watched"


async def test_a_replica_that_is_slow_to_answer_a_new_reconciler_stays() -> None:
    """Also if it takes longer than a running reconciler's limits for hung replicas."""
    call, slow_s = Sitter.call, 4 * max(CALLS.values()) * ANSWER_S

    async def slow(self: Sitter, method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        if method == "engagement" and timeout_s:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.sleep(slow_s)
            except TimeoutError as error:
                raise Unavailable("no answer") from error
        return await call(self, method, *arguments, timeout_s=timeout_s)

    async with playing() as world:
        before = [world.names(role) for role in ROLES]
        await world.die()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sitter, "call", slow)
            await world.come_back()
        assert [world.names(role) for role in ROLES] == before
        assert world.machines.removed == []


async def test_a_coordinator_has_the_ports_of_the_one_that_it_replaces() -> None:
    """Also ports that were any free ones. The new coordinator starts before the old one ends. The
    replicas whose plan is the same stay."""
    async with playing(num_coordinators=2, grpc_port=7000, port=0) as world:
        others = world.names("target") + world.names("draft")

        def configs() -> list[Any]:
            return [world.actor(name).config for name in world.names("coordinator")]

        await world.registry.want({"coordinator": 3})
        await asyncio.sleep(10)
        old, slots = world.names("coordinator"), {7000, 7001, 7002}
        by_http = {one.ports["port"] for one in world.fleet.of("coordinator")}
        assert not any(one.takes_over_ports for one in configs())
        await world.upgrade(deadline_ms=999)
        for _ in range(600):
            assert {one.grpc_port for one in configs()} == slots
            assert len(configs()) <= len(slots) + 1
            await asyncio.sleep(0.1)
        assert not {*world.names("coordinator")} & {*old}
        assert all(one.takes_over_ports for one in configs())
        assert {one.port for one in configs()} == by_http
        assert len(configs()) == len(slots)
        assert world.names("target") + world.names("draft") == others


async def test_where_two_cannot_share_a_port_of_metrics_the_stale_coordinator_leaves_first() -> (
    None
):
    async with playing(telemetry="prometheus=9464") as world:
        [old] = world.names("coordinator")
        most = 0
        await world.upgrade(deadline_ms=999)
        for _ in range(300):
            most = max(most, len(world.fleet.of("coordinator")))
            await asyncio.sleep(0.1)
        assert most == 1
        assert world.names("coordinator") != [old]


@pytest.mark.parametrize("fails", [False, True])
async def test_an_upgrade_goes_on_where_not_all_that_are_wanted_find_a_place(fails: bool) -> None:
    """If the new replicas do not start, only one stale replica leaves for them."""
    async with playing(num_targets=4) as world:
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
        lengths = {world.actor(name).config.max_model_len for name in world.names("target")}
        assert fails or lengths == {999}


def view(
    role: Role, age: int, serves: bool = True, leaves: bool = False, stale: bool = False
) -> ReplicaView:
    return ReplicaView(f"{role}-{age}", role, "h:1" if serves else "", leaves, stale)


@given(
    st.dictionaries(st.sampled_from(ROLES), st.integers(0, 5)),
    st.lists(st.tuples(st.sampled_from(ROLES), st.booleans(), st.booleans()), max_size=12),
)
def test_then_there_are_as_many_as_are_wanted(
    wanted: Mapping[Role, int], kinds: list[tuple[Role, bool, bool]]
) -> None:
    """Those that do not serve leave first, then the youngest. Leaving ones do not count."""
    fleet = [view(role, age, serves, leaves) for age, (role, serves, leaves) in enumerate(kinds)]
    starts, leaving = next_steps(wanted, fleet)
    for role in ROLES:
        before = [one for one in fleet if one.role == role and not one.leaves]
        left = [one for one in before if one.name in leaving]
        number = wanted.get(role, 0)
        assert starts.count(role) == max(0, number - len(before))
        ranked = sorted(before, key=lambda one: not one.address)
        assert {*left} == {*ranked[number:]}


def test_stale_ones_are_replaced_one_by_one_and_role_by_role() -> None:
    wanted: dict[Role, int] = {"draft": 1, "target": 2, "coordinator": 1}
    roles: tuple[Role, ...] = ("coordinator", "target", "target", "draft")
    fleet = [view(role, age, stale=True) for age, role in enumerate(roles)]
    order: list[str] = []
    while (steps := next_steps(wanted, fleet)) != ([], []):
        starts, leaves = steps
        order += [f"+{role}" for role in starts] + [f"-{name}" for name in leaves]
        fleet = [one for one in fleet if one.name not in leaves]
        new = [view(role, 3 + len(order), serves=False) for role in starts]
        assert not new or next_steps(wanted, [*fleet, *new]) == ([], [])
        fleet += [replace(one, address="h:1") for one in new]
    assert order == [
        "+draft",
        "-draft-3",
        "+target",
        "-target-2",
        "+target",
        "-target-1",
        "+coordinator",
        "-coordinator-0",
    ]
    assert not any(one.stale for one in fleet)


def test_the_last_that_is_there_does_not_leave_for_one_that_may_never_come() -> None:
    last = view("target", 0, stale=True)
    roles: tuple[Role, ...] = ("target",)
    assert next_steps({"target": 2}, [last], (), roles, roles) == (["target"], [])
    assert next_steps({"target": 1}, [last], (), roles, roles) == ([], ["target-0"])
