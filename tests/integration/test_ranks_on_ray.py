"""Ray places the ranks of a model, in one placement group for each model."""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import ray

from outrider.errors import ConfigError, Unavailable
from outrider.fleet.ray_cluster import Actor, Cluster, Demand, RayConnection
from outrider.replica.ray_actor import ActorLocation

PLACE_S = 60.0
ROOM_S, SLOW_S = 3.0, 6.0
NUM_GPUS = 4

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("ranks")]


class Sitter:
    async def ping(self) -> ActorLocation:
        return ActorLocation(os.getpid(), socket.gethostname())

    async def gpus(self) -> list[int]:
        return [int(found) for found in ray.get_gpu_ids()]

    async def group(self) -> str | None:
        group = ray.util.get_current_placement_group()
        return None if group is None else group.id.hex()


class Leader(Sitter):
    async def leads(self) -> bool:
        return True


class SlowSitter(Sitter):
    """Its process is ready after `SLOW_S`."""

    def __init__(self) -> None:
        time.sleep(SLOW_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A Ray cluster with four logical GPUs, which need not exist."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 4, "GPU": NUM_GPUS}))
        secrets = tmp_path_factory.mktemp("ranks") / "secrets"
        connection = RayConnection("", "outrider-test", secrets)
        await connection.connect()
    yield Cluster(connection.namespace, local=True)
    await connection.disconnect()


def demand(name: str, num_cpus: float, num_gpus: float, num_ranks: int = 1) -> Demand:
    role = name.partition("-")[0]
    return Demand(role, num_cpus, num_gpus, num_ranks, {}, name, (Leader, Sitter))


async def _asked(actors: list[Actor], method: str) -> list[object]:
    return list(await asyncio.gather(*(actor.call(method) for actor in actors)))


async def test_ranks_have_gpus_of_their_own_and_a_group_for_each_model(cluster: Cluster) -> None:
    asked = (("target", 0.5, 1.0, 3), ("draft", 0.25, 0.5, 2), ("coordinator", 0.25, 0.0))
    target, draft, alone = await cluster.place([demand(*one) for one in asked], PLACE_S, PLACE_S)
    actors = [*target, *draft, *alone]
    names = ["target", "target-rank-1", "target-rank-2", "draft", "draft-rank-1", "coordinator"]
    assert [actor.name for actor in actors] == names
    assert len({actor.location.pid for actor in actors}) == len(actors)
    used = await _asked(target, "gpus")
    assert len({str(gpus) for gpus in used}) == len(target)
    shared = await _asked(draft, "gpus")
    assert shared[0] == shared[1]
    assert shared[0] not in used
    assert await _asked(alone, "gpus") == [[]]
    groups = [await _asked(ranks, "group") for ranks in (target, draft, alone)]
    assert [len(set(found)) for found in groups] == [1, 1, 1]
    assert groups[0][0] != groups[1][0]
    assert groups[2] == [None]
    assert await target[0].call("leads")
    await cluster.remove(actors)


async def test_ranks_that_do_not_fit_are_refused_and_leave_nothing(cluster: Cluster) -> None:
    demands = [demand("draft", 0.25, 1.0, 2), demand("target", 0.5, 1.0, 3)]
    each = (r"target actor needs 3 times 0\.5", r"draft actor needs 2 times 0\.25")
    asked = rf"the ({'|'.join(each)}) CPUs and 1 GPUs.* together need 2 CPUs and 5 GPUs"
    for local, what in ((True, "there is no place"), (False, "no place within 3 s")):
        with pytest.raises(ConfigError, match=f"{what} .*{asked}"):
            await replace(cluster, local=local).place(demands, ROOM_S, PLACE_S)
    [fitting] = await cluster.place([demand("target", 0.5, 1.0, NUM_GPUS)], PLACE_S, PLACE_S)
    assert len(fitting) == NUM_GPUS
    await cluster.remove(fitting)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_processes_that_start_slowly_are_waited_for_if_there_is_room(
    cluster: Cluster, num_ranks: int
) -> None:
    """Ending them to start them again would take longer, perhaps for ever."""
    slow = replace(demand("target", 2.0, 0.0, num_ranks), classes=(SlowSitter, SlowSitter))
    one = replace(cluster, local=False)
    with pytest.raises(Unavailable, match=r"processes of target.* did not start within 4 s"):
        await one.place([slow], ROOM_S, 1.0)
    [placed] = await one.place([slow], ROOM_S, PLACE_S)
    assert len(placed) == num_ranks
    more = replace(slow, name="draft", num_cpus=5.0 - 2.0 * num_ranks)
    with pytest.raises(ConfigError, match=r"no place within 3 s for 1 of the actors"):
        await one.place([more], ROOM_S, PLACE_S)
    await cluster.remove(placed)


async def test_places_of_ranks_that_have_all_died_are_given_back(cluster: Cluster) -> None:
    other = Cluster("outrider-other", local=True)
    of_whom = {"target-1": cluster, "target-2": cluster, "target-3": other}
    placed = {}
    for name, one in of_whom.items():
        [placed[name]] = await one.place([demand(name, 0.25, 0.5, 2)], PLACE_S, PLACE_S)
    for name in ("target-1", "target-3"):
        await asyncio.gather(*(actor.kill() for actor in placed[name]))
    await cluster.free_groups(["target-2"])
    assert await _groups() == {"outrider-test/target-2", "outrider-other/target-3"}
    assert len(await _asked(placed["target-2"], "gpus")) == 2
    await cluster.clear()
    assert await _groups() == {"outrider-other/target-3"}
    await other.clear()
    assert await _groups() == set()


async def _groups() -> set[str]:
    found = await asyncio.to_thread(ray.util.placement_group_table)
    return {one["name"] for one in found.values() if one["state"] != "REMOVED"}
