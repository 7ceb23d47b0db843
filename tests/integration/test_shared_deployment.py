"""A deployment on local Ray whose target and draft each have two ranks."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from models import byte_level_tokenizer, save_tiny_model

from deploy.fleet.launcher import Deployment
from outrider.client import Client, GenerateRequest
from outrider.config import load_config
from outrider.models.loading import load_model
from outrider.speculation.sampling_params import SamplingParams

PROMPT = tuple(range(10, 30))
VOCAB_SIZE = 320
NUM_TOKENS = 24
END_S = 150.0
"""Ray looks again for a place that it has not found, after longer and longer delays."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("shared")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft with the same tokenizer."""
    directory = tmp_path_factory.mktemp("models")
    tokenizer = byte_level_tokenizer(VOCAB_SIZE)
    for seed, name in enumerate(("target", "draft")):
        save_tiny_model(directory / name, seed=seed, vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    """Five processes: two ranks of each model, and the coordinator."""
    settings = {
        "model": str(models / "target"), "draft_model": str(models / "draft"), "device": "cpu",
        "dtype": "float32", "grpc_port": 0, "port": 0, "stop_timeout_s": 0, "length_control": False,
        "tensor_parallel_size": 2, "draft_tensor_parallel_size": 2,
    }  # fmt: skip
    async with Deployment(load_config(settings, {}), tmp_path_factory.mktemp("shared")) as started:
        yield started


async def _greedy(deployment: Deployment, num_draft_tokens: int) -> tuple[int, ...]:
    request = GenerateRequest(
        PROMPT,
        sampling=SamplingParams(temperature=0.0),
        max_tokens=NUM_TOKENS,
        num_draft_tokens=num_draft_tokens,
    )
    async with Client(deployment.address) as client:
        completion = await client.complete(request)
    if num_draft_tokens:
        assert completion.metrics.num_draft_tokens > 0
    return tuple(completion.token_ids)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_shared_models_write_what_the_whole_target_writes(
    shared: Deployment, models: Path
) -> None:
    module, _ = load_model(models / "target")
    written = module.generate(  # type: ignore[operator]
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False
    )
    expected = tuple(written[0, len(PROMPT) :].tolist())
    for num_draft_tokens in (0, 4):
        assert await _greedy(shared, num_draft_tokens) == expected


@pytest.mark.timeout(3 * END_S)
async def test_a_replica_that_any_rank_leaves_is_replaced(shared: Deployment) -> None:
    before = shared.overview.of("target")[0]
    serving, other = before.places
    os.kill(other.pid, signal.SIGKILL)
    assert len(await _greedy(shared, 4)) == NUM_TOKENS
    async with asyncio.timeout(END_S):
        while _runs(serving.pid) or not shared.overview.addresses("target"):
            await asyncio.sleep(0.05)
    assert shared.overview.of("target")[0].name != before.name
    assert shared.overview.hopeless is None
