"""Replicas that come, go and die under load, on local Ray: nobody but the clock notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from itertools import count

import pytest
import pytest_asyncio
import ray
import redis

from deploy.fleet.launcher import Deployment
from deploy.fleet.ray_cluster import RECONCILER, Actor, Demand
from outrider.client import Client, GenerateRequest, Started, Tokens
from outrider.config import load_config
from outrider.errors import ConfigError, DataLoss, NotFound
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import ROLES, Role
from outrider.speculation.sampling_params import Rule

SETTINGS = {
    "engine": "emulated:vocab_size=1000,verify_ms=10,draft_ms=1",
    "draft_model": "emulated",
    "grpc_port": 0,
    "port": 0,
    "num_targets": 2,
    "num_coordinators": 2,
    "target_num_cpus": 0.25,
    "draft_num_cpus": 0.1,
    "coordinator_num_cpus": 0.1,
}
NUM_TOKENS, NUM_STREAMS, NUM_SEEDS = 60, 2, 3
NUM_FIRST_TOKENS, NUM_LONG_TOKENS, NUM_LONG_STREAMS = 20, 400, 6
CHANGE_S = 120.0
"""What starting or ending some replicas may take on a busy machine."""
LOST_S = 30.0
"""By when a stream has ended whose session Redis has lost ..."""
AGAIN_S = 120.0
"""... and who asked next is answered, and what Redis has lost of the fleet is there again."""

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("deployment"),
    pytest.mark.timeout(5 * CHANGE_S),
]


class Load:
    """Clients that ask one thing after the other, and compare."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._expected: list[tuple[int, ...]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.num_answers = 0

    async def start(self) -> None:
        self._expected = [await self._ask(seed) for seed in range(NUM_SEEDS)]
        self._tasks = [asyncio.create_task(self._stream(first)) for first in range(NUM_STREAMS)]

    async def stop(self) -> None:
        """Once there have been some more answers. Raises what any of them met."""
        before = self.num_answers
        async with asyncio.timeout(CHANGE_S):
            while self.num_answers < before + NUM_STREAMS and not any(
                t.done() for t in self._tasks
            ):
                await asyncio.sleep(0.1)
        for task in self._tasks:
            if not task.done():
                task.cancel()
        for found in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found

    async def _stream(self, first: int) -> None:
        for index in count(first):
            seed = index % NUM_SEEDS
            assert await self._ask(seed) == self._expected[seed]
            self.num_answers += 1

    async def _ask(self, seed: int) -> tuple[int, ...]:
        """Ports are chosen here: where the only coordinator that was known is replaced before it
        has answered, the one in its place is asked."""
        tokens: list[int] = []
        async with Client(lambda: self._deployment.endpoints.coordinator) as client:
            async for event in client.generate(seeded(seed)):
                if isinstance(event, Tokens):
                    tokens += event.token_ids
        return tuple(tokens)


def seeded(seed: int, num_tokens: int = NUM_TOKENS) -> GenerateRequest:
    """A request that is answered with the same tokens whenever it is made."""
    return GenerateRequest(
        tuple(range(10 + seed, 40)), max_tokens=num_tokens, seed=seed, rule=Rule.COUPLED,
        ignore_eos=True,
    )  # fmt: skip


class LongStream:
    """One generation of a client's own, as far as it has come."""

    def __init__(self, coordinator: str, seed: int) -> None:
        self.seed = seed
        self.session_id = ""
        self.tokens: list[int] = []
        self._coordinator = coordinator
        self.task = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        async with Client(self._coordinator) as client:
            async for event in client.generate(seeded(self.seed, NUM_LONG_TOKENS)):
                if isinstance(event, Started):
                    self.session_id = event.session_id
                elif isinstance(event, Tokens):
                    self.tokens += event.token_ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """Two targets, two coordinators and a draft, which are kept as many."""
    async with Deployment(load_config(SETTINGS, {}), tmp_path_factory.mktemp("fleet")) as started:
        running = asyncio.create_task(started.wait())
        yield started
        assert not running.done()
        running.cancel()


@pytest_asyncio.fixture(loop_scope="module")
async def load(deployment: Deployment) -> AsyncIterator[Load]:
    found = Load(deployment)
    await found.start()
    yield found
    await found.stop()


def serving(deployment: Deployment, role: Role) -> set[str]:
    return {one.name for one in deployment.overview.of(role) if one.address and not one.leaves}


async def until(deployment: Deployment, role: Role, number: int, without: str = "") -> None:
    async with asyncio.timeout(CHANGE_S):
        while len(serving(deployment, role) - {without}) != number:
            await asyncio.sleep(0.1)


async def test_replicas_come_and_go_under_load(deployment: Deployment, load: Load) -> None:
    """One target and one coordinator fewer, a draft more, and back."""
    few: dict[Role, int] = {"target": 1, "coordinator": 1, "draft": 2}
    many: dict[Role, int] = {"target": 2, "coordinator": 2, "draft": 1}
    for wanted in (few, many):
        await deployment.reconciler.call("want", wanted)
        for role, number in wanted.items():
            await until(deployment, role, number)


@pytest.mark.parametrize("role", ["draft", "target", "coordinator"])
async def test_a_replica_that_is_killed_under_load_is_replaced(
    deployment: Deployment, load: Load, role: Role
) -> None:
    number = len(serving(deployment, role))
    one = deployment.replica(role)
    os.kill(one.places[0].pid, signal.SIGKILL)
    await until(deployment, role, number, without=one.name)


async def test_both_targets_are_killed_under_load(deployment: Deployment, load: Load) -> None:
    """Requests wait until there is another."""
    names = [(one.name, one.places[0].pid) for one in deployment.overview.of("target")]
    for _, pid in names:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(CHANGE_S):
        while serving(deployment, "target") & {name for name, _ in names}:
            await asyncio.sleep(0.1)
    await until(deployment, "target", 2)


async def test_the_load_decides_how_many_there_are(deployment: Deployment, load: Load) -> None:
    """A draft comes where sessions run without one, and a target goes where nobody would miss it;
    no request notices."""
    ask = deployment.reconciler.call
    await ask("want", {"target": 3, "draft": 0})
    await until(deployment, "draft", 0)
    await until(deployment, "target", 3)
    calm = {"queue_steps": 1000.0, "draft_waits": 1.0, "cooldown_s": 1.0, "calm_s": 1.0}
    await deployment.reconciler.change({f"autoscale_{name}": on for name, on in calm.items()})
    await ask("bound", {"target": (2, 3), "draft": (0, 1)})
    await until(deployment, "draft", 1)
    await until(deployment, "target", 2)
    await ask("bound", {"target": None, "draft": None})


async def test_other_settings_are_rolled_out_under_load(deployment: Deployment, load: Load) -> None:
    """All replicas are others then; a setting that cannot be had changes nothing."""
    before = {role: serving(deployment, role) for role in ROLES}
    with pytest.raises(ConfigError, match="engine"):
        await deployment.reconciler.change({"engine": "emulated:vocab_size=none"})
    with pytest.raises(ConfigError, match="another vocabulary"):
        await deployment.reconciler.change({"engine": "emulated:vocab_size=99999"})
    await deployment.reconciler.change({"max_num_seqs": 5, "run_ahead_rounds": 2})
    async with asyncio.timeout(2 * CHANGE_S):
        while deployment.config.target.max_num_seqs != 5 or deployment.overview.num_stale:
            await asyncio.sleep(0.1)
    for role in ROLES:
        assert not before[role] & serving(deployment, role)
        assert len(before[role]) == len(serving(deployment, role))


async def known(deployment: Deployment) -> dict[str, object]:
    """What Redis knows of the fleet."""
    registry = RedisRegistry(deployment.config.coordinator.redis, deployment.name)
    try:
        names = {role: {one.name for one in await registry.records(role)} for role in ROLES}
        started = await registry.started()
        return {"names": names, "wanted": await registry.wanted(), "started": started}
    finally:
        await registry.close()


async def test_redis_loses_everything_under_load(deployment: Deployment) -> None:
    """Streams in flight end as lost, behind tokens that are right; who asks now is answered, and
    the fleet says all again that it had said."""
    addresses = deployment.endpoints.coordinators
    before = await known(deployment)
    replicas = {role: serving(deployment, role) for role in ROLES}
    async with Client(",".join(addresses)) as client:
        whole = await asyncio.gather(
            *(client.complete(seeded(seed, NUM_LONG_TOKENS)) for seed in range(NUM_SEEDS))
        )
        expected = [list(one.token_ids) for one in whole]
        streams = [
            LongStream(addresses[index % len(addresses)], index % NUM_SEEDS)
            for index in range(NUM_LONG_STREAMS)
        ]
        async with asyncio.timeout(CHANGE_S):
            while any(len(one.tokens) < NUM_FIRST_TOKENS for one in streams):
                await asyncio.sleep(0.02)
        assert not any(one.task.done() for one in streams)
        assert deployment.redis is not None
        with redis.Redis.from_url(deployment.redis.url, protocol=2) as admin:
            admin.flushall()
        again = asyncio.gather(*(client.complete(seeded(seed)) for seed in range(NUM_SEEDS)))
        async with asyncio.timeout(LOST_S):
            ends = await asyncio.gather(*(one.task for one in streams), return_exceptions=True)
        async with asyncio.timeout(AGAIN_S):
            answers = await again
        for stream, end in zip(streams, ends, strict=True):
            assert isinstance(end, DataLoss), end
            assert NUM_FIRST_TOKENS <= len(stream.tokens) < NUM_LONG_TOKENS
            assert stream.tokens == expected[stream.seed][: len(stream.tokens)]
            with pytest.raises(NotFound):
                await client.get_session(stream.session_id)
        for seed, answer in enumerate(answers):
            assert list(answer.token_ids) == expected[seed][:NUM_TOKENS]
    give_up_at = asyncio.get_running_loop().time() + AGAIN_S
    while (now := await known(deployment)) != before:
        assert asyncio.get_running_loop().time() < give_up_at, now
        await asyncio.sleep(0.1)
    assert {role: serving(deployment, role) for role in ROLES} == replicas


async def test_a_reconciler_that_is_killed_under_load_returns(
    deployment: Deployment, load: Load
) -> None:
    """No replica ends for that; one that dies meanwhile is replaced."""
    handle = ray.get_actor(RECONCILER, f"outrider-{deployment.name}")
    reconciler = Actor(Demand(RECONCILER, 0, 0), handle)
    before = {role: serving(deployment, role) for role in ROLES}
    killed = deployment.replica("draft")
    place = await reconciler.call("ping")
    os.kill(place.pid, signal.SIGKILL)
    os.kill(killed.places[0].pid, signal.SIGKILL)
    await until(deployment, "draft", len(before["draft"]), without=killed.name)
    for role in ROLES:
        stayed = before[role] - {killed.name}
        assert stayed <= serving(deployment, role)
    assert (await reconciler.call("ping")).pid != place.pid
    assert deployment.config.target.max_num_seqs == 5  # As it was told before it was killed.
    await deployment.reconciler.call("want", {"draft": 2})
    await until(deployment, "draft", 2)
