"""Replicas on local Ray are started, ended and killed under load, and no request fails."""

import asyncio
import os
import random
import re
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
import ray

from outrider.client import Client, GenerateRequest
from outrider.config.deployment import DeploymentConfig, load_config
from outrider.errors import ConfigError
from outrider.fleet.launcher import Deployment
from outrider.fleet.ray_cluster import RECONCILER, Actor
from outrider.registry.registry import ROLES, Role
from outrider.speculation.sampling_params import Rule
from tests.chaos.gateways import gateways, http_urls
from tests.chaos.load import Question, Shape, streamed
from tests.support.loaded_deployment import CHANGE_S, under_load, until

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
PROMPT = tuple(range(10, 30))
UNDER_WAY_S = 0.3
"""Tokens that were committed before the store stopped have reached the client by then."""
NUM_TOKENS, NUM_STREAMS, NUM_SEEDS = 60, 2, 3
NUM_HTTP_STREAMS = 50
NEW_SEATS = 60
"""A changed `max_num_seqs`. The streams of other tests still fit in one step."""
TRIAL_S = 10.0
CALM_S = 77.0

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("deployment"),
    pytest.mark.timeout(5 * CHANGE_S),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """Two targets, two coordinators and a draft. Tests leave other numbers behind, so a test that
    needs certain numbers calls `wanting`."""
    async with Deployment(load_config(SETTINGS, {}), tmp_path_factory.mktemp("fleet")) as started:
        yield started
        assert started.overview.failed_role is None


@pytest_asyncio.fixture(loop_scope="module")
async def load(deployment: Deployment) -> AsyncIterator[None]:
    requests = [
        GenerateRequest(
            tuple(range(10 + seed, 40)),
            max_tokens=NUM_TOKENS,
            seed=seed,
            rule=Rule.COUPLED,
            ignore_eos=True,
        )
        for seed in range(NUM_STREAMS)
    ]
    async with under_load(deployment, requests):
        yield


def serving(deployment: Deployment, role: Role) -> set[str]:
    return {one.name for one in deployment.overview.of(role) if one.address and not one.leaves}


async def until_serving(deployment: Deployment, without: str = "", **counts: int) -> None:
    def is_reached() -> bool:
        return all(len(serving(deployment, r) - {without}) == n for r, n in counts.items())

    await until(is_reached)


async def wanting(deployment: Deployment, **counts: int) -> None:
    """Scales to these numbers. Returns once exactly these replicas run."""
    await deployment.reconciler.call("want", counts)
    await until(lambda: all(len(deployment.overview.of(role)) == n for role, n in counts.items()))
    await until_serving(deployment, **counts)


async def test_a_coordinator_lists_the_fleet(deployment: Deployment) -> None:
    await wanting(deployment, coordinator=2, target=2, draft=1)
    address = deployment.overview.addresses("coordinator", http=True)[0]
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        expected = ["coordinator", "coordinator", "target", "target", "draft"]
        seen: list[tuple[str, ...]] = []
        # All replicas must have announced themselves, and the coordinator must have read it.
        async with asyncio.timeout(20):
            while seen != [(role, "serving", socket.gethostname()) for role in expected]:
                fleet = (await http.get("/api/fleet")).json()
                seen = [(one["role"], one["state"], one["node"]) for one in fleet["replicas"]]
                await asyncio.sleep(0.1)


async def test_http_streams_through_a_gateway_outlive_their_coordinator(
    deployment: Deployment, tmp_path: Path
) -> None:
    await wanting(deployment, coordinator=2)
    rng = random.Random(1)
    async with gateways(tmp_path / "coordinators", partial(http_urls, deployment)) as fronts:

        async def ask(seed: int, told: list[int]) -> list[int]:
            question = Question(Shape(), 300, seed)
            async for token_ids in streamed(fronts, question, rng):
                told += token_ids
            return told

        expected = [await ask(seed, []) for seed in range(NUM_SEEDS)]
        told: list[list[int]] = [[] for _ in range(NUM_HTTP_STREAMS)]
        asking = [asyncio.create_task(ask(i % NUM_SEEDS, one)) for i, one in enumerate(told)]
        await until(lambda: all(told))
        # On a busy machine, the first streams may end before the last begin.
        assert sum(len(one) < 300 for one in told) > NUM_HTTP_STREAMS // 2
        victim = deployment.overview.of("coordinator")[0]
        os.kill(victim.locations[0].pid, signal.SIGKILL)
        found = await asyncio.gather(*asking)
    assert found == [expected[index % NUM_SEEDS] for index in range(NUM_HTTP_STREAMS)]
    await until_serving(deployment, coordinator=2, without=victim.name)


async def test_a_redis_that_is_killed_is_started_again(deployment: Deployment) -> None:
    """Redis returns with its data. Requests that run meanwhile wait, and get every token."""
    async with Client(deployment.address) as client:
        request = GenerateRequest(PROMPT, max_tokens=300, seed=3, ignore_eos=True)
        expected = (await client.complete(request)).token_ids
        generating = asyncio.create_task(client.complete(request))
        await asyncio.sleep(UNDER_WAY_S)
        pid = deployment.redis.pid
        os.kill(pid, signal.SIGKILL)
        assert (await generating).token_ids == expected
        assert deployment.redis.pid != pid


async def test_replicas_that_are_killed_under_load_are_replaced(
    deployment: Deployment, load: None
) -> None:
    await wanting(deployment, coordinator=2, target=2, draft=1)
    killed = [one for role in ROLES for one in deployment.overview.of(role)][1:]
    assert len(killed) == 4
    for one in killed:
        os.kill(one.locations[0].pid, signal.SIGKILL)
    gone = {one.name for one in killed}
    await until(lambda: not gone & {one.name for one in deployment.overview.replicas})
    await until_serving(deployment, coordinator=2, target=2, draft=1)


async def test_replicas_that_hang_under_load_are_killed_and_replaced(
    deployment: Deployment, load: None
) -> None:
    hung = [deployment.overview.of(role)[0] for role in ROLES]
    pids = {one.locations[0].pid for one in hung}
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    gone = {one.name for one in hung}
    await until(lambda: not gone & {one.name for one in deployment.overview.replicas})
    await until_serving(deployment, coordinator=2, target=2, draft=1)
    for role in ROLES:
        assert not gone & serving(deployment, role)
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


async def test_replicas_come_and_go_under_load(deployment: Deployment, load: None) -> None:
    ask = deployment.reconciler.call
    await ask("want", {"coordinator": 1, "draft": 0})
    await until_serving(deployment, coordinator=1, draft=0)
    calm = {"queue_steps": 1000.0, "draft_waits": 1.0, "calm_s": 1.0}
    await ask("change", {f"autoscale_{name}": on for name, on in calm.items()})
    await ask("change", {"autoscale_targets": "1:2", "autoscale_drafts": "0:1"})
    await until_serving(deployment, draft=1, target=1)
    await ask("change", {"autoscale_targets": "", "autoscale_drafts": ""})


async def test_other_settings_are_rolled_out_under_load(deployment: Deployment, load: None) -> None:
    before = {role: serving(deployment, role) for role in ROLES}
    with pytest.raises(ConfigError, match="another vocabulary"):
        await deployment.reconciler.call("change", {"engine": "emulated:vocab_size=99999"})
    await deployment.reconciler.call("change", {"max_num_seqs": NEW_SEATS, "run_ahead_rounds": 2})

    def is_done() -> bool:
        return (
            deployment.config.target.max_num_seqs == NEW_SEATS and not deployment.overview.num_stale
        )

    await until(is_done, within_s=2 * CHANGE_S)
    for role in ROLES:
        assert not before[role] & serving(deployment, role)
        assert len(before[role]) == len(serving(deployment, role))


async def test_a_draft_is_tried_under_load(deployment: Deployment, load: None) -> None:
    """Here it is no faster or, on a busy machine, the difference is too small to decide."""
    await wanting(deployment, draft=1)
    await deployment.reconciler.call("begin_trial", {"draft_num_threads": 2}, 0.5, TRIAL_S)
    await until(lambda: (found := deployment.overview.trial) and found.state != "runs")
    found = deployment.overview.trial
    assert "tokens/s a session" in found.reason or re.match(r"[1-9]\d* sessions", found.reason)
    await until_serving(deployment, draft=1)


async def test_a_reconciler_that_is_killed_under_load_returns(
    deployment: Deployment, load: None
) -> None:
    handle = ray.get_actor(RECONCILER, f"outrider-{deployment.name}")
    reconciler = Actor(RECONCILER, handle)
    await wanting(deployment, draft=1)
    await deployment.reconciler.call("change", {"autoscale_calm_s": CALM_S})
    config: DeploymentConfig = (await deployment.reconciler.call("spec")).config
    assert config.autoscale.autoscale_calm_s == CALM_S
    before = {role: serving(deployment, role) for role in ROLES}
    killed = deployment.overview.of("draft")[0]
    place = await reconciler.call("ping")
    os.kill(place.pid, signal.SIGKILL)
    os.kill(killed.locations[0].pid, signal.SIGKILL)
    await until_serving(deployment, draft=len(before["draft"]), without=killed.name)
    for role in ROLES:
        assert before[role] - {killed.name} <= serving(deployment, role)
    assert (await reconciler.call("ping")).pid != place.pid
    found = (await deployment.reconciler.call("spec")).config
    assert found == config, "the newest settings are lost"
    await deployment.reconciler.call("want", {"draft": 0})
    await until_serving(deployment, draft=0)
