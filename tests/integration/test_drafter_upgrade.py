"""A drafter of another kind replaces one while requests run on local Ray."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.client import GenerateRequest
from outrider.config.deployment import load_config
from outrider.fleet.launcher import Deployment
from outrider.speculation.sampling_params import SamplingParams
from tests.support.loaded_deployment import under_load
from tests.support.models import byte_level_tokenizer, save_tiny_eagle3, save_tiny_model

VOCAB_SIZE = 320
NUM_TOKENS = 64
END_S = 180.0

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(5 * END_S), pytest.mark.full]


async def test_a_head_on_the_target_replaces_a_draft_under_load(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(VOCAB_SIZE)
    for seed, name in enumerate(("target", "random")):
        save_tiny_model(tmp_path / name, seed=seed, vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    head = save_tiny_eagle3(tmp_path / "head", tmp_path / "target", range(VOCAB_SIZE))
    settings: dict[str, Any] = {
        "model": str(tmp_path / "target"),
        "draft_model": str(tmp_path / "random"),
        "device": "cpu",
        "dtype": "float32",
        "grpc_port": 0,
        "http": False,
        "length_control": False,
        "target_num_threads": 1,
        "draft_num_threads": 1,
    }
    requests = [
        GenerateRequest(
            tuple(range(first, first + 20)),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=NUM_TOKENS,
            num_draft_tokens=4,
            ignore_eos=True,
        )
        for first in range(10, 14)
    ]
    async with Deployment(load_config(settings, {}), tmp_path / "state") as deployment:
        call = deployment.reconciler.call
        # The pause leaves CPU time for replicas that load at the same time.
        async with under_load(deployment, requests, pause_s=0.2), asyncio.timeout(END_S):
            await call("change", {"draft_model": f"eagle3:{head}"}, timeout_s=END_S)
            while (found := await call("overview")).num_stale:
                await asyncio.sleep(0.2)
            assert not found.of("draft")
            assert (await call("spec")).config.target.head_directory == str(head)
