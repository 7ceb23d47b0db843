"""Deployments that draft from the target's hidden states, on the target or on a draft."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.client import Client, GenerateRequest
from outrider.config.deployment import load_config
from outrider.fleet.preflight import resolve_models
from outrider.fleet.spec import ACTORS, plan_fleet
from outrider.interfaces.request import RoundReport
from outrider.models.loading import load_model
from outrider.redis.embedded import EmbeddedRedis
from outrider.registry.registry import Role
from outrider.speculation.sampling_params import SamplingParams
from outrider.transport.codec import VERIFY
from outrider.transport.grpc_link import GrpcLink
from tests.support.models import (
    byte_level_tokenizer,
    save_tiny_eagle3,
    save_tiny_model,
    save_tiny_raw_eagle3,
)
from tests.support.mtp_models import MtpReference, mtp_target

PROMPT = tuple(range(10, 30))
VOCAB_SIZE = 320
NUM_TOKENS = 24
STARTING: tuple[Role, ...] = ("target", "draft", "coordinator")


@asynccontextmanager
async def actors_here(directory: Path, **settings: Any) -> AsyncIterator[dict[Role, str]]:
    """The address of the replica of each role."""
    given = load_config({"grpc_port": 0, "http": False, **settings}, {})
    found = await asyncio.to_thread(resolve_models, given)
    with EmbeddedRedis(directory) as redis, pytest.MonkeyPatch.context() as patch:
        for name in (  # These change the whole process.
            "coordinator.actor.log_to",
            "coordinator.actor.use_threads",
            "outrider.replica.logs.log_to",
            "outrider.replica.threads.use_threads",
        ):
            patch.setattr(name, lambda *_: None)
        address = replace(found.coordinator.redis, url=redis.url)
        found = replace(found, coordinator=found.coordinator.reaching(address))
        spec = plan_fleet(given, found, 0.0, "here", local=True)
        spec = spec.settled([(role, "here") for role in spec.demands])
        addresses: dict[Role, str] = {}
        async with AsyncExitStack() as exits:
            for role in STARTING:
                if role in spec.demands:
                    actor = ACTORS[role]()
                    config = spec.replica_config(role, spec.member(role, f"{role}-0", 0))
                    addresses[role] = await actor.start(config, "")
                    exits.push_async_callback(actor.stop, 0.0)
            yield addresses


@pytest.mark.parametrize(
    ("kind", "save", "has_draft"),
    [
        ("eagle3", save_tiny_eagle3, True),
        ("eagle3", save_tiny_eagle3, False),
        ("", save_tiny_raw_eagle3, False),
        ("mtp", None, False),
    ],
)
async def test_it_writes_what_its_target_writes(
    tmp_path: Path, kind: str, save: Callable[..., Path] | None, has_draft: bool
) -> None:
    """In every round but the first, the head proposes, because the look-up that is asked first
    never reaches this confidence. The head is random, and the log says that it does not fit."""
    target, tokenizer = tmp_path / "target", byte_level_tokenizer(VOCAB_SIZE)
    if save is None:  # The drafter's files have everything that it needs.
        MtpReference(mtp_target("glm4_moe", VOCAB_SIZE)).save(target)
        tokenizer.save_pretrained(target)
        heads = named = kind
    else:
        save_tiny_model(target, vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
        heads = str(save(tmp_path / "heads", target, range(0, VOCAB_SIZE, 3)))
        named = f"{kind}:{heads}" if kind else heads
    settings = {
        "model": str(target),
        "draft_model": f"hybrid:suffix,{named}",
        "device": "cpu",
        "dtype": "float32",
        "length_control": False,
        "eagle3_on": "draft" if has_draft else "target",
        "num_draft_tokens": 2,
        "hybrid_min_score": 4.0,
        "hybrid_model_tokens": 2,
    }
    module, _ = load_model(target)
    written = module.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False)
    request = GenerateRequest(
        PROMPT, sampling=SamplingParams(temperature=0.0), max_tokens=NUM_TOKENS, include_rounds=True
    )
    async with (
        actors_here(tmp_path / "redis", **settings) as addresses,
        Client(addresses["coordinator"]) as client,
    ):
        assert ("draft" in addresses) is has_draft
        link = GrpcLink(VERIFY, addresses["target"])
        described = await link.describe(10.0)
        await link.close()
        assert bool(described.features) is has_draft
        assert described.draft_note.startswith(f"drafter {heads} agrees with its target in ")
        events = [event async for event in client.generate(request)]
    rounds = [event for event in events if isinstance(event, RoundReport)]
    ids = [one for event in events for one in getattr(event, "token_ids", ())]
    assert ids[:NUM_TOKENS] == written[0, len(PROMPT) :].tolist()
    early = [entry.proposed_token_ids for entry in rounds[1 : NUM_TOKENS // 3]]
    assert {len(token_ids) for token_ids in early} == {2}
    # The head has logits for these tokens only; the fallback drafter may copy any token.
    if save is not None:
        assert all(token_id % 3 == 0 for token_ids in early for token_id in token_ids)
