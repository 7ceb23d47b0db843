"""A deployment on local Ray: three processes, real streams, a real store."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from deploy.fleet.launcher import Deployment
from deploy.fleet.ray_cluster import Cluster
from outrider.client import Client, Finished, GenerateRequest, Tokens
from outrider.config import DeploymentConfig, load_config
from outrider.limits import UNCOMMITTED_TOKENS_MAX
from outrider.registry.registry import ROLES, Role
from outrider.transport.link import Traffic

EMULATED = {
    "engine": "emulated:vocab_size=1000,verify_ms=10,draft_ms=1",
    "draft_model": "emulated",
    "grpc_port": 0,
    "port": 0,
    "stop_timeout_s": 0,
    "length_control": False,
}
PROMPT = tuple(range(10, 30))
MODELS: tuple[Role, ...] = ("target", "draft")
UNDER_WAY_S = 0.3
"""What was committed before the store stopped has reached the client by then."""


def _config(**settings: object) -> DeploymentConfig:
    return load_config(EMULATED | settings, {})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """One deployment for the tests of this module that leave it as it was."""
    async with Deployment(_config(), tmp_path_factory.mktemp("deployment")) as started:
        yield started


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("deployment")]


async def _traffic(deployment: Deployment, role: Role) -> Traffic:
    """Of the oldest replica."""
    cluster = Cluster(f"outrider-{deployment.name}", local=True)
    (actor,) = await cluster.find(role, deployment.replica(role).name)
    found: Traffic = await actor.call("traffic")
    return found


async def test_three_processes_and_traffic_on_each_hop(deployment: Deployment) -> None:
    """Draft, target and coordinator run in processes of their own, and a generation's rounds cross
    both hops: items go to the target and to the draft, and as many answers come back."""
    pids = {deployment.replica(role).places[0].pid for role in ROLES}
    assert len({*pids, os.getpid()}) == 4
    before = {role: await _traffic(deployment, role) for role in MODELS}
    async with Client(deployment.endpoints.coordinator) as client:
        completion = await client.complete(GenerateRequest(PROMPT, max_tokens=40, seed=1))
    assert len(completion.token_ids) == 40
    assert completion.metrics.num_draft_tokens > 0
    for role in MODELS:
        after = await _traffic(deployment, role)
        assert after.num_items - before[role].num_items >= completion.metrics.num_rounds // 2
        assert after.num_answers - before[role].num_answers > 0


async def test_the_coordinator_answers_by_http(deployment: Deployment) -> None:
    """Where its endpoints say, from its own process: health, the model, and a completion."""
    (address,) = deployment.endpoints.http
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        health = await http.get("/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["max_model_len"] > 0
        body = {"model": model["id"], "prompt": list(PROMPT), "max_tokens": 8, "seed": 1}
        answer = (await http.post("/v1/completions", json=body, timeout=30)).json()
        page = await http.get("/")
        async with asyncio.timeout(20):  # Until all have said where they are, and it has read that.
            while True:
                fleet = (await http.get("/api/fleet")).json()
                seen = [(one["role"], one["state"], one["node"]) for one in fleet["replicas"]]
                if all(node for _, _, node in seen):
                    break
                await asyncio.sleep(0.1)
    assert answer["usage"]["completion_tokens"] == 8
    assert page.text.startswith("<!doctype html>")
    node = socket.gethostname()
    assert seen == [(role, "serving", node) for role in ("coordinator", "target", "draft")]
    assert fleet["heard_ms_ago"] < 5000


async def test_tokens_stop_being_shown_when_redis_stops(deployment: Deployment) -> None:
    """Nothing is shown that is not committed: while Redis stands still no token comes, and when it
    goes on, generation does too and ends with every token asked for."""
    assert deployment.redis is not None
    num_tokens, some, silence_s = 600, 20, 1.0
    shown: list[int] = []
    enough = asyncio.Event()

    async def collect(client: Client) -> Finished:
        request = GenerateRequest(PROMPT, max_tokens=num_tokens, seed=2, num_draft_tokens=0)
        async for event in client.generate(request):
            if isinstance(event, Tokens):
                shown.extend(event.token_ids)
                if len(shown) >= some:
                    enough.set()
            if isinstance(event, Finished):
                return event
        raise AssertionError("the stream ended before its last event")

    async with Client(deployment.endpoints.coordinator) as client:
        collecting = asyncio.create_task(collect(client))
        async with asyncio.timeout(30):
            await enough.wait()
        os.kill(deployment.redis.pid, signal.SIGSTOP)
        try:
            # Commits that were under way may land. After that, nothing, though the target could
            # decode a hundred tokens meanwhile, and the session may: its bound is not reached.
            await asyncio.sleep(UNDER_WAY_S)
            before = len(shown)
            await asyncio.sleep(silence_s)
            assert some <= len(shown) == before < some + UNCOMMITTED_TOKENS_MAX // 2
        finally:
            os.kill(deployment.redis.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            finished = await collecting
    assert len(shown) == finished.usage.completion_tokens == num_tokens


async def test_a_redis_that_is_killed_is_started_again(deployment: Deployment) -> None:
    """With its data: who generates meanwhile waits, and gets every token."""
    assert deployment.redis is not None
    async with Client(deployment.endpoints.coordinator) as client:
        request = GenerateRequest(PROMPT, max_tokens=300, seed=3, ignore_eos=True)
        expected = (await client.complete(request)).token_ids
        generating = asyncio.create_task(client.complete(request))
        await asyncio.sleep(UNDER_WAY_S)
        pid = deployment.redis.pid
        os.kill(pid, signal.SIGKILL)
        assert (await generating).token_ids == expected
        assert deployment.redis.pid != pid
