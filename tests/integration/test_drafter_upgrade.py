"""Drafters are replaced while requests run on local Ray, at once or after a trial."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from models import byte_level_tokenizer, save_tiny_eagle3, save_tiny_model
from test_fleet_deployment import under_load

from deploy.fleet.launcher import Deployment
from deploy.fleet.replica_set import Overview
from outrider.client import GenerateRequest
from outrider.config import load_config
from outrider.speculation.sampling_params import SamplingParams

VOCAB_SIZE = 320
NUM_TOKENS = 64
END_S = 180.0
TRIAL_S = 60.0
"""After this time two standard errors decide, as a busy machine may not reach four before."""

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(5 * END_S), pytest.mark.full]


async def done(deployment: Deployment) -> Overview:
    async with asyncio.timeout(END_S):
        while True:
            found: Overview = await deployment.reconciler.call("overview")
            if not found.num_stale and (found.trial is None or found.trial.state != "runs"):
                return found
            await asyncio.sleep(0.2)


async def test_drafters_are_replaced_under_load(tmp_path: Path) -> None:
    """No request fails, and texts do not change. After a trial, a copy of the target replaces a
    random model. Then an EAGLE-3 head on the target replaces the copy at once."""
    tokenizer = byte_level_tokenizer(VOCAB_SIZE)
    for seed, name in enumerate(("target", "random")):
        save_tiny_model(tmp_path / name, seed=seed, vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "target", copy)
    head = save_tiny_eagle3(tmp_path / "head", copy, range(VOCAB_SIZE))
    settings: dict[str, Any] = {
        "model": str(tmp_path / "target"), "draft_model": str(tmp_path / "random"),
        "device": "cpu", "dtype": "float32", "grpc_port": 0, "http": False,
        "length_control": False, "target_num_threads": 1, "draft_num_threads": 1,
    }  # fmt: skip
    requests = [
        GenerateRequest(
            tuple(range(first, first + 20)), sampling=SamplingParams(temperature=0.0),
            max_tokens=NUM_TOKENS, num_draft_tokens=4, ignore_eos=True,
        )
        for first in range(10, 14)
    ]  # fmt: skip
    async with Deployment(load_config(settings, {}), tmp_path / "state") as deployment:
        call = deployment.reconciler.call
        # The pause leaves CPU time for replicas that load at the same time.
        async with under_load(deployment, requests, pause_s=0.2):
            [first] = (await done(deployment)).of("draft")
            await call("begin_trial", {"draft_model": str(copy)}, 0.5, TRIAL_S)
            found = await done(deployment)
            assert found.trial is not None
            assert found.trial.state == "taken", found.trial
            [second] = (one for one in found.of("draft") if not (one.leaves or one.on_trial))
            assert second.name != first.name
            assert (await call("spec")).config.draft.directory == str(copy)
            await call("change", {"draft_model": f"eagle3:{head}"}, timeout_s=END_S)
            assert not (await done(deployment)).of("draft")
            assert (await call("spec")).config.target.head_directory == str(head)
