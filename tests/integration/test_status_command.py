"""`outrider status` as a process of its own, with services that run here."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import recorded
from stack import Stack, running_stack

from deploy.fleet.local_state import DeploymentRecord, exclusive
from outrider.client import GenerateRequest
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    spec = EmulatedSpec(vocab_size=64, verify_ms=20.0)
    async with running_stack(EmulatedEngine(spec, "target"), None, tmp_path) as running:
        yield running


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


def record(stack: Stack) -> DeploymentRecord:
    """As if this process had started the services."""
    return recorded.record(
        grpc_address=stack.client.address,
        target_addresses=[stack.target_server.address],
        draft_addresses=[stack.draft_server.address],
        redis={"url": stack.redis.url, "key_prefix": "outrider:"},
        ray_address="",
        settings={"max_num_seqs": 64, "redis_password": "swordfish"},
    )


async def status(state: Path, *words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cli.main", "status", *words,
        stdout=PIPE, stderr=PIPE, env={**os.environ, "OUTRIDER_STATE_DIR": str(state)},
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def facts(state: Path, code: int, *words: str) -> Any:
    found, out, err = await status(state, "--json", *words)
    assert (found, out.count("\n")) == (code, 1), err
    return json.loads(out)


async def test_a_deployment_is_described(stack: Stack, state: Path) -> None:
    """Where everything answers, what it runs, by which fingerprints, and how many sessions."""
    recorded.run_here(state, record(stack))
    events = stack.client.generate(GenerateRequest((1, 2, 3), max_tokens=2000))
    await anext(events)
    found = await facts(state, 0)
    await events.aclose()
    assert (found["running"], found["serving"]) == (True, True)
    assert found["deployment"]["pid"] == os.getpid()
    assert found["deployment"]["uptime_s"] > 0
    assert found["deployment"]["settings"] == {"max_num_seqs": 64}
    assert found["coordinators"][0]["address"] == stack.client.address
    assert found["coordinators"][0]["num_running"] == 1
    assert found["coordinators"][0]["model"] == "model"
    assert found["targets"][0]["vocab_size"] == 64
    assert found["targets"][0]["weights_fingerprint"]
    assert found["drafts"][0]["model"] == "lookup"
    code, out, _ = await status(state)
    assert code == 0
    for word in ("drafted by ngram", stack.target_server.address, "serving", "0 sessions"):
        assert word in out


async def test_what_does_not_answer_is_told(stack: Stack, state: Path) -> None:
    """A draft that is gone is told and the rest serves; a target that is gone is an error."""
    recorded.run_here(state, record(stack))
    await stack.draft_server.stop()
    found = await facts(state, 0, "--timeout", "1")
    assert (found["drafts"][0]["serving"], found["targets"][0]["serving"]) == (False, True)
    assert found["drafts"][0]["error"]
    await stack.target_server.stop()
    found = await facts(state, 1, "--timeout", "1")
    assert (found["running"], found["serving"]) == (True, False)
    assert "not serving" in (await status(state, "--timeout", "1"))[1]


async def test_a_named_server_is_asked(stack: Stack, state: Path) -> None:
    found = await facts(state, 0, "--server", stack.client.address)
    assert found["coordinators"][0]["max_model_len"] == 8192
    assert found["deployment"] is None
    assert (await facts(state, 1, "--server", "127.0.0.1:1"))["running"] is False


async def test_nothing_runs_or_is_starting(state: Path) -> None:
    """The lock says which, without being taken."""
    assert (await status(state))[:2] == (1, "nothing runs\n")
    with exclusive(state):
        found = await facts(state, 1)
        assert found["running"] is False
        assert found["lease"]["holder"] == os.getpid()
        assert (await status(state))[1] == f"starting (pid {os.getpid()})\n"
    assert (await facts(state, 1))["lease"]["holder"] is None


async def test_bad_arguments(state: Path) -> None:
    for words in (("--server", "nowhere"), ("--timeout", "0")):
        code, out, err = await status(state, *words)
        assert (code, out) == (2, "")
        assert err.startswith(f"outrider: error: {words[0]}")
